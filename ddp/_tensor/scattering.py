"""Writing into tensors by index: each method in two forms, a copy with the values in their places, and in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ddp._device import CPU, place
from ddp._tensor.base import TensorBase, apply, copy_if_needed, wrap
from ddp._tensor.indexing import along, assignable, broadcast_shape, gatherable, index_parts, indices, kept
from ddp._tensor.inplace import assign, must_record
from ddp._tensor.operands import REFUSED, broadcast, convert, refusal
from ddp._tensor.reductions import axis
from ddp.errors import ArgumentError, DdpError, DtypeError, RangeError, ShapeError
from ddp.ops import indexing as ops

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor
    from ddp.ops import Op


Self = TypeVar("Self", bound="Scatter")
Call = tuple["Op", Any, dict[str, Any]]  # an op of x and a value, the value, and the op's parameters


class Scatter(TensorBase):
    """Where a place is named twice, sums add both up; what else is written there is one of both.

    Raises: ShapeError, RangeError, DtypeError; in place also InplaceError, where autograd cannot follow.
    """

    __slots__ = ()

    def scatter(self, dim: int, index: TensorBase, src: Any = None, *, value: Any = None, reduce: Any = None) -> Tensor:
        """self with out[..index[..i..]..] = src[..i..] along `dim`. src: a tensor of this dtype, or a number.

        index: int64, nowhere larger than src, nor than this but along `dim`. reduce: None or "add".
        """
        return _copied(self, "scatter", _scatter(self, "scatter", dim, index, src, value, reduce))

    def scatter_(
        self: Self, dim: int, index: TensorBase, src: Any = None, *, value: Any = None, reduce: Any = None
    ) -> Self:
        """scatter in place."""
        return _written(self, "scatter_", _scatter(self, "scatter_", dim, index, src, value, reduce))

    def scatter_add(self, dim: int, index: TensorBase, src: TensorBase) -> Tensor:
        """self with src[..i..] added at [..index[..i..]..] along `dim`."""
        return _copied(self, "scatter_add", _scatter(self, "scatter_add", dim, index, src, None, "add"))

    def scatter_add_(self: Self, dim: int, index: TensorBase, src: TensorBase) -> Self:
        """scatter_add in place."""
        return _written(self, "scatter_add_", _scatter(self, "scatter_add_", dim, index, src, None, "add"))

    def index_add(self, dim: int, index: TensorBase, source: TensorBase, *, alpha: float = 1) -> Tensor:
        """self with alpha * source added at `index`, a vector, along `dim`."""
        return _copied(self, "index_add", _index_add(self, "index_add", dim, index, source, alpha))

    def index_add_(self: Self, dim: int, index: TensorBase, source: TensorBase, *, alpha: float = 1) -> Self:
        """index_add in place."""
        return _written(self, "index_add_", _index_add(self, "index_add_", dim, index, source, alpha))

    def index_copy(self, dim: int, index: TensorBase, source: TensorBase) -> Tensor:
        """self with the slices of source at `index`, a vector, along `dim`."""
        return _copied(self, "index_copy", _index_copy(self, "index_copy", dim, index, source))

    def index_copy_(self: Self, dim: int, index: TensorBase, source: TensorBase) -> Self:
        """index_copy in place."""
        return _written(self, "index_copy_", _index_copy(self, "index_copy_", dim, index, source))

    def index_fill(self, dim: int, index: TensorBase, value: Any) -> Tensor:
        """self with `value`, a number or a 0-d tensor, at `index`, a vector, along `dim`."""
        return _copied(self, "index_fill", _index_fill(self, "index_fill", dim, index, value))

    def index_fill_(self: Self, dim: int, index: TensorBase, value: Any) -> Self:
        """index_fill in place."""
        return _written(self, "index_fill_", _index_fill(self, "index_fill_", dim, index, value))

    def index_put(self, indices: Any, values: TensorBase, accumulate: bool = False) -> Tensor:
        """self with out[indices] = values, or with `accumulate` += values. indices: a tuple of tensors."""
        return _copied(self, "index_put", _index_put(self, "index_put", indices, values, accumulate))

    def index_put_(self: Self, indices: Any, values: TensorBase, accumulate: bool = False) -> Self:
        """index_put in place."""
        return _written(self, "index_put_", _index_put(self, "index_put_", indices, values, accumulate))

    def masked_fill(self, mask: TensorBase, value: Any) -> Tensor:
        """self with `value`, a number or a 0-d tensor, where `mask` (bool) holds; self and mask broadcast."""
        call = _masked_fill(self, "masked_fill", mask, value)
        shape = broadcast_shape("masked_fill", self.array.shape, mask.array.shape)
        return _copied(self if shape == self.array.shape else cast(Any, self).expand(shape), "masked_fill", call)

    def masked_fill_(self: Self, mask: TensorBase, value: Any) -> Self:
        """masked_fill in place; mask broadcasts to this shape."""
        call = _masked_fill(self, "masked_fill_", mask, value)
        _fits(self, "masked_fill_", mask.array.shape)
        return _written(self, "masked_fill_", call)

    def masked_scatter(self, mask: TensorBase, source: TensorBase) -> Tensor:
        """self with the elements of source, in order, where `mask` (bool) holds; self and mask broadcast."""
        shape = broadcast_shape("masked_scatter", self.array.shape, mask.array.shape)
        x: Any = self if shape == self.array.shape else cast(Any, self).expand(shape)
        return _copied(x, "masked_scatter", _masked_scatter(x, "masked_scatter", mask, source))

    def masked_scatter_(self: Self, mask: TensorBase, source: TensorBase) -> Self:
        """masked_scatter in place; mask broadcasts to this shape."""
        _fits(self, "masked_scatter_", mask.array.shape)
        return _written(self, "masked_scatter_", _masked_scatter(self, "masked_scatter_", mask, source))


def _copied(x: TensorBase, name: str, call: Call) -> Tensor:
    op, value, parameters = call
    try:
        return apply(op, (x, value), **parameters)
    except DdpError:
        raise
    except IndexError as error:
        raise RangeError(f"{name} on a tensor of shape {x.array.shape}: {error}") from error
    except ValueError as error:
        raise ShapeError(f"{name} on a tensor of shape {x.array.shape}: {error}") from error
    except REFUSED as error:
        raise refusal(name, error) from error


def _written(x: Self, name: str, call: Call) -> Self:
    tracked = must_record(x, name, call[1])
    result = _copied(x, name, (call[0], call[1], {**call[2], "within": True}))
    if tracked:
        return assign(x, name, result)
    if result.array is not x.array:  # bfloat16 was widened for a sum
        x.array[...] = result.array
    x.version.count += 1
    return x


def _alike(x: TensorBase, name: str, source: Any) -> TensorBase:
    """`source`, if it is a tensor of the dtype of `x`. Raises: DtypeError."""
    if not isinstance(source, TensorBase):
        raise DtypeError(f"{name}: expected a tensor of {x.array.dtype}, got {type(source).__name__}")
    if source.array.dtype != x.array.dtype:
        raise DtypeError(f"{name}: expected {x.array.dtype}, as the tensor is, got {source.array.dtype}")
    return source


def _number(x: TensorBase, name: str, value: Any) -> Any:
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


def _fits(x: TensorBase, name: str, shape: tuple[int, ...]) -> None:
    """Raises: ShapeError unless `shape` broadcasts to that of `x`."""
    broadcast(x.array.shape, shape, name)
    if broadcast_shape(name, x.array.shape, shape) != x.array.shape:
        raise ShapeError(f"{name}: shape {shape} does not broadcast to {x.array.shape}")


def _scatter(x: TensorBase, name: str, dim: int, index: TensorBase, src: Any, value: Any, reduce: Any) -> Call:
    if reduce not in (None, "add"):
        raise ArgumentError(f"{name}: reduce is None or 'add', not {reduce!r}")
    if (src is None) == (value is None):
        raise ArgumentError(f"{name}: expected src or value, one of them")
    where, at = gatherable(x, dim, index, name)
    v: Any = src if value is None else value
    if isinstance(src, TensorBase) and src.array.size == where.size == 1 and src.array.ndim + where.ndim == 1:
        v = cast(Any, src).reshape(where.shape)
    if isinstance(v, TensorBase) and (v.array.ndim or not x.array.ndim):
        v = _alike(x, name, v)
        shape = v.array.shape
        if where.size and (len(shape) != where.ndim or any(m > n for m, n in zip(where.shape, shape, strict=False))):
            raise ShapeError(f"{name}: index of shape {where.shape} is larger than the source of {shape}")
    else:
        v = _number(x, name, v)
    if not where.size:  # names no place, whatever its shape
        where, v = where.reshape((0,) * x.array.ndim), 0
    if reduce != "add":
        return ops.scatter, v, {"index": where, "dim": at}
    if not isinstance(v, TensorBase):
        v = wrap(x._device.xp.full(where.shape, v, x.array.dtype), x._device)
    return ops.scatter_add, v, {"index": where, "dim": at}


def _vector(
    x: TensorBase, name: str, dim: int, index: TensorBase, negative: bool = False
) -> tuple[Any, tuple[Any, ...], int]:
    """The array of `index`, a vector along `dim`; the places it names in `x`; and the non-negative dim."""
    at = axis(x, dim, name)
    n = x.array.shape[at] if x.array.ndim else 1
    where = indices(x, index, n, name, low=-n if negative else 0)
    if where.ndim > 1 or not x.array.ndim:
        raise ShapeError(
            f"{name}: an index of shape {where.shape} for a tensor of shape {x.array.shape}: expected a vector"
        )
    where = where.reshape(-1)
    return where, along(x, at, where), at


def _slices(x: TensorBase, name: str, where: Any, at: int, source: Any) -> TensorBase:
    """`source`, if it is what a vector of places along `at` asks for. Raises: ShapeError, DtypeError."""
    source = _alike(x, name, source)
    shape = x.array.shape
    if source.array.ndim == 0 and where.size == 1 and len(shape) == 1:
        return source
    if source.array.shape != (*shape[:at], where.size, *shape[at + 1 :]):
        raise ShapeError(
            f"{name}: {where.size} places along dimension {at} of shape {shape}, but a source of {source.array.shape}"
        )
    return source


def _index_add(x: TensorBase, name: str, dim: int, index: TensorBase, source: Any, alpha: float) -> Call:
    where, places, at = _vector(x, name, dim, index)
    source = _slices(x, name, where, at, source)
    value = source if alpha == 1 else cast(Any, source) * alpha
    return ops.index_add, value, {"places": kept(places, x, value)}


def _index_copy(x: TensorBase, name: str, dim: int, index: TensorBase, source: Any) -> Call:
    where, places, at = _vector(x, name, dim, index)
    source = _slices(x, name, where, at, source)
    return ops.setitem, source, {"steps": (kept(places, x, source),)}


def _index_fill(x: TensorBase, name: str, dim: int, index: TensorBase, value: Any) -> Call:
    _, places, _ = _vector(x, name, dim, index, negative=True)
    value = _number(x, name, value)
    return ops.setitem, value, {"steps": (kept(places, x, value),)}


def _index_put(x: TensorBase, name: str, where: Any, values: Any, accumulate: bool) -> Call:
    values = assignable(_alike(x, name, values))
    try:
        view, places = index_parts(x, tuple(where))
    except (RangeError, IndexError) as error:
        raise RangeError(f"{name} on a tensor of shape {x.array.shape}: {error}") from error
    places = kept(places, x, values)
    if not accumulate:
        return ops.setitem, values, {"steps": (places,) if view is None else (view, places)}
    if view is not None or not any(hasattr(place, "dtype") for place in places):
        raise ArgumentError(f"{name}: accumulate=True needs tensors of one dimension or more as indices")
    return ops.index_add, values, {"places": places}


def _masked_fill(x: TensorBase, name: str, mask: TensorBase, value: Any) -> Call:
    value = _number(x, name, value)
    return ops.masked_fill, value, {"mask": copy_if_needed(_mask(x, name, mask), x, value)}


def _mask(x: TensorBase, name: str, mask: TensorBase) -> Any:
    if not isinstance(mask, TensorBase) or mask.array.dtype.kind != "b":
        what = mask.array.dtype if isinstance(mask, TensorBase) else type(mask).__name__
        raise DtypeError(f"{name}: the mask is a bool tensor, not {what}")
    return place(mask.array, x._device)


def _scattered(x: TensorBase, name: str, where: Any, source: Any) -> Call:
    """Without asking how many places there are: where the mask holds, the number of those before it says which one."""
    xp, value = x._device.xp, cast(Any, _alike(x, name, source)).reshape(-1)
    n = value.array.size
    if not n:
        raise ShapeError(f"{name}: a source of shape {source.array.shape} for a tensor of shape {x.array.shape}")
    which = xp.cumsum(where.reshape(-1), dtype="int64") - 1
    message = f"{name}: more places than the {{limit}} elements of the source"
    which = ops.check_index(xp, xp.where(where.reshape(-1), which, 0), 0, n, ShapeError, message)
    value = apply(ops.index, (value,), places=(which,)).reshape(x.array.shape)
    return ops.masked_fill, value, {"mask": copy_if_needed(where, x, value)}


def _masked_scatter(x: TensorBase, name: str, mask: TensorBase, source: Any) -> Call:
    where = x._device.xp.broadcast_to(_mask(x, name, mask), x.array.shape)
    if x._device is not CPU:
        return _scattered(x, name, where, source)
    count = int(where.sum())
    source = _alike(x, name, source)
    if source.array.size < count:
        raise ShapeError(f"{name}: {count} places, but a source of shape {source.array.shape}")
    value = cast(Any, source).reshape(-1)[:count]
    return ops.setitem, value, {"steps": ((copy_if_needed(where, x, value),) if where.ndim else (where.reshape(1),),)}
