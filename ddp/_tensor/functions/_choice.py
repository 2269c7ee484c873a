"""Choices between values as functions."""

from __future__ import annotations

from typing import Any

from ddp._tensor.choosing import chosen
from ddp._tensor.core import Tensor
from ddp._tensor.functions._called import called


@called
def where(condition: Tensor, input: Any = None, other: Any = None) -> Any:
    """`input` where `condition` (bool) holds, else `other`; all three broadcast, and numbers may stand for tensors.

    With `condition` alone: where it is not zero, a tuple of int64 indices, one for each dimension.

    Raises: DtypeError, ShapeError.
    """
    if input is None and other is None:
        return condition.nonzero(as_tuple=True)
    return chosen(condition, input, other)


@called
def maximum(input: Tensor, other: Tensor) -> Tensor:
    """The larger of both, nan if one is; equal elements share the gradient."""
    return input.maximum(other)


@called
def minimum(input: Tensor, other: Tensor) -> Tensor:
    """The smaller of both, nan if one is; equal elements share the gradient."""
    return input.minimum(other)


@called
def fmax(input: Tensor, other: Tensor) -> Tensor:
    """The larger of both, of a number and nan the number."""
    return input.fmax(other)


@called
def fmin(input: Tensor, other: Tensor) -> Tensor:
    """The smaller of both, of a number and nan the number."""
    return input.fmin(other)


@called
def clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Held within [min, max], numbers or tensors; where min > max, it is max. Raises: ArgumentError without both."""
    return input.clamp(min, max)


clip = clamp


@called
def clamp_min(input: Tensor, min: Any) -> Tensor:
    """At least `min`."""
    return input.clamp_min(min)


@called
def clamp_max(input: Tensor, max: Any) -> Tensor:
    """At most `max`."""
    return input.clamp_max(max)


@called
def nan_to_num(input: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """Numbers in place of nan and infinities: by default 0, and the largest and smallest of the dtype."""
    return input.nan_to_num(nan, posinf, neginf)


def relu(input: Tensor) -> Tensor:
    """max(input, 0). Raises: DtypeError for bool."""
    return input.relu()
