"""Shapes and indexing of tensors: negative and inferred sizes are resolved here, so that ops see plain shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ddp._tensor.base import TensorBase, apply, borrowed
from ddp._tensor.reductions import axis
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.ops import index, shape

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


def spread(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes given one by one, or as one sequence: reshape(2, 3) and reshape((2, 3))."""
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        return tuple(sizes[0])
    return sizes


def infer(old: tuple[int, ...], new: tuple[int, ...], name: str) -> tuple[int, ...]:
    """`new` with its -1 replaced by what is left of `old`'s elements. Raises: ShapeError if they do not fit."""
    total, known = math.prod(old), math.prod(n for n in new if n != -1)
    if new.count(-1) == 1 and known > 0 and total % known == 0:
        return tuple(total // known if n == -1 else n for n in new)
    if -1 in new or any(n < 0 for n in new) or known != total:
        raise ShapeError(f"{name}: shape {old} of {total} elements cannot become {new}")
    return new


class Shaping(TensorBase):
    """Views share memory with the tensor, as in NumPy; a reshape that the memory does not allow is a copy."""

    __slots__ = ()

    def reshape(self, *sizes: int | Sequence[int]) -> Tensor:
        """The same elements in another shape; one size may be -1. Raises: ShapeError if the elements do not fit."""
        return apply(shape.reshape, (self,), shape=infer(self._array.shape, spread(sizes), "reshape"))

    def view(self, *sizes: int | Sequence[int]) -> Tensor:
        """As reshape, but never a copy. Raises: ShapeError if the memory does not allow the shape as a view."""
        out = self.reshape(*sizes)
        if out._version is not self._version and out._array.size:
            raise ShapeError(
                f"view: shape {self._array.shape} with strides {self._array.strides} cannot be seen as "
                f"{out._array.shape} without a copy; use reshape()"
            )
        return out

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Dimensions start_dim to end_dim (inclusive) joined into one."""
        old: tuple[int, ...] = self._array.shape or (1,)
        first, last = axis(self, start_dim, "flatten"), axis(self, end_dim, "flatten")
        if first > last:
            raise ArgumentError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim} in shape {old}")
        joined = math.prod(old[first : last + 1])
        return apply(shape.reshape, (self,), shape=(*old[:first], joined, *old[last + 1 :]))

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Two dimensions exchanged."""
        dims = list(range(self._array.ndim))
        a, b = axis(self, dim0, "transpose"), axis(self, dim1, "transpose")
        if dims:
            dims[a], dims[b] = dims[b], dims[a]
        return apply(shape.permute, (self,), dims=tuple(dims))

    def permute(self, *dims: int | Sequence[int]) -> Tensor:
        """The dimensions in another order. Raises: ArgumentError unless each is named once."""
        order = tuple(axis(self, d, "permute") for d in spread(dims))
        if sorted(order) != list(range(self._array.ndim)):
            raise ArgumentError(f"permute: {spread(dims)} does not name each dimension of {self._array.shape} once")
        return apply(shape.permute, (self,), dims=order)

    @property
    def T(self) -> Tensor:
        """The dimensions reversed."""
        return apply(shape.permute, (self,), dims=tuple(reversed(range(self._array.ndim))))

    def t(self) -> Tensor:
        """The transpose of a matrix; vectors stay. Raises: ShapeError beyond two dimensions."""
        if self._array.ndim > 2:
            raise ShapeError(f"t: expected at most 2 dimensions, got shape {self._array.shape}")
        return self.T

    def expand(self, *sizes: int | Sequence[int]) -> Tensor:
        """Dimensions of size 1, and new leading ones, repeated without copying; -1 keeps a size.

        Raises: ShapeError for any other change of size.
        """
        old: tuple[int, ...] = self._array.shape
        wanted = spread(sizes)
        lead = len(wanted) - len(old)
        new = tuple(old[i - lead] if n == -1 and i >= lead else n for i, n in enumerate(wanted))
        if lead < 0 or any(n < 0 or (i >= lead and old[i - lead] not in (1, n)) for i, n in enumerate(new)):
            raise ShapeError(f"expand: shape {old} cannot be expanded to {wanted}")
        return apply(shape.expand, (self,), shape=new)

    def squeeze(self, dim: int | None = None) -> Tensor:
        """Without dimensions of size 1: all of them, or `dim` if it is one."""
        old: tuple[int, ...] = self._array.shape
        at = None if dim is None else axis(self, dim, "squeeze")
        new = tuple(n for i, n in enumerate(old) if n != 1 or (at is not None and i != at))
        return apply(shape.reshape, (self,), shape=new)

    def unsqueeze(self, dim: int) -> Tensor:
        """With a new dimension of size 1 at `dim`. Raises: RangeError."""
        old: tuple[int, ...] = self._array.shape
        if not -len(old) - 1 <= dim <= len(old):
            raise RangeError(f"unsqueeze: dimension {dim} of shape {old}: expected {-len(old) - 1} to {len(old)}")
        at = dim % (len(old) + 1)
        return apply(shape.reshape, (self,), shape=(*old[:at], 1, *old[at:]))

    def __getitem__(self, where: Any) -> Tensor:
        try:
            selects, rest = raw_index(where, self._device.xp)
            x: TensorBase = self if selects is None else apply(index.getitem, (self,), index=selects)
            kept = tuple([borrowed(part, self) if hasattr(part, "dtype") else part for part in rest])
            return apply(index.getitem, (x,), index=kept)
        except IndexError as error:
            raise RangeError(f"indexing a tensor of shape {self._array.shape}: {error}") from error

    def __len__(self) -> int:
        if not self._array.ndim:
            raise DtypeError("len() of a 0-d tensor")
        return len(self._array)

    def __iter__(self) -> Iterator[Tensor]:
        if not self._array.ndim:
            raise DtypeError("iteration over a 0-d tensor")
        return (self[i] for i in range(len(self._array)))


def raw_index(where: Any, xp: Any) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]]:
    """An index in two: the integers, where they must be applied first, and what is left.

    PyTorch takes a single integer as a select, also beside an array of them; NumPy would broadcast the two together,
    and put the dimension elsewhere. Both end by an Ellipsis, so that a single element is a view too.
    """
    raw = [_raw_part(part, xp) for part in (where if isinstance(where, tuple) else (where,))]
    if not any(part is ... for part in raw):
        raw.append(...)
    single = [isinstance(part, int) and not isinstance(part, bool) for part in raw]
    if not any(single) or not any(isinstance(part, bool) or hasattr(part, "dtype") for part in raw):
        return None, tuple(raw)
    selects: list[Any] = []
    for part, alone in zip(raw, single, strict=True):
        if alone or part is ...:
            selects.append(part)
        elif part is not None:
            selects.extend([slice(None)] * _consumed(part))
    return tuple(selects), tuple(part for part, alone in zip(raw, single, strict=True) if not alone)


def _raw_part(part: Any, xp: Any) -> Any:
    """One part of an index: arrays for tensors and lists, numbers for what holds a single integer."""
    if isinstance(part, list):
        return xp.asarray(part) if part else xp.zeros(0, "int64")
    if isinstance(part, TensorBase):
        part = part._array
    if hasattr(part, "dtype") and not part.ndim and part.dtype.kind in "iu":
        return int(part)
    return part


def _consumed(part: Any) -> int:
    """How many dimensions a slice, an array or a mask stands for."""
    if isinstance(part, bool):
        return 0
    return part.ndim if hasattr(part, "dtype") and part.dtype == bool else 1
