"""Reductions, cumulative results, sorting and searching. Dims are checked here, so that ops get non-negative axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp._device import to_device
from ddp._tensor import results
from ddp._tensor.base import Self, Tensor, TensorBase, apply, guarded_function, wrap
from ddp._tensor.dtypes import is_float, parse, uint8
from ddp._tensor.inplace import in_place
from ddp._tensor.operands import as_method, as_sequence, convert, floating, parse_int
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.ops import elementwise, reduction, softmax_ops
from ddp.ops import indexing as ops
from ddp.ops.arrays import Ints, from_bfloat16

__all__ = ["isin", "searchsorted"]


Dims = int | Sequence[int] | None


def resolve_axis(x: TensorBase, dim: int, name: str, new: int = 0) -> int:
    """`dim` as a non-negative axis; a 0-d tensor counts as having one axis.

    new: how many dimensions more than `x` the result has

    Raises: RangeError if there is no such axis; DtypeError if `dim` is not an integer.
    """
    ndim = max(x.array.ndim + new, 1)
    axis = parse_int(dim, name, "a dimension")
    if not -ndim <= axis < ndim:
        raise RangeError(f"{name}: dimension {axis} of shape {x.array.shape}: expected {-ndim} to {ndim - 1}")
    return axis % ndim


def resolve_axes(x: TensorBase, dim: Dims, name: str) -> Ints:
    """`dim` as non-negative axes; None, () and [] stand for all axes.

    Raises: RangeError; ArgumentError for duplicates; DtypeError for dimensions that are not integers.
    """
    ndim: int = x.array.ndim
    if dim is None:
        return tuple(range(ndim))
    named = [resolve_axis(x, d, name) for d in as_sequence(dim)]
    if len(set(named)) < len(named):
        raise ArgumentError(f"{name}: dimensions {tuple(named)} name one twice")
    return tuple(named or range(ndim)) if ndim else ()


def at_least_1d(x: Any) -> Any:
    """Returns `x`, or a vector of one element if `x` is 0-d."""
    return x if x.array.ndim else x.reshape(1)


def check_not_empty(x: TensorBase, dims: Ints, name: str) -> TensorBase:
    """Returns `x`. Raises: ArgumentError if one of `dims` has size 0, so that nothing can be reduced."""
    if any(x.array.shape[d] == 0 for d in dims):
        raise ArgumentError(f"{name}: shape {x.array.shape} has no element along dimensions {dims}")
    return x


def to_dtype(x: TensorBase, dtype: Any) -> TensorBase:
    """Converts `x` to `dtype`, if one is given, so that the reduction computes in that dtype."""
    return x if dtype is None else convert(x, parse(dtype))


def required_float(x: Self, name: str) -> Self:
    """Returns `x`. Raises: DtypeError unless it is floating."""
    if not is_float(x.array.dtype):
        raise DtypeError(f"{name}: expected a floating tensor, got {x.array.dtype}; convert it with float()")
    return x


def _arg(x: TensorBase, name: str, method: str, dim: int | None, keepdim: bool) -> Any:
    """The index that the array's `method`, such as argmax, finds. name: the function that the user called."""
    check_not_empty(x, resolve_axes(x, dim, name), name)
    xp = x._device.xp
    array = from_bfloat16(xp, x.array)
    if dim is None:
        index = xp.asarray(getattr(array, method)())
        return index.reshape((1,) * array.ndim) if keepdim else index
    if not array.ndim:
        return xp.zeros((), xp.int64)
    return xp.asarray(getattr(array, method)(axis=resolve_axis(x, dim, name), keepdims=keepdim))


