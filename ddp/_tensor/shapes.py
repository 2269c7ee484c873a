"""Shapes: views, parts, and copies in another order. Sizes are resolved here, so that ops get shapes without -1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

from ddp._device import CPU, to_device
from ddp._tensor.base import Tensor, TensorBase, Tensors, alias, apply, wrap
from ddp._tensor.dtypes import parse
from ddp._tensor.indexing import index_along
from ddp._tensor.inplace import become_view, in_place
from ddp._tensor.operands import as_sequence, is_index, parse_int, parse_sizes
from ddp._tensor.reductions import at_least_1d, resolve_axes, resolve_axis
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.ops import indexing, shape
from ddp.ops.arrays import Ints
from ddp.ops.indexing import check_all, check_index

Self = TypeVar("Self", bound="Shapes")


def infer_shape(old: Ints, new: Ints, name: str) -> Ints:
    """Replaces a -1 in `new` by the size that is left for it.

    Raises: ShapeError if the numbers of elements differ, the -1 could be any size, or another size is negative.
    """
    total = math.prod(old)
    count = math.prod(new)
    sizes = new
    if -1 in new and count < 0 and total % count == 0:
        index = new.index(-1)
        sizes = (*new[:index], total // -count, *new[index + 1 :])
        count = total
    if count != total or min(sizes, default=0) < 0:
        raise ShapeError(f"{name}: shape {old} of {total} elements cannot become {new}")
    return sizes


Dims = int | Sequence[int]


class Shapes(TensorBase):
    """The methods of a tensor that change its shape, or take parts of it.

    Views share memory with the tensor, as in NumPy. `reshape` copies where no view can have the new shape.

    Raises: RangeError for a dimension that the tensor does not have; DtypeError for one that is not an integer.
    """

    __slots__ = ()

    def reshape(self, *sizes: Dims, shape: Sequence[int] | None = None) -> Tensor:
        """The same elements in another shape; one size may be -1.

        Raises: ShapeError if the elements do not fit; DtypeError for sizes that are not integers; ArgumentError if they
        are given both by position and by name.
        """
        return _reshaped(self, infer_shape(self.array.shape, parse_sizes(sizes, shape), "reshape"))

    def reshape_as(self, other: TensorBase) -> Tensor:
        """The same elements in the shape of `other`. Raises: ShapeError if the elements do not fit."""
        return self.reshape(other.array.shape)

    def view(self, *shape: Any, size: Sequence[int] | None = None) -> Tensor:
        """As reshape, but never a copy: view(2, -1). view(dtype): the same bytes as numbers of another dtype.

        A dtype of another size changes the last dimension. No gradient passes through a view of another dtype.

        Raises: ShapeError if the elements do not fit, or if the memory does not allow the shape, or the dtype, as a
        view; DtypeError for sizes that are not integers, or a dtype that tensors do not have; ArgumentError if sizes
        are given both by position and by name.
        """
        if len(shape) == 1 and not hasattr(type(shape[0]), "__index__") and not isinstance(shape[0], Sequence):
            return self._as_dtype(shape[0])
        out = _reshaped(self, infer_shape(self.array.shape, parse_sizes(shape, size), "view"))
        if out.version is not self.version and out.array.size:
            raise ShapeError(
                f"view: shape {self.array.shape} with strides {self.array.strides} cannot be seen as "
                f"{out.array.shape} without a copy; use reshape()"
            )
        return out

    def _as_dtype(self, dtype: Any) -> Tensor:
        dtype = parse(dtype)
        if dtype == self.array.dtype:
            return self.reshape(self.array.shape)
        try:
            return wrap(self.array.view(dtype), self._device, self)
        except ValueError as error:
            raise ShapeError(f"view({dtype}) of shape {self.array.shape} of {self.array.dtype}: {error}") from error

    def view_as(self, other: TensorBase) -> Tensor:
        """As view, in the shape of `other`. Raises: ShapeError as view."""
        return self.view(other.array.shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Joins dimensions start_dim to end_dim (inclusive) into one.

        Raises: RangeError; ArgumentError if start_dim comes after end_dim.
        """
        old = self.array.shape or (1,)
        first = resolve_axis(self, start_dim, "flatten")
        last = resolve_axis(self, end_dim, "flatten")
        if first > last:
            raise ArgumentError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim} in shape {old}")
        return _reshaped(self, (*old[:first], math.prod(old[first : last + 1]), *old[last + 1 :]))

    def ravel(self) -> Tensor:
        """Joins all dimensions into one."""
        return self.flatten()

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Tensor:
        """Splits dimension `dim` into several of these sizes; one may be -1.

        Raises: ShapeError if they do not fit, or for a 0-d tensor; RangeError.
        """
        old = self.array.shape
        axis, n = _axis_and_size(self, dim, "unflatten")
        return _reshaped(self, (*old[:axis], *infer_shape((n,), tuple(sizes), "unflatten"), *old[axis + 1 :]))

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Exchanges two dimensions. Raises: RangeError."""
        dims = list(range(self.array.ndim))
        a = resolve_axis(self, dim0, "transpose")
        b = resolve_axis(self, dim1, "transpose")
        if dims:
            dims[a], dims[b] = dims[b], dims[a]
        return _permuted(self, tuple(dims))

    swapdims = transpose

    def swapaxes(self, axis0: int, axis1: int) -> Tensor:
        """Exchanges two dimensions: transpose with NumPy's names."""
        return self.transpose(axis0, axis1)

    def permute(self, *order: Dims, dims: Sequence[int] | None = None) -> Tensor:
        """The dimensions in another order.

        Raises: ArgumentError unless each is named once, or if they are given both by position and by name; RangeError
        if one does not exist; DtypeError for dimensions that are not integers.
        """
        wanted = parse_sizes(order, dims)
        places = tuple([resolve_axis(self, d, "permute") for d in wanted])
        if sorted(places) != list(range(self.array.ndim)):
            raise ArgumentError(f"permute: {wanted} does not name each dimension of {self.array.shape} once")
        return _permuted(self, places)

    def movedim(self, source: Dims, destination: Dims) -> Tensor:
        """Moves dimensions to other places; the rest keep their order.

        Raises: RangeError if one does not exist; ArgumentError if one is named twice, or the numbers of sources and
        destinations differ.
        """
        pairs = [as_sequence(source), as_sequence(destination)]
        moved, places = (tuple([resolve_axis(self, d, "movedim") for d in dims]) for dims in pairs)
        if len(moved) != len(places) or len(set(moved)) < len(moved) or len(set(places)) < len(places):
            raise ArgumentError(f"movedim: {source} to {destination}: expected as many of both, each named once")
        unmoved = iter(i for i in range(self.array.ndim) if i not in moved)
        back = dict(zip(places, moved, strict=True))
        return _permuted(self, tuple([back[i] if i in back else next(unmoved) for i in range(self.array.ndim)]))

    moveaxis = movedim

    @property
    def T(self) -> Tensor:
        """The dimensions reversed."""
        return _permuted(self, tuple(reversed(range(self.array.ndim))))

    @property
    def mT(self) -> Tensor:
        """The last two dimensions exchanged. Raises: ShapeError for fewer than two."""
        return _matrix(self, "mT").transpose(-2, -1)

    def t(self) -> Tensor:
        """The transpose of a matrix; vectors stay. Raises: ShapeError beyond two dimensions."""
        if self.array.ndim > 2:
            raise ShapeError(f"t: expected at most 2 dimensions, got shape {self.array.shape}")
        return self.T

    def expand(self, *sizes: Dims, size: Sequence[int] | None = None) -> Tensor:
        """Repeats dimensions of size 1 to these sizes without copying. Extra sizes come first; -1 keeps a size.

        Raises: ShapeError for any other change of size; DtypeError for sizes that are not integers; ArgumentError if
        they are given both by position and by name.
        """
        old = self.array.shape
        wanted = parse_sizes(sizes, size)
        lead = len(wanted) - len(old)
        new = tuple([old[i - lead] if n == -1 and i >= lead else n for i, n in enumerate(wanted)])
        if lead < 0 or any(n < 0 or (i >= lead and old[i - lead] not in (1, n)) for i, n in enumerate(new)):
            raise ShapeError(f"expand: shape {old} cannot be expanded to {wanted}")
        return apply(shape.expand, (self,), shape=new)

    def expand_as(self, other: TensorBase) -> Tensor:
        """As expand, to the shape of `other`. Raises: ShapeError as expand."""
        return self.expand(other.array.shape)

    def broadcast_to(self, size: Sequence[int]) -> Tensor:
        """As expand, to `size`. Raises: as expand."""
        return self.expand(size)

    def squeeze(self, dim: Dims | None = None) -> Tensor:
        """Removes all dimensions of size 1, or those of `dim` that have size 1.

        Raises: RangeError; ArgumentError if a dimension is named twice.
        """
        old = self.array.shape
        among: Sequence[int] = ()
        if dim is None:
            among = range(len(old))
        elif as_sequence(dim):
            among = resolve_axes(self, dim, "squeeze")
        return _reshaped(self, tuple([n for i, n in enumerate(old) if n != 1 or i not in among]))

    def unsqueeze(self, dim: int) -> Tensor:
        """Adds a dimension of size 1 at `dim`. Raises: RangeError."""
        old = self.array.shape
        axis = resolve_axis(self, dim, "unsqueeze", new=1)
        return _reshaped(self, (*old[:axis], 1, *old[axis:]))

    def split(self, split_size: Dims, dim: int = 0) -> Tensors:
        """Splits along `dim` into parts of `split_size`, of which the last may be smaller, or of given sizes.

        Raises: ShapeError if sizes do not add up, if one is negative, or for a 0-d tensor; ArgumentError for a negative
        split_size, and for 0 unless the dimension is empty; RangeError; DtypeError for sizes that are not integers.
        """
        if not is_index(split_size):
            return self.split_with_sizes(cast("Sequence[int]", split_size), dim)
        size = parse_int(split_size, "split", "a size")
        axis, n = _axis_and_size(self, dim, "split")
        if size < 0 or (size == 0 and n):
            raise ArgumentError(f"split: pieces of {size} of shape {self.array.shape}, dimension {axis}")
        return _split(self, axis, [min(size, n - i) for i in range(0, n, size)] if n else [0])

    def split_with_sizes(self, split_sizes: Sequence[int], dim: int = 0) -> Tensors:
        """Splits along `dim` into parts of these sizes.

        Raises: ShapeError if they do not add up to the size of `dim`, if one is negative, or for a 0-d tensor;
        RangeError; DtypeError for sizes that are not integers.
        """
        axis, n = _axis_and_size(self, dim, "split")
        sizes = parse_sizes((split_sizes,))
        if sum(sizes) != n or any(length < 0 for length in sizes):
            raise ShapeError(f"split: sizes {sizes} do not add up to {n}, dimension {axis} of {self.array.shape}")
        return _split(self, axis, sizes)

    def chunk(self, chunks: int, dim: int = 0) -> Tensors:
        """Splits along `dim` into at most `chunks` parts of one size; the last may be smaller.

        Raises: ArgumentError unless chunks is at least 1; RangeError; ShapeError for a 0-d tensor; DtypeError if chunks
        is not an integer.
        """
        axis, n = _axis_and_size(self, dim, "chunk")
        count = parse_int(chunks, "chunk", "a number of chunks")
        if count < 1:
            raise ArgumentError(f"chunk: expected at least 1 chunk, got {count}")
        if not n:
            return _split(self, axis, [0] * count)
        return self.split(-(-n // count), axis)

    def tensor_split(self, indices_or_sections: Dims, dim: int = 0) -> Tensors:
        """Splits along `dim` into n parts, whose sizes differ by at most one, or before each of the given indices.

        Raises: ArgumentError unless n is at least 1; RangeError; ShapeError for a 0-d tensor; DtypeError for numbers
        that are not integers.
        """
        axis, n = _axis_and_size(self, dim, "tensor_split")
        if isinstance(indices_or_sections, TensorBase):
            indices_or_sections = to_device(indices_or_sections.array, CPU).tolist()
        if is_index(indices_or_sections):
            sections = parse_int(indices_or_sections, "tensor_split", "a number of sections")
            if sections < 1:
                raise ArgumentError(f"tensor_split: expected at least 1 section, got {sections}")
            size, longer = divmod(n, sections)
            return _split(self, axis, [size + 1] * longer + [size] * (sections - longer))
        cuts = [None, *parse_sizes((indices_or_sections,)), None]
        return tuple([_slice_view(self, axis, slice(*pair)) for pair in pairwise(cuts)])

    def unbind(self, dim: int = 0) -> Tensors:
        """The slices along `dim`, without that dimension. Raises: RangeError; ShapeError for a 0-d tensor."""
        axis, _ = _axis_and_size(self, dim, "unbind")
        return _share_versions(self, apply(shape.unbind, (self,), dim=axis))

    def narrow(self, dim: int, start: Any, length: int) -> Tensor:
        """`length` elements along `dim`, from `start` on.

        Raises: RangeError if `dim` does not have all of them, or length is negative; ShapeError for a 0-d tensor;
        DtypeError if `start` or `length` is not an integer.
        """
        axis, n = _axis_and_size(self, dim, "narrow")
        first = parse_int(start, "narrow", "start")
        length = parse_int(length, "narrow", "length")
        if first < 0:
            first += n
        if length < 0 or not 0 <= first <= n - length:
            raise RangeError(f"narrow: {first} + {length} elements in dimension {axis} of shape {self.array.shape}")
        return _slice_view(self, axis, slice(first, first + length))

    def select(self, dim: int, index: int) -> Tensor:
        """The slice at `index` along `dim`, without that dimension.

        Raises: RangeError; ShapeError for a 0-d tensor; DtypeError if `index` is not an integer.
        """
        axis, n = _axis_and_size(self, dim, "select")
        position = parse_int(index, "select", "an index")
        if not -n <= position < n:
            raise RangeError(f"select: index {position} in dimension {axis} of shape {self.array.shape}")
        return _slice_view(self, axis, position)

    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """The diagonal of two dimensions, as a new last dimension; offset > 0: a diagonal above the main one.

        Raises: RangeError; ShapeError if dim1 and dim2 are one dimension.
        """
        a = resolve_axis(self, dim1, "diagonal")
        b = resolve_axis(self, dim2, "diagonal")
        if a == b:
            raise ShapeError(f"diagonal: dimensions {dim1} and {dim2} of shape {self.array.shape} are one")
        return apply(shape.diagonal, (self,), offset=offset, dim0=a, dim1=b)

    def unfold(self, dimension: int, size: int, step: int) -> Tensor:
        """Windows of `size` elements along `dimension`, `step` apart, their elements in a new last dimension.

        Raises: ShapeError if no window fits, for a negative size, or for a step below 1; RangeError.
        """
        axis = resolve_axis(self, dimension, "unfold")
        n = self.array.shape[axis] if self.array.ndim else 1
        if step < 1 or not 0 <= size <= n:
            raise ShapeError(
                f"unfold: windows of {size}, {step} apart, in dimension {axis} of shape {self.array.shape}"
            )
        if not self.array.ndim:
            return at_least_1d(self)[:size]
        return apply(shape.unfold, (self,), dim=axis, size=size, step=step)

    def as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0) -> Tensor:
        """The elements of a contiguous tensor at these strides (in elements), as a view to read from.

        One element may appear several times in the view, so the view should not be written to.

        Raises: ShapeError unless the tensor is contiguous, if an element is outside of it, if a number is
        negative, or if size and stride differ in length.
        """
        array = self.array
        last = storage_offset + sum((n - 1) * step for n, step in zip(size, stride, strict=False))
        fits = len(size) == len(stride) and min((*size, *stride, storage_offset)) >= 0
        if not array.flags.c_contiguous or not fits or (0 not in size and last >= array.size):
            raise ShapeError(
                f"as_strided: sizes {tuple(size)} with strides {tuple(stride)}, element {storage_offset} to {last}, "
                f"of a tensor of shape {array.shape} and strides {array.strides}"
            )
        return apply(shape.as_strided, (self,), shape=tuple(size), stride=tuple(stride), offset=storage_offset)

    def __len__(self) -> int:
        if not self.array.ndim:
            raise DtypeError("len() of a 0-d tensor")
        return len(self.array)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.array.ndim:
            raise DtypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def repeat(self: Any, *sizes: Dims, repeats: Sequence[int] | None = None) -> Tensor:
        """Repeats the tensor along each dimension; more numbers than dimensions add leading dimensions.

        Raises: ShapeError for fewer numbers than dimensions, or for a negative number; DtypeError for numbers that are
        not integers; ArgumentError if they are given both by position and by name.
        """
        times = parse_sizes(sizes, repeats)
        ndim = self.array.ndim
        if len(times) < ndim or any(n < 0 for n in times):
            raise ShapeError(f"repeat: {times} for shape {self.array.shape}: expected a number for each dimension")
        if not times:
            return self.clone()
        x = self[(None,) * (len(times) - ndim)] if len(times) > ndim else self
        return apply(shape.repeat, (x,), times=tuple(times))

    def tile(self, *sizes: Dims, dims: Sequence[int] | None = None) -> Tensor:
        """Like repeat, but fewer numbers than dimensions apply to the last dimensions.

        Raises: ShapeError for a negative number; DtypeError for numbers that are not integers; ArgumentError if they
        are given both by position and by name.
        """
        times = parse_sizes(sizes, dims)
        return self.repeat((*(1,) * (self.array.ndim - len(times)), *times))

    def repeat_interleave(self, repeats: Any, dim: int | None = None, output_size: int | None = None) -> Tensor:
        """Repeats each element, or each slice along `dim`, next to itself.

        repeats: a number, or a tensor with a number for each element or slice; output_size: the size of `dim` in the
        result; if it is given, the host does not wait for `repeats` on a GPU.

        Raises: ShapeError for repeats of another shape; DtypeError for repeats that are not integers; RangeError if
        there is no dimension `dim`; ArgumentError for a negative number or a wrong output_size. If `repeats` is a
        tensor and this tensor is on a GPU, the ArgumentError is raised by the next call that waits for the GPU.
        """
        x: Any = self
        if dim is None or not self.array.ndim:
            x = x.reshape(-1)
            dim = 0
        axis = resolve_axis(x, dim, "repeat_interleave")
        n = x.array.shape[axis]
        xp = self._device.xp
        if isinstance(repeats, TensorBase):
            times = to_device(repeats.array, self._device)
            if times.dtype.kind not in "iu":
                raise DtypeError(f"repeat_interleave: repeats are int64, not {times.dtype}")
            if times.ndim > 1 or (times.ndim and times.shape[0] not in (1, n)):
                raise ShapeError(f"repeat_interleave: repeats of shape {times.shape} for {n} in dimension {axis}")
            check_all(xp, times >= 0, ArgumentError, "repeat_interleave: a number of repeats is negative")
            # By search, because CuPy's repeat does not take an array of counts.
            ends = xp.cumsum(xp.broadcast_to(times, (n,)))
            total = output_size if n else 0
            if total is None:
                total = int(ends[-1])
            elif n:
                message = "repeat_interleave: output_size is {last}, but the repeats add up to {value}"
                check_index(xp, ends[-1:], total, total + 1, ArgumentError, message)
            positions = xp.searchsorted(ends[:-1], xp.arange(total), side="right")
            return apply(indexing.index, (x,), places=index_along(x, axis, positions))
        if repeats < 0:
            raise ArgumentError(f"repeat_interleave: expected no negative number of repeats, got {repeats}")
        if output_size not in (None, n * repeats):
            raise ArgumentError(f"repeat_interleave: output_size {output_size} is not {n} * {repeats}")
        shape = x.array.shape
        wide = x.unsqueeze(axis + 1).expand(*shape[: axis + 1], repeats, *shape[axis + 1 :])
        return wide.reshape(*shape[:axis], n * repeats, *shape[axis + 1 :])

    squeeze_, unsqueeze_, t_, transpose_, swapaxes_ = (
        in_place(method, become_view) for method in (squeeze, unsqueeze, t, transpose, swapaxes)
    )
    swapdims_ = transpose_

    def flip(self, *order: Dims, dims: Dims | None = None) -> Tensor:
        """Reverses the order along `dims`.

        Raises: RangeError if a dimension does not exist; ArgumentError if one is named twice, or if they are given both
        by position and by name; DtypeError for dimensions that are not integers.
        """
        wanted = parse_sizes(order, dims)
        return apply(shape.flip, (self,), dims=resolve_axes(self, wanted, "flip") if wanted else ())

    def fliplr(self) -> Tensor:
        """Reverses the order along dimension 1. Raises: RangeError for fewer than two dimensions."""
        return self.flip(1)

    def flipud(self) -> Tensor:
        """Reverses the order along dimension 0."""
        return self.flip(0)

    def rot90(self, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
        """Rotates by k * 90 degrees, from the first of two dimensions towards the second.

        Raises: ArgumentError unless `dims` names two different dimensions; RangeError if one does not exist; DtypeError
        if they are not integers.
        """
        named = parse_sizes((dims,))
        if len(named) != 2:
            raise ArgumentError(f"rot90: expected two dimensions, got {named}")
        first, second = resolve_axes(self, named, "rot90")
        turned = self.flip(*((), (second,), (first, second), (first,))[k % 4])
        return turned.transpose(first, second) if k % 2 else turned

    def roll(self, shifts: Dims, dims: Dims | None = None) -> Tensor:
        """Shifts elements along `dims`; those beyond the end come first. Without `dims`: in the flattened order.

        Raises: ArgumentError unless there are as many shifts as dims; RangeError; DtypeError unless all are integers.
        """
        by = tuple([parse_int(shift, "roll", "a shift") for shift in as_sequence(shifts)])
        along = () if dims is None else as_sequence(dims)
        if len(along or (0,)) != len(by):
            raise ArgumentError(f"roll: {len(by)} shifts {by} for dims {along}: expected as many")
        if not along:
            return self.reshape(-1).roll(by, 0).reshape(self.array.shape)
        return apply(shape.roll, (self,), shifts=by, dims=tuple([resolve_axis(self, d, "roll") for d in along]))

    def tril(self, diagonal: int = 0) -> Tensor:
        """A copy with zeros above a diagonal of the last two dimensions. Raises: ShapeError for fewer than two."""
        return apply(shape.tril, (_matrix(self, "tril"),), diagonal=diagonal)

    def triu(self, diagonal: int = 0) -> Tensor:
        """A copy with zeros below a diagonal of the last two dimensions. Raises: ShapeError for fewer than two."""
        return apply(shape.triu, (_matrix(self, "triu"),), diagonal=diagonal)

    tril_ = in_place(tril)
    triu_ = in_place(triu)

    def fill_diagonal_(self: Self, fill_value: float) -> Self:
        """The diagonal of a matrix becomes `fill_value`.

        Raises: ShapeError for other numbers of dimensions; DtypeError if the value is neither a number nor a tensor;
        InplaceError if autograd must record the write and cannot.
        """
        if self.array.ndim != 2:
            raise ShapeError(f"fill_diagonal_: expected a matrix, got shape {self.array.shape}")
        diagonal = wrap(self._device.xp.eye(*self.array.shape, dtype=bool), self._device)
        return cast(Any, self).masked_fill_(diagonal, fill_value)

    def diag(self, diagonal: int = 0) -> Tensor:
        """A matrix with this vector on a diagonal; for a matrix, a copy of its diagonal.

        Raises: ShapeError for other numbers of dimensions.
        """
        if self.array.ndim not in (1, 2):
            raise ShapeError(f"diag: expected a vector or a matrix, got shape {self.array.shape}")
        return self.diag_embed(diagonal) if self.array.ndim == 1 else self.diagonal(diagonal).clone()

    def diag_embed(self, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
        """Puts the last dimension on the diagonal of two new ones; zero elsewhere.

        Raises: ShapeError if dim1 and dim2 are one dimension; RangeError if the result has no such dimension.
        """
        x = at_least_1d(self)
        a = resolve_axis(x, dim1, "diag_embed", new=1)
        b = resolve_axis(x, dim2, "diag_embed", new=1)
        if a == b:
            raise ShapeError(f"diag_embed: dimensions {dim1} and {dim2} of shape {self.array.shape} are one")
        return apply(shape.diag_embed, (x,), offset=offset, dim0=a, dim1=b)


def _reshaped(x: TensorBase, new: Ints) -> Tensor:
    return apply(shape.reshape, (x,), shape=new)


def _permuted(x: TensorBase, dims: Ints) -> Tensor:
    return apply(shape.permute, (x,), dims=dims)


def _axis_and_size(x: TensorBase, dim: int, name: str) -> tuple[int, int]:
    """The dimension, non-negative, and its size. Raises: RangeError; ShapeError for a 0-d tensor."""
    axis = resolve_axis(x, dim, name)
    if not x.array.ndim:
        raise ShapeError(f"{name}: a 0-d tensor has no dimension to cut")
    return axis, x.array.shape[axis]


def _slice_view(x: TensorBase, axis: int, part: int | slice) -> Tensor:
    return apply(indexing.getitem, (x,), index=(*(slice(None),) * axis, part, ...))


def _split(x: TensorBase, dim: int, lengths: Sequence[int]) -> Tensors:
    return _share_versions(x, apply(shape.split, (x,), dim=dim, lengths=tuple(lengths)))


def _share_versions(x: TensorBase, parts: Tensors) -> Tensors:
    for part in parts:
        alias(part, x)
    return parts


def _matrix(x: Any, name: str) -> Any:
    if x.array.ndim < 2:
        raise ShapeError(f"{name}: expected at least 2 dimensions, got shape {x.array.shape}")
    return x
