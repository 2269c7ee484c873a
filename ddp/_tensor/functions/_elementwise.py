"""Elementwise functions."""

from __future__ import annotations

from typing import Any

from ddp._tensor.arithmetic import aligned, broadcast
from ddp._tensor.base import TensorBase, apply
from ddp._tensor.core import Tensor
from ddp._tensor.interop import as_tensor
from ddp.errors import DtypeError
from ddp.ops import choice


def where(condition: Tensor, input: Any, other: Any) -> Tensor:
    """`input` where `condition` (bool) holds, else `other`; all three broadcast. Raises: DtypeError, ShapeError."""
    if condition.dtype.kind != "b":
        raise DtypeError(f"where: the condition is bool, not {condition.dtype}")
    if not isinstance(input, TensorBase):
        input = as_tensor(input, device=condition.device)
    pair = aligned(input, other, "where")
    if pair is None:
        raise DtypeError(f"where: expected tensors or numbers, got {type(other).__name__}")
    for x in pair:
        broadcast(condition.shape, getattr(x, "shape", ()), "where")
    return apply(choice.where, (condition, *pair))


def maximum(input: Tensor, other: Tensor) -> Tensor:
    """The larger of both, elementwise."""
    return input.maximum(other)


def minimum(input: Tensor, other: Tensor) -> Tensor:
    """The smaller of both, elementwise."""
    return input.minimum(other)


def exp(input: Tensor) -> Tensor:
    """e to the power of each element."""
    return input.exp()


def log(input: Tensor) -> Tensor:
    """The natural logarithm."""
    return input.log()


def sqrt(input: Tensor) -> Tensor:
    """The square root."""
    return input.sqrt()


def abs(input: Tensor) -> Tensor:
    """The absolute value."""
    return input.abs()


def tanh(input: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return input.tanh()


def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-input))."""
    return input.sigmoid()


def relu(input: Tensor) -> Tensor:
    """max(input, 0)."""
    return input.relu()


def clamp(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Held within [min, max]."""
    return input.clamp(min, max)
