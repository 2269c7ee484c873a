"""Largest, smallest and middle elements of tensors, running sums and products, and running extremes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from ddp._tensor import results
from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.inplace import in_place
from ddp._tensor.reductions import Dims, along, axes, axis, filled, typed
from ddp._tensor.spelling import spelled
from ddp.ops import reduction
from ddp.ops.op import upcast

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


class Extremes(TensorBase):
    """dim: one dimension, or None for all elements; keepdim: the dimension stays, with size 1."""

    __slots__ = ()

    @spelled
    def amax(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The largest element; equal ones share the gradient. Raises: ArgumentError if there is no element."""
        dims = axes(self, dim, "amax")
        return apply(reduction.amax, (filled(self, dims, "amax"),), dims=dims, keepdim=keepdim)

    @spelled
    def amin(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The smallest element; equal ones share the gradient. Raises: ArgumentError if there is no element."""
        dims = axes(self, dim, "amin")
        return apply(reduction.amin, (filled(self, dims, "amin"),), dims=dims, keepdim=keepdim)

    @spelled
    def aminmax(self, *, dim: int | None = None, keepdim: bool = False) -> results.aminmax:
        """The smallest and the largest element, as (min, max)."""
        return results.aminmax(self.amin(dim, keepdim), self.amax(dim, keepdim))

    @overload
    def max(self) -> Tensor: ...
    @overload
    def max(self, dim: TensorBase) -> Tensor: ...
    @overload
    def max(self, dim: int, keepdim: bool = False) -> results.max: ...
    @spelled
    def max(self, dim: Any = None, keepdim: bool = False) -> Any:
        """The largest element of all; with `dim`, (values, indices) along it, the gradient going to the index; with
        another tensor in its place, the larger of both elementwise."""
        if dim is None:
            return self.amax()
        if isinstance(dim, TensorBase):
            return self.maximum(dim)  # type: ignore[attr-defined]  # every tensor has the mixins
        return results.max(*_at(self, "max", _arg(self, "argmax", dim, True), dim, keepdim))

    @overload
    def min(self) -> Tensor: ...
    @overload
    def min(self, dim: TensorBase) -> Tensor: ...
    @overload
    def min(self, dim: int, keepdim: bool = False) -> results.min: ...
    @spelled
    def min(self, dim: Any = None, keepdim: bool = False) -> Any:
        """The smallest element of all; with `dim`, (values, indices) along it, the gradient going to the index; with
        another tensor in its place, the smaller of both elementwise."""
        if dim is None:
            return self.amin()
        if isinstance(dim, TensorBase):
            return self.minimum(dim)  # type: ignore[attr-defined]  # every tensor has the mixins
        return results.min(*_at(self, "min", _arg(self, "argmin", dim, True), dim, keepdim))

    @spelled
    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Where the first largest element is, int64; without `dim`, its place in the flattened tensor."""
        return wrap(_arg(self, "argmax", dim, keepdim), self._device)

    @spelled
    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Where the first smallest element is, int64; without `dim`, its place in the flattened tensor."""
        return wrap(_arg(self, "argmin", dim, keepdim), self._device)

    @overload
    def median(self) -> Tensor: ...
    @overload
    def median(self, dim: int, keepdim: bool = False) -> results.median: ...
    @spelled
    def median(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """The element in the middle, the lower of two, or nan beside a nan; with `dim`, (values, indices) along it."""
        if dim is None:
            return apply(reduction.median, (filled(self, axes(self, None, "median"), "median"),))
        filled(self, axes(self, dim, "median"), "median")
        array, xp = upcast(self.array), self._device.xp
        if not array.ndim:
            return results.median(*_at(self, "median", xp.zeros((), "int64"), dim, keepdim))
        at = axis(self, dim, "median")
        middle = (array.shape[at] - 1) // 2
        found = xp.argsort(array, axis=at).take([middle], axis=at)
        if array.dtype.kind == "f":
            nan = array != array
            found = xp.where(nan.any(axis=at, keepdims=True), nan.argmax(axis=at, keepdims=True), found)
        return results.median(*_at(self, "median", found, dim, keepdim))

    @spelled
    def cumsum(self, dim: int, *, dtype: Any = None) -> Tensor:
        """The sums of all elements up to each along `dim`; of integers and bool int64."""
        return along(reduction.cumsum, typed(self, dtype), dim)

    @spelled
    def cumprod(self, dim: int, *, dtype: Any = None) -> Tensor:
        """The products of all elements up to each along `dim`; of integers and bool int64."""
        return along(reduction.cumprod, typed(self, dtype), dim)

    cumsum_, cumprod_ = in_place(cumsum), in_place(cumprod)

    @spelled
    def cummax(self, dim: int) -> results.cummax:
        """(values, indices): the largest element up to each along `dim`, and its last place."""
        return results.cummax(*_running(self, "maximum", dim))

    @spelled
    def cummin(self, dim: int) -> results.cummin:
        """(values, indices): the smallest element up to each along `dim`, and its last place."""
        return results.cummin(*_running(self, "minimum", dim))


def _arg(x: TensorBase, name: str, dim: int | None, keepdim: bool) -> Any:
    filled(x, axes(x, dim, name), name)
    array, xp = upcast(x.array), x._device.xp
    if dim is None:
        found = xp.asarray(getattr(array, name)())
        return found.reshape((1,) * array.ndim) if keepdim else found
    if not array.ndim:
        return xp.zeros((), xp.int64)
    return xp.asarray(getattr(array, name)(axis=axis(x, dim, name), keepdims=keepdim))


def _at(x: TensorBase, name: str, found: Any, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The values of `x` at `found`, which keeps the dimension, and `found` as a tensor of its own memory."""
    if not x.array.ndim:
        return apply(reduction.amax, (x,), dims=(), keepdim=False), wrap(found, x._device)
    at = axis(x, dim, name)
    values = apply(reduction.pick, (x,), index=found, dim=at, keepdim=keepdim)
    shown = found if keepdim else found.squeeze(at)
    return values, wrap(shown if values.edge is None else shown.copy(), x._device)


def _running(x: TensorBase, name: str, dim: int) -> tuple[Tensor, Tensor]:
    xp = x._device.xp
    at = axis(x, dim, f"cum{name[:3]}")
    if not x.array.ndim:
        return x.clone(), wrap(xp.zeros((), "int64"), x._device)  # type: ignore[attr-defined]  # as above
    found = reduction.running(xp, name, upcast(x.array), at)
    values = apply(reduction.running_extreme, (x,), index=found, dim=at)
    return values, wrap(found if values.edge is None else found.copy(), x._device)
