"""Reading and writing by index as functions."""

from __future__ import annotations

from typing import Any

from ddp._tensor.core import Tensor
from ddp._tensor.functions._called import called


@called
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """out[..i..] = input[..index[..i..]..] along `dim`."""
    return input.gather(dim, index)


@called
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """As gather, but both broadcast; without `dim`, of the flattened tensor."""
    return input.take_along_dim(indices, dim)


@called
def take(input: Tensor, index: Tensor) -> Tensor:
    """The elements at these places of the flattened tensor, in the shape of `index`."""
    return input.take(index)


@called
def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """The slices at `index`, a vector, along `dim`."""
    return input.index_select(dim, index)


@called
def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """The elements where `mask` (bool) holds, as a vector; both broadcast."""
    return input.masked_select(mask)


@called
def nonzero(input: Tensor, *, as_tuple: bool = False) -> Any:
    """Where elements are not zero, int64 (n, ndim), in order; as_tuple: one vector for each dimension."""
    return input.nonzero(as_tuple)


def argwhere(input: Tensor) -> Tensor:
    """Where elements are not zero, int64 (n, ndim), in order."""
    return input.argwhere()


@called
def scatter(
    input: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None, reduce: Any = None
) -> Tensor:
    """`input` with out[..index[..i..]..] = src[..i..] along `dim`; src may be a number. reduce: None or "add"."""
    return input.scatter(dim, index, src, value=value, reduce=reduce)


@called
def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """`input` with src[..i..] added at [..index[..i..]..] along `dim`."""
    return input.scatter_add(dim, index, src)


@called
def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """`input` with alpha * source added at `index`, a vector, along `dim`."""
    return input.index_add(dim, index, source, alpha=alpha)


@called
def index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """`input` with the slices of source at `index`, a vector, along `dim`."""
    return input.index_copy(dim, index, source)


def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`input` with `value`, a number or a 0-d tensor, at `index`, a vector, along `dim`."""
    return input.index_fill(dim, index, value)


def index_put(input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    """`input` with out[indices] = values, or with `accumulate` += values. indices: a tuple of tensors."""
    return input.index_put(indices, values, accumulate)


def masked_fill(input: Tensor, mask: Tensor, value: Any) -> Tensor:
    """`input` with `value`, a number or a 0-d tensor, where `mask` (bool) holds; both broadcast."""
    return input.masked_fill(mask, value)


def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`input` with the elements of source, in order, where `mask` (bool) holds; both broadcast."""
    return input.masked_scatter(mask, source)
