"""Reductions, and what runs along one dimension, as functions."""

from __future__ import annotations

from typing import Any

from ddp._tensor import results
from ddp._tensor.core import Tensor
from ddp._tensor.functions._called import called
from ddp._tensor.reductions import Dims
from ddp._tensor.spelling import spelled


@called
@spelled
def sum(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum over `dim`, or over all."""
    return input.sum(dim, keepdim, dtype=dtype)


@called
@spelled
def nansum(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum of what is not nan."""
    return input.nansum(dim, keepdim, dtype=dtype)


@called
@spelled
def mean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The mean over `dim`, or over all."""
    return input.mean(dim, keepdim, dtype=dtype)


@called
@spelled
def nanmean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The mean of what is not nan."""
    return input.nanmean(dim, keepdim, dtype=dtype)


@called
@spelled
def var(
    input: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    """The sum of squared distances from the mean, over n - correction (1 unless unbiased=False)."""
    return input.var(dim, unbiased, keepdim, correction=correction)


@called
@spelled
def std(
    input: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    """The square root of the variance."""
    return input.std(dim, unbiased, keepdim, correction=correction)


@spelled
def var_mean(
    input: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(variance, mean)."""
    over = None if isinstance(dim, bool) else dim
    return input.var(dim, unbiased, keepdim, correction=correction), input.mean(over, keepdim)


@spelled
def std_mean(
    input: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(standard deviation, mean)."""
    over = None if isinstance(dim, bool) else dim
    return input.std(dim, unbiased, keepdim, correction=correction), input.mean(over, keepdim)


@called
@spelled
def prod(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The product along `dim`, or of all."""
    return input.prod(dim, keepdim, dtype=dtype)


@called
def norm(
    input: Tensor, p: float | str | None = "fro", dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """(sum |x|^p)^(1/p) over `dim`, or over all; "fro" and None are p = 2."""
    return input.norm(p, dim, keepdim, dtype)


@called
@spelled
def amax(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The largest element over `dim`, or over all."""
    return input.amax(dim, keepdim)


@called
@spelled
def amin(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The smallest element over `dim`, or over all."""
    return input.amin(dim, keepdim)


@called
@spelled
def aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> results.aminmax:
    """The smallest and the largest element, as (min, max)."""
    return input.aminmax(dim=dim, keepdim=keepdim)


@called
@spelled
def max(input: Tensor, dim: Any = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
    """The largest element; with `dim`, (values, indices) along it; of two tensors, the larger of both elementwise."""
    return input.max(other) if other is not None else input.max(dim, keepdim) if keepdim else input.max(dim)


@called
@spelled
def min(input: Tensor, dim: Any = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
    """The smallest element; with `dim`, (values, indices) along it; of two tensors, the smaller of both elementwise."""
    return input.min(other) if other is not None else input.min(dim, keepdim) if keepdim else input.min(dim)


@called
@spelled
def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the first largest element is, int64."""
    return input.argmax(dim, keepdim)


@called
@spelled
def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the first smallest element is, int64."""
    return input.argmin(dim, keepdim)


@called
@spelled
def median(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The element in the middle, the lower of two; with `dim`, (values, indices) along it."""
    return input.median() if dim is None else input.median(dim, keepdim)


@called
@spelled
def logsumexp(input: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """log(sum(exp(input))) over `dim`."""
    return input.logsumexp(dim, keepdim)


@called
@spelled
def softmax(input: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """exp(input) / sum(exp(input)) along `dim`. dtype: to convert to before."""
    return input.softmax(dim, dtype)


@called
@spelled
def log_softmax(input: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """log(softmax(input)) along `dim`. dtype: to convert to before."""
    return input.log_softmax(dim, dtype)


@called
@spelled
def cumsum(input: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    """The sums of all elements up to each along `dim`."""
    return input.cumsum(dim, dtype=dtype)


@called
@spelled
def cumprod(input: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    """The products of all elements up to each along `dim`."""
    return input.cumprod(dim, dtype=dtype)


@called
@spelled
def cummax(input: Tensor, dim: int) -> results.cummax:
    """(values, indices): the largest element up to each along `dim`, and its last place."""
    return input.cummax(dim)


@called
@spelled
def cummin(input: Tensor, dim: int) -> results.cummin:
    """(values, indices): the smallest element up to each along `dim`, and its last place."""
    return input.cummin(dim)


@called
@spelled
def all(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Whether every element is non-zero."""
    return input.all(dim, keepdim)


@called
@spelled
def any(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Whether some element is non-zero."""
    return input.any(dim, keepdim)


@spelled
def count_nonzero(input: Tensor, dim: Dims = None) -> Tensor:
    """How many elements are not zero, int64."""
    return input.count_nonzero(dim)
