"""Reductions as functions."""

from __future__ import annotations

from typing import Any

from ddp._tensor.core import Tensor
from ddp._tensor.reductions import Dims


def sum(input: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The sum over `dim`, or over all."""
    return input.sum(dim, keepdim, dtype)


def mean(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The mean over `dim`, or over all."""
    return input.mean(dim, keepdim)


def amax(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The largest element over `dim`, or over all."""
    return input.amax(dim, keepdim)


def amin(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The smallest element over `dim`, or over all."""
    return input.amin(dim, keepdim)


def max(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The largest element; with `dim`, (values, indices) along it."""
    return input.max(dim, keepdim)


def min(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The smallest element; with `dim`, (values, indices) along it."""
    return input.min(dim, keepdim)


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the first largest element is, int64."""
    return input.argmax(dim, keepdim)


def logsumexp(input: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """log(sum(exp(input))) over `dim`."""
    return input.logsumexp(dim, keepdim)


def softmax(input: Tensor, dim: int) -> Tensor:
    """exp(input) / sum(exp(input)) along `dim`."""
    return input.softmax(dim)


def log_softmax(input: Tensor, dim: int) -> Tensor:
    """log(softmax(input)) along `dim`."""
    return input.log_softmax(dim)