def _values_at(x: TensorBase, name: str, index: Any, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The values of `x` at `index`, and `index` as a tensor: a copy if backward will read `index`.

    index: of size 1 in the reduced dimension
    """
    if not x.array.ndim:
        return apply(reduction.amax, (x,), dims=(), keepdim=False), wrap(index, x._device)
    axis = resolve_axis(x, dim, name)
    values = apply(reduction.select, (x,), index=index, dim=axis, keepdim=keepdim)
    indices = index if keepdim else index.squeeze(axis)
    return values, wrap(indices if values.edge is None else indices.copy(), x._device)


def along(op: Any, x: TensorBase, dim: int) -> Any:
    """Applies `op` along one dimension; a 0-d tensor counts as 1-d."""
    axis = resolve_axis(x, dim, op.name)
    result = apply(op, (at_least_1d(x),), dim=axis)
    return result if x.array.ndim else result.reshape(())


def _cumulative(op: Any, doc: str) -> Any:
    def method(self: TensorBase, dim: int, *, dtype: Any = None) -> Tensor:
        return along(op, to_dtype(self, dtype), dim)

    return as_method(method, op.name, doc)


def _softmax(op: Any, doc: str) -> Any:
    def method(self: TensorBase, dim: int, dtype: Any = None) -> Tensor:
        return along(op, floating(to_dtype(self, dtype)), dim)

    return as_method(method, op.name, f"{doc} dtype: to convert to before.")


def _extreme(op: Any, doc: str) -> Any:
    def method(self: TensorBase, dim: Dims = None, keepdim: bool = False) -> Tensor:
        dims = resolve_axes(self, dim, op.name)
        return apply(op, (check_not_empty(self, dims, op.name),), dims=dims, keepdim=keepdim)

    return as_method(method, op.name, f"{doc}; equal ones share the gradient. Raises: ArgumentError if there is none.")


def _extreme_of(result_type: Any, which: str, elementwise: str) -> Any:
    """Makes max or min. result_type: the type of results with `dim`; elementwise: the name of the two-tensor method."""
    name = result_type.__name__

    def method(self: Any, dim: Any = None, keepdim: bool = False, *, other: TensorBase | None = None) -> Any:
        if other is not None or isinstance(dim, TensorBase):
            return getattr(self, elementwise)(dim if other is None else other)
        if dim is None:
            check_not_empty(self, resolve_axes(self, None, name), name)
            return getattr(self, f"a{name}")()
        return result_type(*_values_at(self, name, _arg(self, name, f"arg{name}", dim, True), dim, keepdim))

    doc = f"The {which} element of all; with `dim`, (values, indices) along it, the gradient going to the index; with"
    return as_method(method, name, f"{doc} another tensor, the {which.removesuffix('st')}r of both elementwise.")


def _arg_extreme(name: str, which: str) -> Any:
    def method(self: TensorBase, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return wrap(_arg(self, name, name, dim, keepdim), self._device)

    doc = f"Where the first {which} element is, int64; without `dim`, its place in the flattened tensor."
    return as_method(method, name, doc)


def _running(result_type: Any, ufunc: str, which: str) -> Any:
    """Makes cummax or cummin. result_type: the type of the results; ufunc: the name of the elementwise function."""
    name = result_type.__name__

    def method(self: TensorBase, dim: int) -> Any:
        xp = self._device.xp
        axis = resolve_axis(self, dim, name)
        if not self.array.ndim:
            return result_type(apply(elementwise.clone, (self,)), wrap(xp.zeros((), "int64"), self._device))
        index = reduction.running(xp, ufunc, from_bfloat16(xp, self.array), axis)
        values = apply(reduction.running_extreme, (self,), index=index, dim=axis)
        return result_type(values, wrap(index if values.edge is None else index.copy(), self._device))

    return as_method(
        method, name, f"(values, indices): the {which} element up to each along `dim`, and its last place."
    )


def _spread(name: str, doc: str) -> Any:
    """Makes var or std."""

    def method(
        self: Self, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        x = required_float(self, name)
        if correction is None:
            correction = 1 if unbiased is None or unbiased else 0
        options = {"keepdim": keepdim, "correction": correction, "root": name == "std"}
        return apply(reduction.var, (x,), dims=resolve_axes(x, dim, name), **options)

    options = f"unbiased: True is a correction of 1, as nothing is; False of 0. Also {name}(unbiased)."
    return as_method(method, name, f"{doc}. {options} Raises: DtypeError unless floating.")


def _truth(name: str, doc: str) -> Any:
    def method(self: TensorBase, dim: Dims = None, keepdim: bool = False) -> Tensor:
        array = self.array
        xp = self._device.xp
        truth = array if array.dtype.kind == "b" else array != 0
        out = xp.asarray(getattr(truth, name)(axis=resolve_axes(self, dim, name), keepdims=keepdim))
        return wrap(out.astype(uint8) if array.dtype == uint8 else out, self._device)

    return as_method(method, name, f"{doc}: bool, of uint8 uint8.")


class Reductions(TensorBase):
    """Reductions. dim: one dimension, several, or None for all; keepdim: reduced dimensions stay, with size 1.

    Raises: RangeError for a dimension that does not exist; ArgumentError if one is named twice; DtypeError for one
    that is not an integer, or for an unknown `dtype`.
    """

    __slots__ = ()

    def sum(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The sum; int64 for integers and bool. dtype: the elements are converted to it first."""
        return apply(reduction.sum, (to_dtype(self, dtype),), dims=resolve_axes(self, dim, "sum"), keepdim=keepdim)

    def nansum(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The sum of the elements that are not nan."""
        x = to_dtype(self, dtype)
        op = reduction.nansum if is_float(x.array.dtype) else reduction.sum
        return apply(op, (x,), dims=resolve_axes(self, dim, "nansum"), keepdim=keepdim)

    def mean(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The mean. Raises: DtypeError unless floating."""
        x = required_float(to_dtype(self, dtype), "mean")
        return apply(reduction.mean, (x,), dims=resolve_axes(self, dim, "mean"), keepdim=keepdim)

    def nanmean(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The mean of the elements that are not nan. Raises: DtypeError unless floating."""
        x: Any = required_float(to_dtype(self, dtype), "nanmean")
        present = wrap(x.array == x.array, x._device)
        return x.nansum(dim, keepdim) / present.sum(dim, keepdim)

    var = _spread("var", "The sum of squared distances from the mean, over n - correction")
    std = _spread("std", "The square root of var()")

    def prod(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The product; int64 for integers and bool. The gradient is correct even if there are zeros."""
        x = to_dtype(self, dtype)
        return apply(reduction.prod, (x,), dims=resolve_axes(x, dim, "prod"), keepdim=keepdim)

    def norm(self, p: float | str | None = "fro", dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        """(sum |x|^p)^(1/p) over `dim`; "fro" and None are p = 2.

        p: any number; 0: the number of non-zero elements; inf, -inf: the largest, the smallest |x|. Raises: DtypeError
        unless floating; ArgumentError for other strings, or if p is negative or infinite and there is no element.
        """
        if p is None or p == "fro":
            p = 2.0
        elif isinstance(p, str):
            raise ArgumentError(f"norm: p is a number or 'fro', not {p!r}")
        x = required_float(to_dtype(self, dtype), "norm")
        dims = resolve_axes(x, dim, "norm")
        if p in (float("inf"), float("-inf")) or p < 0:
            check_not_empty(x, dims, "norm")
        return apply(reduction.vector_norm, (x,), p=p, dims=dims, keepdim=keepdim)

    def logsumexp(self, dim: Dims, keepdim: bool = False) -> Tensor:
        """log(sum(exp(self))), without overflow."""
        x = floating(self)
        return apply(softmax_ops.logsumexp, (x,), dims=resolve_axes(x, dim, "logsumexp"), keepdim=keepdim)

    softmax = _softmax(softmax_ops.softmax, "exp(self) / sum(exp(self)) along `dim`.")
    log_softmax = _softmax(softmax_ops.log_softmax, "log(softmax(self)) along `dim`, without loss of small ones.")
    all = _truth("all", "Whether every element is non-zero")
    any = _truth("any", "Whether some element is non-zero")

    def count_nonzero(self, dim: Dims = None) -> Tensor:
        """How many elements are not zero, int64."""
        xp = self._device.xp
        return wrap(xp.asarray((self.array != 0).sum(axis=resolve_axes(self, dim, "count_nonzero"))), self._device)

    amax = _extreme(reduction.amax, "The largest element")
    amin = _extreme(reduction.amin, "The smallest element")

    def aminmax(self, *, dim: int | None = None, keepdim: bool = False) -> results.aminmax:
        """The smallest and the largest element, as (min, max). Raises: ArgumentError if there is none."""
        return results.aminmax(self.amin(dim, keepdim), self.amax(dim, keepdim))

    max = _extreme_of(results.max, "largest", "maximum")
    min = _extreme_of(results.min, "smallest", "minimum")
    argmax = _arg_extreme("argmax", "largest")
    argmin = _arg_extreme("argmin", "smallest")

    def median(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """The median: of two middle elements the lower, and nan if any element is nan.

        With `dim`, (values, indices) along it. Raises: ArgumentError if there is no element.
        """
        if dim is None:
            return apply(reduction.median, (check_not_empty(self, resolve_axes(self, None, "median"), "median"),))
        axis = resolve_axis(self, dim, "median")
        xp = self._device.xp
        array = from_bfloat16(xp, check_not_empty(self, resolve_axes(self, axis, "median"), "median").array)
        if not array.ndim:
            return results.median(*_values_at(self, "median", xp.zeros((), "int64"), dim, keepdim))
        middle = (array.shape[axis] - 1) // 2
        index = xp.argsort(array, axis=axis).take([middle], axis=axis)
        if array.dtype.kind == "f":
            nan = array != array
            index = xp.where(nan.any(axis=axis, keepdims=True), nan.argmax(axis=axis, keepdims=True), index)
        return results.median(*_values_at(self, "median", index, dim, keepdim))

    cumsum = _cumulative(reduction.cumsum, "The sums of all up to each along `dim`; of integers and bool int64.")
    cumprod = _cumulative(reduction.cumprod, "The products of all up to each along `dim`; of integers and bool int64.")
    cumsum_ = in_place(cumsum)
    cumprod_ = in_place(cumprod)
    cummax = _running(results.cummax, "maximum", "largest")
    cummin = _running(results.cummin, "minimum", "smallest")

    def sort(self, dim: int = -1, descending: bool = False, stable: bool = False) -> results.sort:
        """(values, indices) in order along `dim`. stable: accepted; equal elements always keep their order."""
        return results.sort(*_gather(self, reduction.argsort(*_along(self, dim, "sort"), descending), dim))

    def argsort(self, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
        """The indices that sort along `dim`. stable: accepted; equal elements always keep their order."""
        return _wrap_indices(self, reduction.argsort(*_along(self, dim, "argsort"), descending))

    def msort(self) -> Tensor:
        """The values in order along the first dimension."""
        return self.sort(0).values

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> results.topk:
        """(values, indices) of the k largest, or smallest, along `dim`. sorted: in order, the most extreme first

        Raises: RangeError if there are fewer elements, for a negative k, or for a dimension that does not exist;
        DtypeError if k is not an integer.
        """
        xp, x, axis = _along(self, dim, "topk")
        k = parse_int(k, "topk", "k")
        if not 0 <= k <= x.shape[axis]:
            raise RangeError(f"topk: k={k} of dimension {axis} of shape {self.array.shape}")
        return results.topk(*_gather(self, reduction.extremes(xp, x, k, axis, largest, sorted), dim))

    def kthvalue(self, k: int, dim: int = -1, keepdim: bool = False) -> results.kthvalue:
        """(values, indices) of the k-th smallest along `dim`, k >= 1.

        Raises: RangeError if there are fewer elements, for k < 1, or for a dimension that does not exist; DtypeError if
        k is not an integer.
        """
        xp, x, axis = _along(self, dim, "kthvalue")
        k = parse_int(k, "kthvalue", "k")
        if not 1 <= k <= x.shape[axis]:
            raise RangeError(f"kthvalue: k={k} of dimension {axis} of shape {self.array.shape}")
        pair = _gather(self, reduction.ranked(xp, x, k, axis), dim)
        return results.kthvalue(*(pair if keepdim or not self.array.ndim else [x.squeeze(axis) for x in pair]))

    def unique(
        self, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> Any:
        """The distinct elements, or slices along `dim`, in order; nan differs from nan.

        return_inverse: also returns, for each element, the index of its value in the result. return_counts: also
        returns how often each value occurs. sorted: accepted; the result is always sorted.
        """
        axis = None if dim is None or not self.array.ndim else resolve_axis(self, dim, "unique")
        return _requested(self, reduction.unique(self._device.xp, self.array, axis, return_inverse, return_counts))

    def unique_consecutive(
        self, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> Any:
        """As unique, but only equal neighbours become one, and nothing is sorted."""
        axis = None if dim is None or not self.array.ndim else resolve_axis(self, dim, "unique_consecutive")
        values, inverse, counts = reduction.runs(self._device.xp, self.array, axis)
        return _requested(self, (values, inverse if return_inverse else None, counts if return_counts else None))

    def bincount(self, weights: TensorBase | None = None, minlength: int = 0) -> Tensor:
        """Counts each integer from 0 on in this vector, int64; with weights, sums the weights of each integer.

        The result has max(minlength, largest element + 1) elements. Raises: DtypeError for anything but a vector of
        integers; RangeError for a negative element or minlength; ShapeError for weights of another shape.
        """
        x = self.array
        xp = self._device.xp
        if x.dtype.kind not in "iu" or x.ndim != 1:
            raise DtypeError(f"bincount: expected a vector of integers, got {x.dtype} of shape {x.shape}")
        if minlength < 0 or (x.size and x.min() < 0):
            raise RangeError(f"bincount: minlength {minlength}, or a number to count, is below 0")
        if weights is None:
            return wrap(reduction.bincount(xp, x, None, minlength), self._device)
        if weights.array.shape != x.shape:
            raise ShapeError(f"bincount: weights of shape {weights.array.shape} for shape {x.shape}")
        w = to_device(weights.array, self._device)
        dtype = w.dtype if w.dtype == "float32" else np.dtype("float64")
        return wrap(reduction.bincount(xp, x, w.astype("float64"), minlength).astype(dtype, copy=False), self._device)

    def histc(self, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
        """Counts the elements in each of `bins` equal parts of [min, max]; if min == max, of the range of all elements.

        The counts have this tensor's dtype. Elements outside, and nan, are not counted. Raises: DtypeError unless
        floating; ArgumentError for fewer than one bin, if max < min, or for a range that is infinite or nan.
        """
        array = self.array.reshape(-1)
        xp = self._device.xp
        required_float(self, "histc")
        low = float(min)
        high = float(max)
        if low == high and array.size:
            low = float(array.min())
            high = float(array.max())
        if low == high:
            low = low - 1
            high = high + 1
        if bins < 1 or not 0 < high - low < float("inf"):
            raise ArgumentError(f"histc: {bins} bins from {low} to {high}: expected some, in a finite range")
        inside = array[(array >= low) & (array <= high)].astype("float64")
        part = xp.minimum(((inside - low) * (bins / (high - low))).astype("int64"), bins - 1)
        return wrap(reduction.bincount(xp, part, None, bins).astype(array.dtype), self._device)


def _along(x: TensorBase, dim: int, name: str) -> tuple[Any, Any, int]:
    """The array module, the array with at least one dimension, and the non-negative dim."""
    return x._device.xp, x.array if x.array.ndim else x.array.reshape(1), resolve_axis(x, dim, name)


def _wrap_indices(x: TensorBase, indices: Any) -> Tensor:
    """Makes a tensor of indices along a dimension of `x`; 0-d if `x` is 0-d and there is an index."""
    if not x.array.ndim and indices.size:
        indices = indices.reshape(())
    return wrap(x._device.xp.ascontiguousarray(indices).reshape(indices.shape), x._device)


def _gather(x: TensorBase, places: Any, dim: int) -> tuple[Tensor, Tensor]:
    """The values of `x` at `places`, which are distinct, and the places as a tensor."""
    indices = _wrap_indices(x, places)
    if not x.array.ndim:
        row = at_least_1d(x)
        return (row.reshape(()).clone() if places.size else row[:0]), indices
    return apply(ops.gather, (x,), index=indices.array, dim=dim % x.array.ndim, distinct=True), indices


def _requested(x: TensorBase, results: tuple[Any, Any, Any]) -> Any:
    """The values alone, or a tuple with the other results that were requested."""
    chosen = tuple([wrap(result, x._device) for result in results if result is not None])
    return chosen if len(chosen) > 1 else chosen[0]


@guarded_function
def searchsorted(
    sorted_sequence: TensorBase,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: TensorBase | None = None,
) -> Tensor:
    """The index in `sorted_sequence` before which each element of `input` (a tensor or a number) would be inserted.

    sorted_sequence: (n,), or (..., n) for an input of (..., m); right, or side="right": insert after equal elements
    instead of before them; sorter: the indices that sort the sequence, if it is not sorted. Result: int64, or int32
    with out_int32, of the input's shape.

    Raises: ShapeError if a sequence with leading dimensions and the input differ in one of them, or for a sorter of
    another shape than the sequence; ArgumentError for another side, or side="left" with right.
    """
    device = sorted_sequence._device
    xp = device.xp
    if side not in (None, "left", "right") or (side == "left" and right):
        raise ArgumentError(f"searchsorted: side={side!r} with right={right}: expected 'left' or 'right'")
    rows = sorted_sequence.array
    if isinstance(input, TensorBase):
        values = to_device(input.array, device)
    else:
        values = xp.asarray(input, rows.dtype if rows.dtype.kind not in "biu" else None)
    if rows.ndim != 1 and (not rows.ndim or not values.ndim or rows.shape[:-1] != values.shape[:-1]):
        raise ShapeError(f"searchsorted: values of shape {values.shape} in rows of shape {rows.shape}")
    if sorter is not None:
        if sorter.array.shape != rows.shape:
            raise ShapeError(f"searchsorted: a sorter of shape {sorter.array.shape} for rows of shape {rows.shape}")
        rows = xp.take_along_axis(rows, to_device(sorter.array, device), axis=-1)
    indices = reduction.searchsorted(xp, rows, values, "right" if right or side == "right" else "left")
    return wrap(indices.astype("int32" if out_int32 else "int64", copy=False), device)


@guarded_function
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each of `elements` is one of `test_elements`, bool, in the shape of elements; either may be a number.

    assume_unique: accepted, without effect. Raises: DtypeError if neither is a tensor.
    """
    tensor = next((x for x in (elements, test_elements) if isinstance(x, TensorBase)), None)
    if tensor is None:
        raise DtypeError("isin: expected a tensor among elements and test_elements")
    xp = tensor._device.xp
    a, b = (
        to_device(x.array, tensor._device) if isinstance(x, TensorBase) else xp.asarray(x)
        for x in (elements, test_elements)
    )
    return wrap(xp.asarray(xp.isin(a, b, invert=invert)), tensor._device)
