"""Reductions of tensors, extremes and running results: dims are checked here, so that ops see plain axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ddp._tensor import results
from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.dtypes import is_float, parse, uint8
from ddp._tensor.inplace import in_place
from ddp._tensor.operands import convert, floating, numpy_names
from ddp.errors import ArgumentError, DtypeError, RangeError
from ddp.ops import reduction, softmax_ops
from ddp.ops.op import upcast

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


T = TypeVar("T", bound=TensorBase)
Dims = int | Sequence[int] | None


def axis(x: TensorBase, dim: int, name: str) -> int:
    """`dim` as a non-negative axis; a 0-d tensor counts as having one. Raises: RangeError."""
    ndim = max(x.array.ndim, 1)
    if not -ndim <= dim < ndim:
        raise RangeError(f"{name}: dimension {dim} of shape {x.array.shape}: expected {-ndim} to {ndim - 1}")
    return dim % ndim


def axes(x: TensorBase, dim: Dims, name: str) -> tuple[int, ...]:
    """`dim` as non-negative axes, all of them for None, () or []. Raises: RangeError; ArgumentError if one is twice."""
    ndim: int = x.array.ndim
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(ndim))
    named = [axis(x, d, name) for d in ([dim] if isinstance(dim, int) else dim)]
    if len(set(named)) < len(named):
        raise ArgumentError(f"{name}: dimensions {tuple(named)} name one twice")
    return tuple(named) if ndim else ()


def filled(x: TensorBase, dims: tuple[int, ...], name: str) -> TensorBase:
    """`x`, if every reduction over `dims` sees an element. Raises: ArgumentError."""
    if any(x.array.shape[d] == 0 for d in dims):
        raise ArgumentError(f"{name}: shape {x.array.shape} has no element along dimensions {dims}")
    return x


def typed(x: TensorBase, dtype: Any) -> TensorBase:
    """`x` in `dtype` if one is given, so that the reduction computes in it."""
    return x if dtype is None else convert(x, parse(dtype))


def required_float(x: T, name: str) -> T:
    """`x`, if it is floating. Raises: DtypeError."""
    if not is_float(x.array.dtype):
        raise DtypeError(f"{name}: expected a floating tensor, got {x.array.dtype}; convert it with float()")
    return x


class Reductions(TensorBase):
    """dim: one dimension, several, or None for all; keepdim: reduced dimensions stay, with size 1."""

    __slots__ = ()

    @numpy_names
    def sum(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The sum; of integers and bool it is int64. dtype: to convert to before."""
        return apply(reduction.sum, (typed(self, dtype),), dims=axes(self, dim, "sum"), keepdim=keepdim)

    @numpy_names
    def nansum(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The sum of what is not nan."""
        x = typed(self, dtype)
        op = reduction.nansum if is_float(x.array.dtype) else reduction.sum
        return apply(op, (x,), dims=axes(self, dim, "nansum"), keepdim=keepdim)

    @numpy_names
    def mean(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The mean. Raises: DtypeError unless floating."""
        x = required_float(typed(self, dtype), "mean")
        return apply(reduction.mean, (x,), dims=axes(self, dim, "mean"), keepdim=keepdim)

    @numpy_names
    def nanmean(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The mean of what is not nan. Raises: DtypeError unless floating."""
        x: Any = required_float(typed(self, dtype), "nanmean")
        there = wrap(x.array == x.array, x._device)
        return x.nansum(dim, keepdim) / there.sum(dim, keepdim)

    @numpy_names
    def var(
        self,
        dim: Dims | bool = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Tensor:
        """The sum of squared distances from the mean, over n - correction.

        unbiased: True is a correction of 1, as nothing is; False of 0. Also var(unbiased). Raises: DtypeError unless
        floating.
        """
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        x = required_float(self, "var")
        if correction is None:
            correction = 1 if unbiased is None or unbiased else 0
        return apply(reduction.var, (x,), dims=axes(x, dim, "var"), keepdim=keepdim, correction=correction)

    @numpy_names
    def std(
        self,
        dim: Dims | bool = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Tensor:
        """The square root of var(), with the same arguments."""
        return apply(reduction.deviation, (self.var(dim, unbiased, keepdim, correction=correction),))

    @numpy_names
    def prod(self, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The product; of integers and bool it is int64. The gradient is right beside zeros too."""
        x = typed(self, dtype)
        return apply(reduction.prod, (x,), dims=axes(x, dim, "prod"), keepdim=keepdim)

    def norm(self, p: float | str | None = "fro", dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        """(sum |x|^p)^(1/p) over `dim`; "fro" and None are p = 2. p: any number, inf and -inf too, or 0 to count.

        Raises: DtypeError unless floating; ArgumentError for other names, or where there is no largest element.
        """
        if p is None or p == "fro":
            p = 2.0
        elif isinstance(p, str):
            raise ArgumentError(f"norm: p is a number or 'fro', not {p!r}")
        x = required_float(typed(self, dtype), "norm")
        dims = axes(x, dim, "norm")
        if p in (float("inf"), float("-inf")) or p < 0:
            filled(x, dims, "norm")
        return apply(reduction.vector_norm, (x,), p=p, dims=dims, keepdim=keepdim)

    @numpy_names
    def logsumexp(self, dim: Dims, keepdim: bool = False) -> Tensor:
        """log(sum(exp(self))), without overflow."""
        x = floating(self)
        return apply(softmax_ops.logsumexp, (x,), dims=axes(x, dim, "logsumexp"), keepdim=keepdim)

    @numpy_names
    def softmax(self, dim: int, dtype: Any = None) -> Tensor:
        """exp(self) / sum(exp(self)) along `dim`. dtype: to convert to before."""
        return along(softmax_ops.softmax, floating(typed(self, dtype)), dim)

    @numpy_names
    def log_softmax(self, dim: int, dtype: Any = None) -> Tensor:
        """log(softmax(self)) along `dim`, without loss of small probabilities. dtype: to convert to before."""
        return along(softmax_ops.log_softmax, floating(typed(self, dtype)), dim)

    @numpy_names
    def all(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Whether every element is non-zero: bool, of uint8 uint8."""
        return _truth(self, "all", dim, keepdim)

    @numpy_names
    def any(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Whether some element is non-zero: bool, of uint8 uint8."""
        return _truth(self, "any", dim, keepdim)

    @numpy_names
    def count_nonzero(self, dim: Dims = None) -> Tensor:
        """How many elements are not zero, int64."""
        xp = self._device.xp
        return wrap(xp.asarray((self.array != 0).sum(axis=axes(self, dim, "count_nonzero"))), self._device)

    @numpy_names
    def amax(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The largest element; equal ones share the gradient. Raises: ArgumentError if there is no element."""
        dims = axes(self, dim, "amax")
        return apply(reduction.amax, (filled(self, dims, "amax"),), dims=dims, keepdim=keepdim)

    @numpy_names
    def amin(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The smallest element; equal ones share the gradient. Raises: ArgumentError if there is no element."""
        dims = axes(self, dim, "amin")
        return apply(reduction.amin, (filled(self, dims, "amin"),), dims=dims, keepdim=keepdim)

    @numpy_names
    def aminmax(self, *, dim: int | None = None, keepdim: bool = False) -> results.aminmax:
        """The smallest and the largest element, as (min, max)."""
        return results.aminmax(self.amin(dim, keepdim), self.amax(dim, keepdim))

    @overload
    def max(self) -> Tensor: ...
    @overload
    def max(self, dim: TensorBase) -> Tensor: ...
    @overload
    def max(self, dim: int, keepdim: bool = False) -> results.max: ...
    @numpy_names
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
    @numpy_names
    def min(self, dim: Any = None, keepdim: bool = False) -> Any:
        """The smallest element of all; with `dim`, (values, indices) along it, the gradient going to the index; with
        another tensor in its place, the smaller of both elementwise."""
        if dim is None:
            return self.amin()
        if isinstance(dim, TensorBase):
            return self.minimum(dim)  # type: ignore[attr-defined]  # every tensor has the mixins
        return results.min(*_at(self, "min", _arg(self, "argmin", dim, True), dim, keepdim))

    @numpy_names
    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Where the first largest element is, int64; without `dim`, its place in the flattened tensor."""
        return wrap(_arg(self, "argmax", dim, keepdim), self._device)

    @numpy_names
    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Where the first smallest element is, int64; without `dim`, its place in the flattened tensor."""
        return wrap(_arg(self, "argmin", dim, keepdim), self._device)

    @overload
    def median(self) -> Tensor: ...
    @overload
    def median(self, dim: int, keepdim: bool = False) -> results.median: ...
    @numpy_names
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

    @numpy_names
    def cumsum(self, dim: int, *, dtype: Any = None) -> Tensor:
        """The sums of all elements up to each along `dim`; of integers and bool int64."""
        return along(reduction.cumsum, typed(self, dtype), dim)

    @numpy_names
    def cumprod(self, dim: int, *, dtype: Any = None) -> Tensor:
        """The products of all elements up to each along `dim`; of integers and bool int64."""
        return along(reduction.cumprod, typed(self, dtype), dim)

    cumsum_, cumprod_ = in_place(cumsum), in_place(cumprod)

    @numpy_names
    def cummax(self, dim: int) -> results.cummax:
        """(values, indices): the largest element up to each along `dim`, and its last place."""
        return results.cummax(*_running(self, "maximum", dim))

    @numpy_names
    def cummin(self, dim: int) -> results.cummin:
        """(values, indices): the smallest element up to each along `dim`, and its last place."""
        return results.cummin(*_running(self, "minimum", dim))


def _truth(x: TensorBase, name: str, dim: Dims, keepdim: bool) -> Tensor:
    array, xp = x.array, x._device.xp
    truth = array if array.dtype.kind == "b" else array != 0
    out = xp.asarray(getattr(truth, name)(axis=axes(x, dim, name), keepdims=keepdim))
    return wrap(out.astype(uint8) if array.dtype == uint8 else out, x._device)


def along(op: Any, x: TensorBase, dim: int) -> Any:
    """`op` along one dimension; a 0-d tensor counts as having one."""
    at = axis(x, dim, op.name)
    if x.array.ndim:
        return apply(op, (x,), dim=at)
    return apply(op, (x.reshape(1),), dim=0).reshape(())  # type: ignore[attr-defined]  # every tensor has the mixins


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
