"""Parts of tensors, all of them views: stretches, slices, diagonals, windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from ddp._device import CPU, place
from ddp._tensor.base import TensorBase, apply, see
from ddp._tensor.reductions import axis
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.ops import indexing, shape

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


class Cutting(TensorBase):
    """Views: they share memory with the tensor."""

    __slots__ = ()

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        """Stretches of `split_size` along `dim`, the last one shorter if need be, or of the sizes given.

        Raises: ShapeError if sizes do not add up; ArgumentError for a size below 1.
        """
        at, n = _dimension(self, dim, "split")
        if not isinstance(split_size, int):
            return self.split_with_sizes(split_size, dim)
        if split_size < 0 or (split_size == 0 and n):
            raise ArgumentError(f"split: pieces of {split_size} of shape {self.array.shape}, dimension {at}")
        whole, rest = divmod(n, split_size) if n else (0, 0)
        return _split(self, at, (split_size,) * whole + ((rest,) if rest or not n else ()))

    def split_with_sizes(self, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        """Stretches of these sizes along `dim`. Raises: ShapeError if they do not add up to its size."""
        at, n = _dimension(self, dim, "split")
        lengths = tuple(split_sizes)
        if sum(lengths) != n or any(length < 0 for length in lengths):
            raise ShapeError(f"split: sizes {lengths} do not add up to {n}, dimension {at} of {self.array.shape}")
        return _split(self, at, lengths)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """At most `chunks` stretches of one size along `dim`; the last one may be shorter. Raises: ArgumentError."""
        at, n = _dimension(self, dim, "chunk")
        if chunks < 1:
            raise ArgumentError(f"chunk: expected at least 1 chunk, got {chunks}")
        if not n:
            return _split(self, at, (0,) * chunks)
        return self.split(-(-n // chunks), at)

    def tensor_split(self, indices_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        """As many stretches as asked for, sizes differing by one at most; or cut before each of these indices."""
        at, n = _dimension(self, dim, "tensor_split")
        if isinstance(indices_or_sections, TensorBase):
            indices_or_sections = place(indices_or_sections.array, CPU).tolist()
        if isinstance(indices_or_sections, int):
            if indices_or_sections < 1:
                raise ArgumentError(f"tensor_split: expected at least 1 section, got {indices_or_sections}")
            size, longer = divmod(n, indices_or_sections)
            return _split(self, at, (size + 1,) * longer + (size,) * (indices_or_sections - longer))
        cuts = [None, *indices_or_sections, None]
        return tuple([_viewed(self, at, slice(*pair)) for pair in pairwise(cuts)])

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        """The slices along `dim`, which vanishes."""
        at, _ = _dimension(self, dim, "unbind")
        return _views(self, apply(shape.unbind, (self,), dim=at))

    def narrow(self, dim: int, start: Any, length: int) -> Tensor:
        """`length` elements along `dim`, from `start` on. Raises: RangeError, ShapeError if they are not there."""
        at, n = _dimension(self, dim, "narrow")
        first = int(start)
        if not -n <= first <= n:
            raise RangeError(f"narrow: start {first} in dimension {at} of shape {self.array.shape}")
        first += n if first < 0 else 0
        if length < 0 or first + length > n:
            raise ShapeError(f"narrow: {first} + {length} elements in dimension {at} of shape {self.array.shape}")
        return _viewed(self, at, slice(first, first + length))

    def select(self, dim: int, index: int) -> Tensor:
        """The slice at `index` along `dim`, which vanishes. Raises: RangeError."""
        at, n = _dimension(self, dim, "select")
        if not -n <= index < n:
            raise RangeError(f"select: index {index} in dimension {at} of shape {self.array.shape}")
        return _viewed(self, at, int(index))

    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """The diagonal over two dimensions, as a last dimension; above the main one if offset > 0."""
        at = _two(self, dim1, dim2, "diagonal")
        return apply(shape.diagonal, (self,), offset=offset, dim0=at[0], dim1=at[1])

    def unfold(self, dimension: int, size: int, step: int) -> Tensor:
        """Windows of `size` elements along `dimension`, `step` apart, their elements in a new last dimension.

        Raises: ShapeError if no window fits; ArgumentError for a step below 1.
        """
        at = axis(self, dimension, "unfold")
        n = self.array.shape[at] if self.array.ndim else 1
        if step < 1 or size < 0:
            raise ArgumentError(f"unfold: windows of {size}, {step} apart: expected a step of at least 1")
        if size > n:
            raise ShapeError(f"unfold: windows of {size} in dimension {at} of shape {self.array.shape}")
        if not self.array.ndim:
            return cast(Any, self).reshape(1)[:size]
        return apply(shape.unfold, (self,), dim=at, size=size, step=step)

    def as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0) -> Tensor:
        """The elements of a contiguous tensor at these strides (in elements), as a view to read from.

        Elements may show in several places, so it should not be written to.

        Raises: ShapeError unless contiguous; RangeError if an element lies outside of it.
        """
        array = self.array
        if not array.flags.c_contiguous:
            raise ShapeError(f"as_strided: shape {array.shape} with strides {array.strides} is not contiguous")
        if len(size) != len(stride) or any(n < 0 for n in (*size, *stride, storage_offset)):
            raise ArgumentError(f"as_strided: sizes {tuple(size)} with strides {tuple(stride)}, from {storage_offset}")
        last = storage_offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and last >= array.size:
            raise RangeError(f"as_strided: element {last} of a tensor of {array.size} elements")
        return apply(shape.as_strided, (self,), shape=tuple(size), stride=tuple(stride), offset=storage_offset)

    def __len__(self) -> int:
        if not self.array.ndim:
            raise DtypeError("len() of a 0-d tensor")
        return len(self.array)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.array.ndim:
            raise DtypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))


def _dimension(x: TensorBase, dim: int, name: str) -> tuple[int, int]:
    """The dimension, non-negative, and its size. Raises: RangeError; ShapeError for a 0-d tensor."""
    at = axis(x, dim, name)
    if not x.array.ndim:
        raise ShapeError(f"{name}: a 0-d tensor has no dimension to cut")
    return at, x.array.shape[at]


def _two(x: TensorBase, dim1: int, dim2: int, name: str) -> tuple[int, int]:
    a, b = axis(x, dim1, name), axis(x, dim2, name)
    if a == b or x.array.ndim < 2:
        raise ShapeError(f"{name}: dimensions {dim1} and {dim2} of shape {x.array.shape}: expected two of them")
    return a, b


def _viewed(x: TensorBase, at: int, part: int | slice) -> Tensor:
    return apply(indexing.getitem, (x,), index=(*(slice(None),) * at, part, ...))


def _split(x: TensorBase, dim: int, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    return _views(x, apply(shape.split, (x,), dim=dim, lengths=lengths))


def _views(x: TensorBase, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    for part in parts:
        see(part, x)
    return parts
