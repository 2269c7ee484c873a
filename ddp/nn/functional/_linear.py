"""Fully connected layers as functions."""

from __future__ import annotations

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ShapeError
from ddp.nn.functional._check import one_dtype
from ddp.ops import products


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias. input: (..., n), weight: (m, n), bias: (m,); returns (..., m).

    Raises: ShapeError, DtypeError.
    """
    one_dtype("linear", input, weight, bias)
    if weight.ndim != 2 or not input.ndim or input.shape[-1] != weight.shape[1]:
        raise ShapeError(f"linear: input {input.shape} and weight {weight.shape}: expected (..., n) and (m, n)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"linear: bias {bias.shape} for weight {weight.shape}: expected {weight.shape[:1]}")
    return apply(products.linear, (input, weight, bias))
