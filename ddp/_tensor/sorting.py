"""Sorting and searching: the values of an order have gradients, its indices are int64. nan is the largest number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ddp._device import place
from ddp._tensor import results
from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.device_guard import guarded_function
from ddp._tensor.reductions import axis
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.ops import indexing as ops
from ddp.ops import reduction

__all__ = ["isin", "searchsorted"]

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


class Sorting(TensorBase):
    """dim: the dimension along which; a 0-d tensor counts as having one."""

    __slots__ = ()

    def sort(self, dim: int = -1, descending: bool = False, stable: bool = False) -> results.sort:
        """(values, indices) in order along `dim`. stable: accepted; equal elements always keep their order."""
        return results.sort(*_gather_found(self, reduction.argsort(*_along(self, dim, "sort"), descending), dim))

    def argsort(self, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
        """The indices that sort along `dim`. stable: accepted; equal elements always keep their order."""
        return _wrap_indices(self, reduction.argsort(*_along(self, dim, "argsort"), descending))

    def msort(self) -> Tensor:
        """The values in order along the first dimension."""
        return self.sort(0).values

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> results.topk:
        """(values, indices) of the k largest, or smallest, along `dim`. Raises: RangeError if there are fewer."""
        xp, x, at = _along(self, dim, "topk")
        if not 0 <= k <= x.shape[at]:
            raise RangeError(f"topk: k={k} of dimension {at} of shape {self.array.shape}")
        return results.topk(*_gather_found(self, reduction.extremes(xp, x, k, at, largest, sorted), dim))

    def kthvalue(self, k: int, dim: int = -1, keepdim: bool = False) -> results.kthvalue:
        """(values, indices) of the k-th smallest, from 1, along `dim`. Raises: RangeError if there are fewer."""
        xp, x, at = _along(self, dim, "kthvalue")
        if not 1 <= k <= x.shape[at]:
            raise RangeError(f"kthvalue: k={k} of dimension {at} of shape {self.array.shape}")
        values, indices = _gather_found(self, reduction.ranked(xp, x, k, at), dim)
        if keepdim or not self.array.ndim:
            return results.kthvalue(values, indices)
        return results.kthvalue(cast(Any, values).squeeze(at), cast(Any, indices).squeeze(at))

    def unique(
        self, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> Any:
        """The different elements, or slices along `dim`, in order; every nan is different.

        return_inverse: also, for each element its number among them. return_counts: also, how often each is there.
        sorted: accepted; they always are.
        """
        at = None if dim is None else axis(self, dim, "unique")
        if not self.array.ndim:
            at = None
        return _requested(self, reduction.unique(self._device.xp, self.array, at, return_inverse, return_counts))

    def unique_consecutive(
        self, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> Any:
        """As unique, but only what is next to its equal counts as one, and nothing is sorted."""
        at = None if dim is None else axis(self, dim, "unique_consecutive")
        values, inverse, counts = reduction.runs(self._device.xp, self.array, at if self.array.ndim else None)
        return _requested(self, (values, inverse if return_inverse else None, counts if return_counts else None))

    def bincount(self, weights: TensorBase | None = None, minlength: int = 0) -> Tensor:
        """How often each integer from 0 on is in this vector, int64; or the sum of the weights of each.

        The result has max(minlength, the largest + 1) elements. Raises: DtypeError, ShapeError, RangeError.
        """
        x, xp = self.array, self._device.xp
        if x.dtype.kind not in "iu":
            raise DtypeError(f"bincount: expected a vector of integers, got {x.dtype}")
        if x.ndim != 1:
            raise ShapeError(f"bincount: expected a vector, got shape {x.shape}")
        if x.size and x.min() < 0:
            raise RangeError(f"bincount: {int(x.min())} is below 0")
        if minlength < 0:
            raise ArgumentError(f"bincount: minlength is {minlength}")
        if weights is None:
            return wrap(reduction.bincount(xp, x, None, minlength), self._device)
        if weights.array.shape != x.shape:
            raise ShapeError(f"bincount: weights of shape {weights.array.shape} for shape {x.shape}")
        w = place(weights.array, self._device)
        kind = w.dtype if w.dtype == "float32" else np.dtype("float64")
        return wrap(reduction.bincount(xp, x, w.astype("float64"), minlength).astype(kind, copy=False), self._device)

    def histc(self, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
        """How many elements are in each of `bins` equal parts of [min, max]; min == max: of all there is.

        In this dtype, which is floating; elements outside, and nan, are not counted. Raises: DtypeError, ArgumentError.
        """
        array, xp = self.array.reshape(-1), self._device.xp
        if array.dtype.kind in "biu":
            raise DtypeError(f"histc: expected a floating tensor, got {array.dtype}")
        if bins < 1 or min > max:
            raise ArgumentError(f"histc: {bins} bins from {min} to {max}")
        low, high = float(min), float(max)
        if low == high and array.size:
            low, high = float(array.min()), float(array.max())
        if low == high:
            low, high = low - 1, high + 1
        if not (np.isfinite(low) and np.isfinite(high)):
            raise RangeError(f"histc: from {low} to {high} is no finite range")
        inside = array[(array >= low) & (array <= high)].astype("float64")
        part = xp.minimum(((inside - low) * (bins / (high - low))).astype("int64"), bins - 1)
        return wrap(reduction.bincount(xp, part, None, bins).astype(array.dtype), self._device)


def _along(x: TensorBase, dim: int, name: str) -> tuple[Any, Any, int]:
    """The array module, the array with a dimension at least, and the non-negative dim."""
    return x._device.xp, x.array if x.array.ndim else x.array.reshape(1), axis(x, dim, name)


def _wrap_indices(x: TensorBase, found: Any) -> Tensor:
    """Indices along a dimension, 0-d again where `x` is, unless there is none."""
    if not x.array.ndim and found.size:
        found = found.reshape(())
    return wrap(x._device.xp.ascontiguousarray(found).reshape(found.shape), x._device)


def _gather_found(x: TensorBase, found: Any, dim: int) -> tuple[Tensor, Tensor]:
    """The values of `x` at `found`, no two of which are the same place, and the indices."""
    indices = _wrap_indices(x, found)
    if not x.array.ndim:
        row = cast(Any, x).reshape(1)
        return (row.reshape(()).clone() if found.size else row[:0]), indices
    return apply(ops.gather, (x,), index=indices.array, dim=dim % x.array.ndim, distinct=True), indices


def _requested(x: TensorBase, found: tuple[Any, Any, Any]) -> Any:
    """The values alone, or a tuple with the other results that were requested."""
    chosen = tuple([wrap(each, x._device) for each in found if each is not None])
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
    """Where each element of `input` (a tensor or a number) would go into `sorted_sequence`: before its equals.

    sorted_sequence: (n,), or (..., n) beside an input of (..., m). right, or side="right": after its equals. sorter:
    the indices that sort the sequence, where it is not. Result: int64, or int32 with out_int32, of the input's shape.

    Raises: ShapeError, ArgumentError.
    """
    where, xp = sorted_sequence._device, sorted_sequence._device.xp
    if side not in (None, "left", "right") or (side == "left" and right):
        raise ArgumentError(f"searchsorted: side={side!r} with right={right}: expected 'left' or 'right'")
    rows = sorted_sequence.array
    if isinstance(input, TensorBase):
        values = place(input.array, where)
        if rows.ndim != 1 and (not rows.ndim or rows.shape[:-1] != values.shape[:-1]):
            raise ShapeError(f"searchsorted: values of shape {values.shape} in rows of shape {rows.shape}")
    elif rows.ndim == 1:
        values = xp.asarray(input, rows.dtype if rows.dtype.kind not in "biu" else None)
    else:
        raise ShapeError(f"searchsorted: a number in rows of shape {rows.shape}: expected one row")
    if sorter is not None:
        if sorter.array.shape != rows.shape:
            raise ShapeError(f"searchsorted: a sorter of shape {sorter.array.shape} for rows of shape {rows.shape}")
        rows = xp.take_along_axis(rows, place(sorter.array, where), axis=-1)
    found = reduction.searchsorted(xp, rows, values, "right" if right or side == "right" else "left")
    return wrap(found.astype("int32" if out_int32 else "int64", copy=False), where)


@guarded_function
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each of `elements` is one of `test_elements`, bool, in the shape of elements; either may be a number.

    assume_unique: accepted, and not needed. Raises: DtypeError if neither is a tensor.
    """
    one = next((x for x in (elements, test_elements) if isinstance(x, TensorBase)), None)
    if one is None:
        raise DtypeError("isin: expected a tensor among elements and test_elements")
    xp = one._device.xp
    a, b = (
        place(x.array, one._device) if isinstance(x, TensorBase) else xp.asarray(x) for x in (elements, test_elements)
    )
    return wrap(xp.asarray(xp.isin(a, b, invert=invert)), one._device)
