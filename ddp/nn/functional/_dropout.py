"""Dropout as functions."""

from __future__ import annotations

from ddp._device import generator
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError
from ddp.ops import noise


def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeros each element with probability `p` and scales the rest by 1/(1 - p); the input itself unless training.

    Raises: ArgumentError unless 0 <= p <= 1.
    """
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout: p is a probability, not {p}")
    if not training or p == 0:
        return input
    return apply(noise.dropout, (input,), p=p, shape=input.shape, generator=generator(input.device))
