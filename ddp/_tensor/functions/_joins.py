"""Joins, and copies in another order, as functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp._device import device as Device
from ddp._device import place
from ddp._tensor.arithmetic import convert
from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import parse, promote
from ddp._tensor.functions._called import called
from ddp._tensor.functions._shapes import atleast_1d, atleast_2d, atleast_3d, meshgrid
from ddp._tensor.reductions import axis
from ddp._tensor.shaping import inserted
from ddp._tensor.spelling import spelled
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops import joins

Dims = int | Sequence[int]


def _one_dtype(tensors: Sequence[Tensor], name: str) -> list[TensorBase]:
    if isinstance(tensors, TensorBase) or not all(isinstance(x, TensorBase) for x in tensors):
        raise DtypeError(f"{name}: expected a sequence of tensors")
    if not tensors:
        raise ArgumentError(f"{name}: expected at least one tensor")
    dtype, dims = tensors[0].dtype, tensors[0].ndim
    for x in tensors[1:]:
        dtype = promote(dtype, dims, x.dtype, x.ndim)
    return [convert(x, dtype) for x in tensors]


@called
@spelled
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors joined along `dim`; all other sizes are equal. A tensor of shape (0,) goes with any shape.

    Raises: ShapeError, RangeError; ArgumentError for no tensor.
    """
    xs = _one_dtype(tensors, "cat")
    some = [x for x in xs if x.array.shape != (0,)] or xs[:1]
    at = axis(some[0], dim, "cat")
    first = some[0].array.shape
    for x in some:
        shape = x.array.shape
        if not shape or len(shape) != len(first) or (*shape[:at], *shape[at + 1 :]) != (*first[:at], *first[at + 1 :]):
            raise ShapeError(f"cat along dimension {at}: shapes {first} and {shape} differ elsewhere, or are 0-d")
    return apply(joins.cat, xs, dim=at)


@called
@spelled
def concat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors joined along `dim`: cat under another name."""
    return cat(tensors, dim)


@called
@spelled
def concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors joined along `dim`: cat under NumPy's name."""
    return cat(tensors, dim)


@called
@spelled
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors, all of one shape, side by side along a new `dim`. Raises: ShapeError, ArgumentError, RangeError."""
    xs = _one_dtype(tensors, "stack")
    first = tensors[0].shape
    for x in tensors:
        if x.shape != first:
            raise ShapeError(f"stack: shapes {first} and {x.shape} differ")
    return apply(joins.stack, xs, dim=inserted(xs[0], dim, "stack"))


@called
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors joined along dimension 1; vectors and numbers along dimension 0."""
    xs = atleast_1d(list(tensors))
    return cat(xs, 0 if xs and xs[0].ndim == 1 else 1)


@called
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, with two dimensions at least, joined along dimension 0."""
    return cat(atleast_2d(list(tensors)), 0)


@called
def dstack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, with three dimensions at least, joined along dimension 2."""
    return cat(atleast_3d(list(tensors)), 2)


@called
def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """As hstack, but vectors and numbers are columns."""
    return hstack([x if x.ndim > 1 else x.reshape(-1, 1) for x in tensors])


def cartesian_prod(*tensors: Tensor) -> Tensor:
    """All combinations of the elements of vectors: (n0 * n1 * ..., number of vectors); of one vector, itself."""
    if len(tensors) == 1:
        return tensors[0]
    return stack([grid.reshape(-1) for grid in meshgrid(*tensors, indexing="ij")], 1)


def tile(input: Tensor, dims: Sequence[int]) -> Tensor:
    """Laid out so many times along each dimension, counted from the last."""
    return input.tile(dims)


def repeat_interleave(
    input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Each element, or slice along `dim`, repeated next to itself; of a tensor of repeats alone, the indices."""
    if repeats is None:
        places = wrap(input.device.xp.arange(input.numel()), input.device)
        return places.repeat_interleave(input, 0)
    return input.repeat_interleave(repeats, dim)


def flip(input: Tensor, dims: Dims) -> Tensor:
    """The order along `dims` reversed."""
    return input.flip(dims)


def fliplr(input: Tensor) -> Tensor:
    """The order of dimension 1 reversed."""
    return input.fliplr()


def flipud(input: Tensor) -> Tensor:
    """The order of dimension 0 reversed."""
    return input.flipud()


def rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Turned k times by 90 degrees, from the first of two dimensions towards the second."""
    return input.rot90(k, dims)


def roll(input: Tensor, shifts: Dims, dims: Dims | None = None) -> Tensor:
    """Shifted along `dims`, around the end; without `dims`, along the flattened order."""
    return input.roll(shifts, dims)


@called
def tril(input: Tensor, diagonal: int = 0) -> Tensor:
    """Zero above the diagonal of the last two dimensions."""
    return input.tril(diagonal)


@called
def triu(input: Tensor, diagonal: int = 0) -> Tensor:
    """Zero below the diagonal of the last two dimensions."""
    return input.triu(diagonal)


@called
def diag(input: Tensor, diagonal: int = 0) -> Tensor:
    """A matrix with this vector on a diagonal; of a matrix, a copy of the diagonal."""
    return input.diag(diagonal)


def diag_embed(input: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """The last dimension on the diagonal over two new ones, zero elsewhere."""
    return input.diag_embed(offset, dim1, dim2)


def tril_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Where a (row, col) matrix is on or below a diagonal: int64 (2, n), row by row."""
    return _triangle("tril", row, col, offset, dtype, device)


def triu_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Where a (row, col) matrix is on or above a diagonal: int64 (2, n), row by row."""
    return _triangle("triu", row, col, offset, dtype, device)


def _triangle(which: str, row: int, col: int, offset: int, dtype: Any, device: Any) -> Tensor:
    where = Device("cpu" if device is None else device)
    # On the CPU, which knows how many there are: a GPU would be waited for.
    found = np.stack(np.nonzero(getattr(np, which)(np.ones((row, col), bool), offset)))
    return wrap(place(found.astype(parse("int64" if dtype is None else dtype), copy=False), where), where)
