"""Writing into tensors by index: each method in two forms, a copy with the values in their places, and in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ddp._device import CPU, place
from ddp._tensor.base import TensorBase, apply, copy_if_needed, wrap
from ddp._tensor.indexing import (
    broadcast_shape,
    check_gather,
    check_indices,
    copy_index,
    drop_leading_ones,
    index_along,
    index_parts,
)
from ddp._tensor.inplace import assign, must_record
from ddp._tensor.operands import REJECTED, as_ddp_error, as_method, convert
from ddp._tensor.reductions import axis
from ddp.errors import ArgumentError, DdpError, DtypeError, RangeError, ShapeError
from ddp.ops import indexing as ops

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor
    from ddp.ops import Op


# Where to write (`x`, or `x` expanded), an op of that and of a value, the value, and the op's parameters.
Call = tuple[TensorBase, "Op", Any, dict[str, Any]]


def _forms(build: Callable[..., Call]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The two methods that `build` plans: NAME, which writes into a copy, and NAME_, which writes into the tensor."""
    name = build.__name__[1:]
    first, _, *rest = inspect.signature(build).parameters.values()

    def copied(self: Any, *args: Any, **named: Any) -> Tensor:
        return _run(name, *build(self, name, *args, **named))

    def written(self: Any, *args: Any, **named: Any) -> Tensor:
        return _run_in_place(self, f"{name}_", *build(self, f"{name}_", *args, **named))

    for form in (copied, written):
        cast(Any, form).__signature__ = inspect.Signature([first.replace(name="self"), *rest])
    return as_method(copied, name, build.__doc__), as_method(written, f"{name}_", f"{name} in place. {build.__doc__}")


def _run(name: str, x: TensorBase, op: Op, value: Any, parameters: dict[str, Any]) -> Tensor:
    try:
        return apply(op, (x, value), **parameters)
    except DdpError:
        raise
    except IndexError as error:
        raise RangeError(f"{name} on a tensor of shape {x.array.shape}: {error}") from error
    except ValueError as error:
        raise ShapeError(f"{name} on a tensor of shape {x.array.shape}: {error}") from error
    except REJECTED as error:
        raise as_ddp_error(name, error) from error


def _run_in_place(x: Any, name: str, target: TensorBase, op: Op, value: Any, parameters: dict[str, Any]) -> Any:
    if target.array.shape != x.array.shape:
        raise ShapeError(f"{name}: a mask for shape {target.array.shape} does not broadcast to {x.array.shape}")
    tracked = must_record(x, name, value)
    result = _run(name, x, op, value, {**parameters, "within": True})
    if tracked:
        return assign(x, name, result)
    if result.array is not x.array:  # bfloat16 was widened for a sum
        x.array[...] = result.array
    x.version.count += 1
    return x


def _check_source(x: TensorBase, name: str, source: Any) -> TensorBase:
    """`source`, if it is a tensor of the dtype of `x`. Raises: DtypeError."""
    if not isinstance(source, TensorBase):
        raise DtypeError(f"{name}: expected a tensor of {x.array.dtype}, got {type(source).__name__}")
    if source.array.dtype != x.array.dtype:
        raise DtypeError(f"{name}: expected {x.array.dtype}, as the tensor is, got {source.array.dtype}")
    return source


def _fill_value(x: TensorBase, name: str, value: Any) -> Any:
    """`value`, a number or a 0-d tensor, as what can be written into `x`. Raises: ShapeError, DtypeError."""
    if isinstance(value, TensorBase):
        if value.array.ndim:
            raise ShapeError(f"{name}: the value is a number or a 0-d tensor, got shape {value.array.shape}")
        return convert(value, x.array.dtype)
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise DtypeError(f"{name}: the value is a number or a 0-d tensor, not {type(value).__name__}")
    return value


