"""Functions of several tensors that join them or bring them to one shape; and indices of triangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._device import device as Device
from ddp._device import place
from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import parse, promote
from ddp._tensor.function_form import with_out
from ddp._tensor.indexing import broadcast_shape
from ddp._tensor.operands import convert, numpy_names
from ddp._tensor.reductions import axis
from ddp._tensor.shapes import new_axis
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops import shape


def _promote(tensors: Sequence[Tensor], name: str) -> list[TensorBase]:
    if isinstance(tensors, TensorBase) or not all(isinstance(x, TensorBase) for x in tensors):
        raise DtypeError(f"{name}: expected a sequence of tensors")
    if not tensors:
        raise ArgumentError(f"{name}: expected at least one tensor")
    dtype, dims = tensors[0].dtype, tensors[0].ndim
    for x in tensors[1:]:
        dtype = promote(dtype, dims, x.dtype, x.ndim)
    return [convert(x, dtype) for x in tensors]


@with_out
@numpy_names
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors joined along `dim`; all other sizes are equal. A tensor of shape (0,) goes with any shape.

    Raises: ShapeError, RangeError; ArgumentError for no tensor.
    """
    xs = _promote(tensors, "cat")
    some = [x for x in xs if x.array.shape != (0,)] or xs[:1]
    at = axis(some[0], dim, "cat")
    first = some[0].array.shape
    for x in some:
        size = x.array.shape
        if not size or len(size) != len(first) or (*size[:at], *size[at + 1 :]) != (*first[:at], *first[at + 1 :]):
            raise ShapeError(f"cat along dimension {at}: shapes {first} and {size} differ elsewhere, or are 0-d")
    return apply(shape.cat, xs, dim=at)


concat = concatenate = cat


@with_out
@numpy_names
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors, all of one shape, side by side along a new `dim`. Raises: ShapeError, ArgumentError, RangeError."""
    xs = _promote(tensors, "stack")
    first = tensors[0].shape
    for x in tensors:
        if x.shape != first:
            raise ShapeError(f"stack: shapes {first} and {x.shape} differ")
    return apply(shape.stack, xs, dim=new_axis(xs[0], dim, "stack"))


@with_out
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors joined along dimension 1; vectors and numbers along dimension 0."""
    xs = atleast_1d(list(tensors))
    return cat(xs, 0 if xs and xs[0].ndim == 1 else 1)


@with_out
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, with two dimensions at least, joined along dimension 0."""
    return cat(atleast_2d(list(tensors)), 0)


@with_out
def dstack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, with three dimensions at least, joined along dimension 2."""
    return cat(atleast_3d(list(tensors)), 2)


@with_out
def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """As hstack, but vectors and numbers are columns."""
    return hstack([x if x.ndim > 1 else x.reshape(-1, 1) for x in tensors])


def cartesian_prod(*tensors: Tensor) -> Tensor:
    """All combinations of the elements of vectors: (n0 * n1 * ..., number of vectors); of one vector, itself."""
    if len(tensors) == 1:
        return tensors[0]
    return stack([grid.reshape(-1) for grid in meshgrid(*tensors, indexing="ij")], 1)


def repeat_interleave(
    input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Each element, or slice along `dim`, repeated next to itself; of a tensor of repeats alone, the indices."""
    if repeats is None:
        places = wrap(input.device.xp.arange(input.numel()), input.device)
        return places.repeat_interleave(input, 0)
    return input.repeat_interleave(repeats, dim)


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


def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """The tensors in the one shape that they broadcast to, without copying. Raises: ShapeError."""
    xs = _as_list(tensors)
    shape = broadcast_shape("broadcast_tensors", *[x.shape for x in xs])
    return tuple([x.expand(shape) for x in xs])


def broadcast_shapes(*shapes: Any) -> tuple[int, ...]:
    """What these shapes (tuples or numbers) broadcast to. Raises: ShapeError."""
    return broadcast_shape("broadcast_shapes", *[(n,) if isinstance(n, int) else tuple(n) for n in shapes])


def atleast_1d(*tensors: Any) -> Any:
    """With one dimension at least: 0-d becomes (1,). Several tensors give a tuple."""
    return _map_tensors(tensors, lambda x: x if x.ndim else x.reshape(1))


def atleast_2d(*tensors: Any) -> Any:
    """With two dimensions at least: (n,) becomes (1, n). Several tensors give a tuple."""
    return _map_tensors(tensors, lambda x: x if x.ndim > 1 else x.reshape(1, -1))


def atleast_3d(*tensors: Any) -> Any:
    """With three dimensions at least: (n,) becomes (1, n, 1), (m, n) becomes (m, n, 1). Several give a tuple."""
    return _map_tensors(tensors, lambda x: x if x.ndim > 2 else x.unsqueeze(-1) if x.ndim == 2 else x.reshape(1, -1, 1))


def _as_list(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors one by one, or as one sequence."""
    return tuple(tensors[0]) if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors


def _map_tensors(tensors: tuple[Any, ...], change: Any) -> Any:
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return change(tensors[0])
    return tuple([change(x) for x in _as_list(tensors)])


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Vectors (n0,), (n1,), ... as coordinates of a grid (n0, n1, ...), without copying; "xy": of (n1, n0, ...).

    Raises: ShapeError for more than one dimension; ArgumentError for another indexing, or no tensor.
    """
    xs: list[Any] = [x.reshape(-1) if x.ndim < 2 else x for x in _as_list(tensors)]
    if indexing not in ("ij", "xy"):
        raise ArgumentError(f"meshgrid: indexing is 'ij' or 'xy', not {indexing!r}")
    if not xs:
        raise ArgumentError("meshgrid: expected at least one tensor")
    for x in xs:
        if x.ndim > 1:
            raise ShapeError(f"meshgrid: expected vectors, got shape {x.shape}")
    swap = indexing == "xy" and len(xs) > 1
    if swap:
        xs[0], xs[1] = xs[1], xs[0]
    shape = [len(x) for x in xs]
    grids = [x.reshape([-1 if i == j else 1 for j in range(len(xs))]).expand(shape) for i, x in enumerate(xs)]
    if swap:
        grids[0], grids[1] = grids[1], grids[0]
    return tuple(grids)


if not TYPE_CHECKING:  # checkers know which names are defined here
    __all__ = [n for n, f in globals().items() if n[0] != "_" and getattr(f, "__module__", "") == __name__]
