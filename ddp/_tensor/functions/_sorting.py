"""Sorting and searching as functions."""

from __future__ import annotations

from typing import Any

from ddp._tensor import results
from ddp._tensor.core import Tensor
from ddp._tensor.functions._called import called
from ddp._tensor.sorting import isin, searchsorted
from ddp._tensor.spelling import spelled

__all__ = [
    "argsort",
    "bincount",
    "bucketize",
    "histc",
    "isin",
    "kthvalue",
    "msort",
    "searchsorted",
    "sort",
    "topk",
    "unique",
    "unique_consecutive",
]


@called
@spelled
def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> results.sort:
    """(values, indices) in order along `dim`; equal elements keep their order, and nan is the largest."""
    return input.sort(dim, descending, stable)


@spelled
def argsort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
    """The indices that sort along `dim`; equal elements keep their order, and nan is the largest."""
    return input.argsort(dim, descending, stable)


@called
def msort(input: Tensor) -> Tensor:
    """The values in order along the first dimension."""
    return input.msort()


@called
@spelled
def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> results.topk:
    """(values, indices) of the k largest, or smallest, along `dim`."""
    return input.topk(k, dim, largest, sorted)


@called
def kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> results.kthvalue:
    """(values, indices) of the k-th smallest, from 1, along `dim`."""
    return input.kthvalue(k, dim, keepdim)


def unique(
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """The different elements, or slices along `dim`, in order; with return_inverse and return_counts, a tuple."""
    return input.unique(sorted, return_inverse, return_counts, dim)


def unique_consecutive(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """As unique, but only what is next to its equal counts as one, and nothing is sorted."""
    return input.unique_consecutive(return_inverse, return_counts, dim)


@called
def bucketize(input: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Between which of `boundaries`, a sorted vector, each element lies: boundaries[i-1] < input <= boundaries[i].

    right: boundaries[i-1] <= input < boundaries[i].
    """
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each integer from 0 on is in a vector, int64; or the sum of the weights of each."""
    return input.bincount(weights, minlength)


@called
def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """How many elements are in each of `bins` equal parts of [min, max]; equal: from the smallest to the largest."""
    return input.histc(bins, min, max)