def _scatter(
    x: TensorBase, name: str, dim: int, index: TensorBase, src: Any = None, *, value: Any = None, reduce: Any = None
) -> Call:
    """self with out[..index[..i..]..] = src[..i..] along `dim`. src: a tensor of this dtype, or a number.

    index: int64, nowhere larger than src, nor than this but along `dim`. reduce: None or "add".
    """
    if reduce not in (None, "add"):
        raise ArgumentError(f"{name}: reduce is None or 'add', not {reduce!r}")
    if (src is None) == (value is None):
        raise ArgumentError(f"{name}: expected src or value, one of them")
    where, at = check_gather(x, dim, index, name)
    v: Any = src if value is None else value
    if isinstance(src, TensorBase) and src.array.size == where.size == 1 and src.array.ndim + where.ndim == 1:
        v = cast(Any, src).reshape(where.shape)
    if isinstance(v, TensorBase) and (v.array.ndim or not x.array.ndim):
        v = _check_source(x, name, v)
        shape = v.array.shape
        if where.size and (len(shape) != where.ndim or any(m > n for m, n in zip(where.shape, shape, strict=False))):
            raise ShapeError(f"{name}: index of shape {where.shape} is larger than the source of {shape}")
    else:
        v = _fill_value(x, name, v)
    if not where.size:  # names no place, whatever its shape
        where, v = where.reshape((0,) * x.array.ndim), 0
    if reduce != "add":
        return x, ops.scatter, v, {"index": where, "dim": at}
    if not isinstance(v, TensorBase):
        v = wrap(x._device.xp.full(where.shape, v, x.array.dtype), x._device)
    return x, ops.scatter_add, v, {"index": where, "dim": at}


def _scatter_add(x: TensorBase, name: str, dim: int, index: TensorBase, src: TensorBase) -> Call:
    """self with src[..i..] added at [..index[..i..]..] along `dim`."""
    return _scatter(x, name, dim, index, src, reduce="add")


def _check_vector(
    x: TensorBase, name: str, dim: int, index: TensorBase, negative: bool = False
) -> tuple[Any, tuple[Any, ...], int]:
    """The array of `index`, a vector along `dim`; the places it names in `x`; and the non-negative dim."""
    at = axis(x, dim, name)
    n = x.array.shape[at] if x.array.ndim else 1
    where = check_indices(x, index, n, name, low=-n if negative else 0)
    if where.ndim > 1 or not x.array.ndim:
        raise ShapeError(
            f"{name}: an index of shape {where.shape} for a tensor of shape {x.array.shape}: expected a vector"
        )
    where = where.reshape(-1)
    return where, index_along(x, at, where), at


def _check_slices(x: TensorBase, name: str, where: Any, at: int, source: Any) -> TensorBase:
    """`source`, if it is what a vector of places along `at` asks for. Raises: ShapeError, DtypeError."""
    source = _check_source(x, name, source)
    shape = x.array.shape
    if source.array.ndim == 0 and where.size == 1 and len(shape) == 1:
        return source
    if source.array.shape != (*shape[:at], where.size, *shape[at + 1 :]):
        raise ShapeError(
            f"{name}: {where.size} places along dimension {at} of shape {shape}, but a source of {source.array.shape}"
        )
    return source


def _index_add(x: TensorBase, name: str, dim: int, index: TensorBase, source: Any, *, alpha: float = 1) -> Call:
    """self with alpha * source added at `index`, a vector, along `dim`."""
    where, places, at = _check_vector(x, name, dim, index)
    source = _check_slices(x, name, where, at, source)
    value = source if alpha == 1 else cast(Any, source) * alpha
    return x, ops.index_add, value, {"places": copy_index(places, x, value)}


def _index_copy(x: TensorBase, name: str, dim: int, index: TensorBase, source: Any) -> Call:
    """self with the slices of source at `index`, a vector, along `dim`."""
    where, places, at = _check_vector(x, name, dim, index)
    source = _check_slices(x, name, where, at, source)
    return x, ops.setitem, source, {"steps": (copy_index(places, x, source),)}


def _index_fill(x: TensorBase, name: str, dim: int, index: TensorBase, value: Any) -> Call:
    """self with `value`, a number or a 0-d tensor, at `index`, a vector, along `dim`."""
    _, places, _ = _check_vector(x, name, dim, index, negative=True)
    value = _fill_value(x, name, value)
    return x, ops.setitem, value, {"steps": (copy_index(places, x, value),)}


