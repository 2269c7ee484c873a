"""Dropout as functions.

`inplace`: the result is written into the input, as by the forms that end in an underscore (and raises where these do).
"""

from __future__ import annotations

from ddp._device import generator
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.inplace import become
from ddp.errors import ArgumentError, ShapeError
from ddp.ops import noise


def _dropped(name: str, input: Tensor, p: float, training: bool, inplace: bool, shape: tuple[int, ...]) -> Tensor:
    if not 0 <= p <= 1:
        raise ArgumentError(f"{name}: p is a probability, not {p}")
    if not training or p == 0:
        return input
    result = apply(noise.dropout, (input,), p=p, shape=shape, generator=generator(input.device))
    return become(input, f"{name}_", result) if inplace else result


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeros each element with probability `p` and scales the rest by 1/(1 - p); the input itself unless training.

    Raises: ArgumentError unless 0 <= p <= 1. Source: Srivastava et al. 2014, JMLR 15, 1929-1958.
    """
    return _dropped("dropout", input, p, training, inplace, input.shape)


def dropout1d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As dropout, but whole channels fall. input: (N, C, L) or (C, L). Raises: ArgumentError, ShapeError."""
    return _channels("dropout1d", input, p, training, inplace, 1)


def dropout2d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As dropout, but whole channels fall. input: (N, C, H, W) or (C, H, W). Raises: ArgumentError, ShapeError."""
    return _channels("dropout2d", input, p, training, inplace, 2)


def _channels(name: str, input: Tensor, p: float, training: bool, inplace: bool, dims: int) -> Tensor:
    if input.ndim not in (dims + 1, dims + 2):
        raise ShapeError(f"{name}: input {tuple(input.shape)}: expected {dims + 2} dimensions, or {dims + 1}")
    return _dropped(name, input, p, training, inplace, (*input.shape[:-dims], *(1,) * dims))
