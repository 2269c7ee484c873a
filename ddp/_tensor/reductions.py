"""Reductions of tensors: dims are made non-negative and checked here, so that ops see a plain tuple of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp._tensor.arithmetic import convert, floating
from ddp._tensor.base import TensorBase, apply, borrowed, wrap
from ddp._tensor.dtypes import is_float, parse
from ddp.errors import ArgumentError, DtypeError, RangeError
from ddp.ops import index, reduce

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor

Dims = int | Sequence[int] | None


class Extremes(NamedTuple):
    """What max(dim) and min(dim) return: the values, and where each was found (int64)."""

    values: Tensor
    indices: Tensor


def axis(x: TensorBase, dim: int, name: str) -> int:
    """`dim` as a non-negative axis; a 0-d tensor counts as having one. Raises: RangeError."""
    ndim = max(x._array.ndim, 1)
    if not -ndim <= dim < ndim:
        raise RangeError(f"{name}: dimension {dim} of shape {x._array.shape}: expected {-ndim} to {ndim - 1}")
    return dim % ndim


def axes(x: TensorBase, dim: Dims, name: str) -> tuple[int, ...]:
    """`dim` as non-negative axes, all of them for None, () or []. Raises: RangeError; ArgumentError if one is twice."""
    ndim: int = x._array.ndim
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(ndim))
    named = [axis(x, d, name) for d in ([dim] if isinstance(dim, int) else dim)]
    if len(set(named)) < len(named):
        raise ArgumentError(f"{name}: dimensions {tuple(named)} name one twice")
    return tuple(named) if ndim else ()


def _filled(x: TensorBase, dims: tuple[int, ...], name: str) -> TensorBase:
    """`x`, if every reduction over `dims` sees an element. Raises: ArgumentError."""
    if any(x._array.shape[d] == 0 for d in dims):
        raise ArgumentError(f"{name}: shape {x._array.shape} has no element along dimensions {dims}")
    return x


class Reductions(TensorBase):
    """dim: one dimension, several, or None for all; keepdim: reduced dimensions stay, with size 1."""

    __slots__ = ()

    def sum(self, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        """The sum; of integers and bool it is int64."""
        x: TensorBase = self if dtype is None else convert(self, parse(dtype))
        return apply(reduce.sum, (x,), dims=axes(x, dim, "sum"), keepdim=keepdim)

    def mean(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The mean. Raises: DtypeError unless floating."""
        if not is_float(self._array.dtype):
            raise DtypeError(f"mean: expected a floating tensor, got {self._array.dtype}; convert it with float()")
        return apply(reduce.mean, (self,), dims=axes(self, dim, "mean"), keepdim=keepdim)

    def amax(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The largest element; equal ones share the gradient. Raises: ArgumentError if there is no element."""
        dims = axes(self, dim, "amax")
        return apply(reduce.amax, (_filled(self, dims, "amax"),), dims=dims, keepdim=keepdim)

    def amin(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The smallest element; equal ones share the gradient. Raises: ArgumentError if there is no element."""
        dims = axes(self, dim, "amin")
        return apply(reduce.amin, (_filled(self, dims, "amin"),), dims=dims, keepdim=keepdim)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """The largest element of all; with `dim`, (values, indices) along it, the gradient going to the index."""
        if dim is None:
            return self.amax()
        return _at(self, self.argmax(dim, keepdim=True), dim, keepdim)

    def min(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """The smallest element of all; with `dim`, (values, indices) along it, the gradient going to the index."""
        if dim is None:
            return self.amin()
        return _at(self, self.argmin(dim, keepdim=True), dim, keepdim)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Where the first largest element is, int64; without `dim`, its place in the flattened tensor."""
        return _arg("argmax", self, dim, keepdim)

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Where the first smallest element is, int64; without `dim`, its place in the flattened tensor."""
        return _arg("argmin", self, dim, keepdim)

    def logsumexp(self, dim: Dims, keepdim: bool = False) -> Tensor:
        """log(sum(exp(self))), without overflow."""
        x = floating(self)
        dims = axes(x, dim, "logsumexp")
        return apply(reduce.logsumexp, (_filled(x, dims, "logsumexp"),), dims=dims, keepdim=keepdim)

    def softmax(self, dim: int) -> Tensor:
        """exp(self) / sum(exp(self)) along `dim`."""
        return _along(reduce.softmax, self, dim)

    def log_softmax(self, dim: int) -> Tensor:
        """log(softmax(self)) along `dim`, without loss of small probabilities."""
        return _along(reduce.log_softmax, self, dim)

    def all(self) -> Tensor:
        """Whether every element is non-zero, bool ()."""
        return wrap(self._device.xp.asarray(self._array.all()), self._device)

    def any(self) -> Tensor:
        """Whether some element is non-zero, bool ()."""
        return wrap(self._device.xp.asarray(self._array.any()), self._device)


def _arg(name: str, x: TensorBase, dim: int | None, keepdim: bool) -> Tensor:
    _filled(x, axes(x, dim, name), name)
    array, xp = x._array, x._device.xp
    if dim is None:
        found = xp.asarray(getattr(array, name)())
        return wrap(found.reshape((1,) * array.ndim) if keepdim else found, x._device)
    if not array.ndim:
        return wrap(xp.zeros((), xp.int64), x._device)
    return wrap(xp.asarray(getattr(array, name)(axis=axis(x, dim, name), keepdims=keepdim)), x._device)


def _at(x: TensorBase, found: Tensor, dim: int, keepdim: bool) -> Extremes:
    """The values of `x` at `found`, which keeps the dimension."""
    if not x._array.ndim:
        return Extremes(apply(reduce.amax, (x,), dims=(), keepdim=False), found)
    at = axis(x, dim, "max")
    values = apply(index.gather, (x,), index=borrowed(found._array, x), dim=at)
    return Extremes(values, found) if keepdim else Extremes(values.squeeze(at), found.squeeze(at))


def _along(op: Any, x: TensorBase, dim: int) -> Tensor:
    x = floating(x)
    at = axis(x, dim, op.name)
    if x._array.ndim:
        return apply(op, (x,), dim=at)
    return apply(op, (x.reshape(1),), dim=0).reshape(())  # type: ignore[attr-defined]  # every tensor has the mixins
