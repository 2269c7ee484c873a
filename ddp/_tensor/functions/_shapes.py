"""Joins, and changes of shape, as functions."""

from __future__ import annotations

from collections.abc import Sequence

from ddp._tensor.arithmetic import convert
from ddp._tensor.base import TensorBase, apply
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import promote
from ddp._tensor.reductions import axis
from ddp.errors import ArgumentError, RangeError, ShapeError
from ddp.ops import shape


def _one_dtype(tensors: Sequence[Tensor], name: str) -> list[TensorBase]:
    if not tensors:
        raise ArgumentError(f"{name}: expected at least one tensor")
    dtype, dims = tensors[0].dtype, tensors[0].ndim
    for x in tensors[1:]:
        dtype = promote(dtype, dims, x.dtype, x.ndim)
    return [convert(x, dtype) for x in tensors]


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors joined along `dim`; all other sizes are equal. Raises: ShapeError, ArgumentError for no tensor."""
    xs = _one_dtype(tensors, "cat")
    at = axis(xs[0], dim, "cat")
    first = tensors[0].shape
    for x in tensors:
        if not x.ndim or (*x.shape[:at], *x.shape[at + 1 :]) != (*first[:at], *first[at + 1 :]) or x.ndim != len(first):
            raise ShapeError(f"cat along dimension {at}: shapes {first} and {x.shape} differ elsewhere, or are 0-d")
    return apply(shape.cat, xs, dim=at)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors, all of one shape, side by side along a new `dim`. Raises: ShapeError, ArgumentError, RangeError."""
    xs = _one_dtype(tensors, "stack")
    first = tensors[0].shape
    for x in tensors:
        if x.shape != first:
            raise ShapeError(f"stack: shapes {first} and {x.shape} differ")
    if not -len(first) - 1 <= dim <= len(first):
        raise RangeError(f"stack: dimension {dim}: expected {-len(first) - 1} to {len(first)}")
    return apply(shape.stack, xs, dim=dim % (len(first) + 1))


def reshape(input: Tensor, size: Sequence[int]) -> Tensor:
    """The same elements in another shape."""
    return input.reshape(size)


def transpose(input: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two dimensions exchanged."""
    return input.transpose(dim0, dim1)


def permute(input: Tensor, dims: Sequence[int]) -> Tensor:
    """The dimensions in another order."""
    return input.permute(dims)


def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Dimensions start_dim to end_dim (inclusive) joined into one."""
    return input.flatten(start_dim, end_dim)


def squeeze(input: Tensor, dim: int | None = None) -> Tensor:
    """Without dimensions of size 1."""
    return input.squeeze(dim)


def unsqueeze(input: Tensor, dim: int) -> Tensor:
    """With a new dimension of size 1 at `dim`."""
    return input.unsqueeze(dim)
