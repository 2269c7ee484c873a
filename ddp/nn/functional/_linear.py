"""Fully connected layers as functions."""

from __future__ import annotations

from ddp._engine import modes
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ShapeError
from ddp.nn.functional._check import one_dtype
from ddp.ops import products


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias. input: (..., n), weight: (m, n) or (n,), bias: (m,) or (); returns (..., m) or (...).

    Raises: ShapeError, DtypeError.
    """
    # The array's own attributes: this is called more often than anything else, and a property of ours is a call.
    x, w = input._array, weight._array
    b = None if bias is None else bias._array
    if (x.dtype != w.dtype or (b is not None and b.dtype != w.dtype)) and modes.state.autocast is None:
        one_dtype("linear", input, weight, bias)
    shape = w.shape
    if len(shape) != 2:
        return _vector(input, weight, bias)
    if not x.ndim or x.shape[-1] != shape[1]:
        raise ShapeError(f"linear: input {x.shape} and weight {shape}: expected (..., n) and (m, n)")
    if b is not None and b.shape != shape[:1]:
        raise ShapeError(f"linear: bias {b.shape} for weight {shape}: expected {shape[:1]}")
    return apply(products.linear, (input, weight, bias))


def _vector(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.ndim != 1 or not input.ndim or input.shape[-1] != weight.shape[0] or (bias is not None and bias.ndim):
        raise ShapeError(
            f"linear: input {input.shape} and weight {weight.shape}: expected (..., n) and (m, n), or (n,) and bias ()"
        )
    out = input @ weight
    return out if bias is None else out + bias


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input1^T @ weight[k] @ input2 + bias[k] for each k. input1: (..., n1), input2: (..., n2), weight: (m, n1, n2),
    bias: (m,); returns (..., m).

    Raises: ShapeError, DtypeError.
    """
    one_dtype("bilinear", input1, input2, weight, bias)
    lead = input1.shape[:-1]
    if (
        weight.ndim != 3
        or not input1.ndim
        or not input2.ndim
        or input2.shape[:-1] != lead
        or (input1.shape[-1], input2.shape[-1]) != weight.shape[1:]
    ):
        raise ShapeError(
            f"bilinear: inputs {input1.shape} and {input2.shape}, weight {weight.shape}: expected (..., n1), (..., n2) "
            "and (m, n1, n2)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bilinear: bias {bias.shape} for weight {weight.shape}: expected {weight.shape[:1]}")
    m, n1, n2 = weight.shape
    mixed = (input1 @ weight.permute(1, 0, 2).reshape(n1, m * n2)).reshape(*lead, m, n2)
    out = (mixed @ input2.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias
