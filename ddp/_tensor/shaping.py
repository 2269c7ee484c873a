"""Shapes of tensors: negative and inferred sizes are resolved here, so that ops see plain shapes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.dtypes import parse
from ddp._tensor.reductions import axes, axis
from ddp._tensor.spelling import spelled
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.ops import shape

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


def spread(sizes: tuple[Any, ...], named: Any = None) -> tuple[int, ...]:
    """Sizes given one by one, or as one sequence, or by name: reshape(2, 3), reshape((2, 3)), reshape(shape=(2, 3)).

    Raises: DtypeError if they are no integers.
    """
    if named is not None:
        if sizes:
            raise ArgumentError(f"sizes {sizes} and, by name, {named}: expected one of them")
        sizes = (named,)
    if len(sizes) == 1 and not hasattr(type(sizes[0]), "__index__"):
        sizes = sizes[0]
    try:
        return tuple(map(operator.index, sizes))
    except TypeError:
        raise DtypeError(f"expected integers, or a sequence of them, got {sizes!r}") from None


def infer(old: tuple[int, ...], new: tuple[int, ...], name: str) -> tuple[int, ...]:
    """`new` with its -1 replaced by what is left of `old`'s elements. Raises: ShapeError if they do not fit."""
    total, known = math.prod(old), math.prod(n for n in new if n != -1)
    if new.count(-1) == 1 and known > 0 and total % known == 0:
        return tuple(total // known if n == -1 else n for n in new)
    if -1 in new or any(n < 0 for n in new) or known != total:
        raise ShapeError(f"{name}: shape {old} of {total} elements cannot become {new}")
    return new


def inserted(x: TensorBase, dim: int, name: str) -> int:
    """`dim` as the non-negative place of a new dimension. Raises: RangeError."""
    ndim: int = x.array.ndim
    if not -ndim - 1 <= dim <= ndim:
        raise RangeError(f"{name}: dimension {dim} of shape {x.array.shape}: expected {-ndim - 1} to {ndim}")
    return dim % (ndim + 1)


class Shaping(TensorBase):
    """Views share memory with the tensor, as in NumPy; a reshape that the memory does not allow is a copy."""

    __slots__ = ()

    def reshape(self, *sizes: int | Sequence[int], shape: Sequence[int] | None = None) -> Tensor:
        """The same elements in another shape; one size may be -1. Raises: ShapeError if the elements do not fit."""
        return _reshaped(self, infer(self.array.shape, spread(sizes, shape), "reshape"))

    def reshape_as(self, other: TensorBase) -> Tensor:
        """The same elements in the shape of `other`. Raises: ShapeError."""
        return self.reshape(other.array.shape)

    def view(self, *shape: Any, size: Sequence[int] | None = None) -> Tensor:
        """As reshape, but never a copy: view(2, -1). view(dtype): the same bytes as numbers of another dtype.

        A dtype of another size changes the last dimension; no gradient passes such a view.

        Raises: ShapeError if the memory does not allow the shape, or the dtype, as a view.
        """
        if len(shape) == 1 and not hasattr(type(shape[0]), "__index__") and not isinstance(shape[0], Sequence):
            return self._as_dtype(shape[0])
        out = _reshaped(self, infer(self.array.shape, spread(shape, size), "view"))
        if out.version is not self.version and out.array.size:
            raise ShapeError(
                f"view: shape {self.array.shape} with strides {self.array.strides} cannot be seen as "
                f"{out.array.shape} without a copy; use reshape()"
            )
        return out

    def _as_dtype(self, dtype: Any) -> Tensor:
        kind = parse(dtype)
        if kind == self.array.dtype:
            return self.reshape(self.array.shape)
        try:
            return wrap(self.array.view(kind), self._device, self)
        except ValueError as error:
            raise ShapeError(
                f"view({kind}): the last dimension of shape {self.array.shape} of {self.array.dtype}: {error}"
            ) from error

    def view_as(self, other: TensorBase) -> Tensor:
        """As view, in the shape of `other`. Raises: ShapeError."""
        return self.view(other.array.shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Dimensions start_dim to end_dim (inclusive) joined into one."""
        old: tuple[int, ...] = self.array.shape or (1,)
        first, last = axis(self, start_dim, "flatten"), axis(self, end_dim, "flatten")
        if first > last:
            raise ArgumentError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim} in shape {old}")
        return _reshaped(self, (*old[:first], math.prod(old[first : last + 1]), *old[last + 1 :]))

    def ravel(self) -> Tensor:
        """All dimensions joined into one."""
        return self.flatten()

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Tensor:
        """Dimension `dim` cut into several of these sizes; one may be -1. Raises: ShapeError if they do not fit."""
        old: tuple[int, ...] = self.array.shape
        at = axis(self, dim, "unflatten")
        if not old:
            raise ShapeError("unflatten: a 0-d tensor has no dimension to cut")
        return _reshaped(self, (*old[:at], *infer((old[at],), tuple(sizes), "unflatten"), *old[at + 1 :]))

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Two dimensions exchanged."""
        dims = list(range(self.array.ndim))
        a, b = axis(self, dim0, "transpose"), axis(self, dim1, "transpose")
        if dims:
            dims[a], dims[b] = dims[b], dims[a]
        return _permuted(self, tuple(dims))

    def swapaxes(self, axis0: int, axis1: int) -> Tensor:
        """Two dimensions exchanged: transpose under NumPy's name."""
        return self.transpose(axis0, axis1)

    def swapdims(self, dim0: int, dim1: int) -> Tensor:
        """Two dimensions exchanged: transpose under another name."""
        return self.transpose(dim0, dim1)

    def permute(self, *order: int | Sequence[int], dims: Sequence[int] | None = None) -> Tensor:
        """The dimensions in another order. Raises: ArgumentError unless each is named once."""
        wanted = spread(order, dims)
        places = tuple([axis(self, d, "permute") for d in wanted])
        if sorted(places) != list(range(self.array.ndim)):
            raise ArgumentError(f"permute: {wanted} does not name each dimension of {self.array.shape} once")
        return _permuted(self, places)

    def movedim(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
        """Dimensions moved to other places; the rest keep their order. Raises: RangeError, ArgumentError."""
        pairs = [(d,) if isinstance(d, int) else tuple(d) for d in (source, destination)]
        taken, places = (tuple([axis(self, d, "movedim") for d in dims]) for dims in pairs)
        if len(taken) != len(places) or len(set(taken)) < len(taken) or len(set(places)) < len(places):
            raise ArgumentError(f"movedim: {source} to {destination}: expected as many of both, each named once")
        rest = iter(i for i in range(self.array.ndim) if i not in taken)
        back = dict(zip(places, taken, strict=True))
        return _permuted(self, tuple([back[i] if i in back else next(rest) for i in range(self.array.ndim)]))

    def moveaxis(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
        """Dimensions moved to other places: movedim under NumPy's name."""
        return self.movedim(source, destination)

    @property
    def T(self) -> Tensor:
        """The dimensions reversed."""
        return _permuted(self, tuple(reversed(range(self.array.ndim))))

    @property
    def mT(self) -> Tensor:
        """The last two dimensions exchanged. Raises: ShapeError for fewer than two."""
        if self.array.ndim < 2:
            raise ShapeError(f"mT: expected at least 2 dimensions, got shape {self.array.shape}")
        return self.transpose(-2, -1)

    def t(self) -> Tensor:
        """The transpose of a matrix; vectors stay. Raises: ShapeError beyond two dimensions."""
        if self.array.ndim > 2:
            raise ShapeError(f"t: expected at most 2 dimensions, got shape {self.array.shape}")
        return self.T

    def expand(self, *sizes: int | Sequence[int], size: Sequence[int] | None = None) -> Tensor:
        """Dimensions of size 1, and new leading ones, repeated without copying; -1 keeps a size.

        Raises: ShapeError for any other change of size.
        """
        old: tuple[int, ...] = self.array.shape
        wanted = spread(sizes, size)
        lead = len(wanted) - len(old)
        new = tuple([old[i - lead] if n == -1 and i >= lead else n for i, n in enumerate(wanted)])
        if lead < 0 or any(n < 0 or (i >= lead and old[i - lead] not in (1, n)) for i, n in enumerate(new)):
            raise ShapeError(f"expand: shape {old} cannot be expanded to {wanted}")
        return apply(shape.expand, (self,), shape=new)

    def expand_as(self, other: TensorBase) -> Tensor:
        """As expand, to the shape of `other`. Raises: ShapeError."""
        return self.expand(other.array.shape)

    def broadcast_to(self, size: Sequence[int]) -> Tensor:
        """As expand, to `size`. Raises: ShapeError."""
        return self.expand(size)

    @spelled
    def squeeze(self, dim: int | Sequence[int] | None = None) -> Tensor:
        """Without dimensions of size 1: all of them, or those of `dim` that are."""
        old: tuple[int, ...] = self.array.shape
        among = range(len(old)) if dim is None else () if dim == () else axes(self, dim, "squeeze")
        return _reshaped(self, tuple([n for i, n in enumerate(old) if n != 1 or i not in among]))

    @spelled
    def unsqueeze(self, dim: int) -> Tensor:
        """With a new dimension of size 1 at `dim`. Raises: RangeError."""
        old: tuple[int, ...] = self.array.shape
        at = inserted(self, dim, "unsqueeze")
        return _reshaped(self, (*old[:at], 1, *old[at:]))


def _reshaped(x: TensorBase, new: tuple[int, ...]) -> Tensor:
    return apply(shape.reshape, (x,), shape=new)


def _permuted(x: TensorBase, dims: tuple[int, ...]) -> Tensor:
    return apply(shape.permute, (x,), dims=dims)