def _index_put(x: TensorBase, name: str, indices: Any, values: Any, accumulate: bool = False) -> Call:
    """self with out[indices] = values, or with `accumulate` += values. indices: a tuple of tensors."""
    values = drop_leading_ones(_check_source(x, name, values))
    try:
        view, places = index_parts(x, tuple(indices))
    except (RangeError, IndexError) as error:
        raise RangeError(f"{name} on a tensor of shape {x.array.shape}: {error}") from error
    places = copy_index(places, x, values)
    if not accumulate:
        return x, ops.setitem, values, {"steps": (places,) if view is None else (view, places)}
    if view is not None or not any(hasattr(place, "dtype") for place in places):
        raise ArgumentError(f"{name}: accumulate=True needs tensors of one dimension or more as indices")
    return x, ops.index_add, values, {"places": places}


def _masked(x: TensorBase, name: str, mask: TensorBase) -> tuple[Any, Any]:
    """`x` and the array of the mask in the shape that both broadcast to. Raises: DtypeError, ShapeError."""
    if not isinstance(mask, TensorBase) or mask.array.dtype.kind != "b":
        what = mask.array.dtype if isinstance(mask, TensorBase) else type(mask).__name__
        raise DtypeError(f"{name}: the mask is a bool tensor, not {what}")
    shape = broadcast_shape(name, x.array.shape, mask.array.shape)
    return x if shape == x.array.shape else cast(Any, x).expand(shape), place(mask.array, x._device)


def _masked_fill(x: TensorBase, name: str, mask: TensorBase, value: Any) -> Call:
    """self with `value`, a number or a 0-d tensor, where `mask` (bool) holds; self and mask broadcast."""
    value = _fill_value(x, name, value)
    target, where = _masked(x, name, mask)
    return target, ops.masked_fill, value, {"mask": copy_if_needed(where, x, value)}


def _masked_scatter(x: TensorBase, name: str, mask: TensorBase, source: Any) -> Call:
    """self with the elements of source, in order, where `mask` (bool) holds; self and mask broadcast."""
    target, where = _masked(x, name, mask)
    shape, xp = target.array.shape, x._device.xp
    where = xp.broadcast_to(where, shape)
    value = cast(Any, _check_source(x, name, source)).reshape(-1)
    n = value.array.size
    if x._device is CPU:
        if n < (count := int(where.sum())):
            raise ShapeError(f"{name}: {count} places, but a source of shape {source.array.shape}")
        where, value = copy_if_needed(where, x, value), value[:count]
        return target, ops.setitem, value, {"steps": ((where if where.ndim else where.reshape(1),),)}
    # Without asking how many places there are: the number of those before a place says which element it gets.
    if not n:
        raise ShapeError(f"{name}: a source of shape {source.array.shape} for a tensor of shape {shape}")
    which = xp.cumsum(where.reshape(-1), dtype="int64") - 1
    message = f"{name}: more places than the {{limit}} elements of the source"
    which = ops.check_index(xp, xp.where(where.reshape(-1), which, 0), 0, n, ShapeError, message)
    value = apply(ops.index, (value,), places=(which,)).reshape(shape)
    return target, ops.masked_fill, value, {"mask": copy_if_needed(where, x, value)}


class Scatter(TensorBase):
    """Where a place is named twice, sums add both up; what else is written there is one of both.

    Raises: ShapeError, RangeError, DtypeError; in place also InplaceError, where autograd cannot follow.
    """

    __slots__ = ()

    scatter, scatter_ = _forms(_scatter)
    scatter_add, scatter_add_ = _forms(_scatter_add)
    index_add, index_add_ = _forms(_index_add)
    index_copy, index_copy_ = _forms(_index_copy)
    index_fill, index_fill_ = _forms(_index_fill)
    index_put, index_put_ = _forms(_index_put)
    masked_fill, masked_fill_ = _forms(_masked_fill)
    masked_scatter, masked_scatter_ = _forms(_masked_scatter)
