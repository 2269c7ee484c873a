"""Copies of tensors in another order: repeated, mirrored, shifted, cut to a triangle, put on a diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ddp._device import place
from ddp._tensor.base import TensorBase, apply
from ddp._tensor.indexing import along
from ddp._tensor.reductions import axes, axis
from ddp._tensor.shaping import inserted, spread
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops import indexing, shape

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor

Dims = int | Sequence[int]


def _by_repeat(xp: Any, times: Any, size: int | None) -> Any:
    return xp.repeat(xp.arange(len(times)), times)


def _by_search(xp: Any, times: Any, size: int | None) -> Any:
    # CuPy's repeat takes no array.
    ends = xp.cumsum(times)
    total = int(ends[-1]) if size is None and len(times) else size or 0
    return xp.searchsorted(ends, xp.arange(total), side="right")


_PLACES = {"numpy": _by_repeat, "cupy": _by_search}


class Rearranging(TensorBase):
    """Copies: what is written to them is not seen by the tensor."""

    __slots__ = ()

    def repeat(self, *sizes: int | Sequence[int], repeats: Sequence[int] | None = None) -> Tensor:
        """Laid out so many times along each dimension; further ones lead. Raises: ShapeError for fewer."""
        times = spread(sizes, repeats)
        ndim = self.array.ndim
        if len(times) < ndim or any(n < 0 for n in times):
            raise ShapeError(f"repeat: {times} for shape {self.array.shape}: expected a number for each dimension")
        if not times:
            return cast(Any, self).clone()
        x = cast(Any, self)[(None,) * (len(times) - ndim)] if len(times) > ndim else self
        return apply(shape.repeat, (x,), times=tuple(times))

    def tile(self, *sizes: int | Sequence[int], dims: Sequence[int] | None = None) -> Tensor:
        """As repeat, but fewer numbers count from the last dimension."""
        times = spread(sizes, dims)
        return self.repeat((*(1,) * (self.array.ndim - len(times)), *times))

    def repeat_interleave(self, repeats: Any, dim: int | None = None, output_size: int | None = None) -> Tensor:
        """Each element, or slice along `dim`, repeated next to itself. repeats: a number, or a tensor of one for each.

        output_size: how many there are at the end; on a GPU the host need not wait to learn it from `repeats`.
        Raises: ShapeError, ArgumentError, DtypeError.
        """
        x: Any = self
        if dim is None or not self.array.ndim:
            x, dim = x.reshape(-1), 0
        at = axis(x, dim, "repeat_interleave")
        n, xp = x.array.shape[at], self._device.xp
        if isinstance(repeats, TensorBase):
            times = place(repeats.array, self._device)
            if times.dtype.kind not in "iu":
                raise DtypeError(f"repeat_interleave: repeats are int64, not {times.dtype}")
            if times.ndim > 1 or (times.ndim and times.shape[0] not in (1, n)):
                raise ShapeError(f"repeat_interleave: repeats of shape {times.shape} for {n} in dimension {at}")
            where = _PLACES[xp.__name__](xp, xp.broadcast_to(times, (n,)), output_size)
            return apply(indexing.index, (x,), places=along(x, at, where))
        if repeats < 0:
            raise ArgumentError(f"repeat_interleave: expected no negative number of repeats, got {repeats}")
        shape = x.array.shape
        wide = x.unsqueeze(at + 1).expand(*shape[: at + 1], repeats, *shape[at + 1 :])
        return wide.reshape(*shape[:at], n * repeats, *shape[at + 1 :])

    def flip(self, *order: Dims, dims: Dims | None = None) -> Tensor:
        """The order along `dims` reversed. Raises: RangeError, ArgumentError if one is named twice."""
        wanted = spread(order, dims)
        return apply(shape.flip, (self,), dims=axes(self, wanted, "flip") if wanted else ())

    def fliplr(self) -> Tensor:
        """The order of dimension 1 reversed. Raises: RangeError for fewer than two."""
        return self.flip(1)

    def flipud(self) -> Tensor:
        """The order of dimension 0 reversed."""
        return self.flip(0)

    def rot90(self, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
        """Turned k times by 90 degrees, from the first of two dimensions towards the second."""
        first, second = axes(self, dims, "rot90")
        x: Any = self
        turned = {
            0: lambda: x.clone(),
            1: lambda: x.flip(second).transpose(first, second),
            2: lambda: x.flip(first, second),
            3: lambda: x.flip(first).transpose(first, second),
        }
        return turned[k % 4]()

    def roll(self, shifts: Dims, dims: Dims | None = None) -> Tensor:
        """Shifted along `dims`, around the end; without `dims`, along the flattened order.

        Raises: ArgumentError unless there are as many shifts as dims.
        """
        by = (shifts,) if isinstance(shifts, int) else tuple(shifts)
        at = () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
        if not at:
            if len(by) != 1:
                raise ArgumentError(f"roll: shifts {by} without dims: expected one shift")
            return cast(Any, apply(shape.roll, (cast(Any, self).reshape(-1),), shifts=by, dims=(0,))).reshape(
                self.array.shape
            )
        if len(at) != len(by):
            raise ArgumentError(f"roll: {len(by)} shifts {by} for {len(at)} dims {at}")
        return apply(shape.roll, (self,), shifts=by, dims=tuple([axis(self, d, "roll") for d in at]))

    def tril(self, diagonal: int = 0) -> Tensor:
        """Zero above the diagonal of the last two dimensions. Raises: ShapeError for fewer than two."""
        return apply(shape.tril, (_matrix(self, "tril"),), diagonal=diagonal)

    def triu(self, diagonal: int = 0) -> Tensor:
        """Zero below the diagonal of the last two dimensions. Raises: ShapeError for fewer than two."""
        return apply(shape.triu, (_matrix(self, "triu"),), diagonal=diagonal)

    def diag(self, diagonal: int = 0) -> Tensor:
        """A matrix with this vector on a diagonal; of a matrix, a copy of the diagonal. Raises: ShapeError."""
        if self.array.ndim not in (1, 2):
            raise ShapeError(f"diag: expected a vector or a matrix, got shape {self.array.shape}")
        if self.array.ndim == 1:
            return self.diag_embed(diagonal)
        return cast(Any, self).diagonal(diagonal).clone()

    def diag_embed(self, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
        """The last dimension on the diagonal over two new ones, zero elsewhere. Raises: ShapeError, RangeError."""
        x: Any = self if self.array.ndim else cast(Any, self).reshape(1)
        a, b = inserted(x, dim1, "diag_embed"), inserted(x, dim2, "diag_embed")
        if a == b:
            raise ShapeError(f"diag_embed: dimensions {dim1} and {dim2} of shape {self.array.shape} are one")
        return apply(shape.diag_embed, (x,), offset=offset, dim0=a, dim1=b)


def _matrix(x: TensorBase, name: str) -> TensorBase:
    if x.array.ndim < 2:
        raise ShapeError(f"{name}: expected at least 2 dimensions, got shape {x.array.shape}")
    return x
