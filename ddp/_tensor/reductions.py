"""Reductions of tensors: dims are made non-negative and checked here, so that ops see a plain tuple of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ddp._tensor.arithmetic import convert, floating
from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.dtypes import is_float, parse, uint8
from ddp._tensor.spelling import spelled
from ddp.errors import ArgumentError, DtypeError, RangeError
from ddp.ops import reduction, softmax_ops

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

    @spelled
    def sum(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The sum; of integers and bool it is int64. dtype: to convert to before."""
        return apply(reduction.sum, (typed(self, dtype),), dims=axes(self, dim, "sum"), keepdim=keepdim)

    @spelled
    def nansum(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The sum of what is not nan."""
        x = typed(self, dtype)
        op = reduction.nansum if is_float(x.array.dtype) else reduction.sum
        return apply(op, (x,), dims=axes(self, dim, "nansum"), keepdim=keepdim)

    @spelled
    def mean(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The mean. Raises: DtypeError unless floating."""
        x = required_float(typed(self, dtype), "mean")
        return apply(reduction.mean, (x,), dims=axes(self, dim, "mean"), keepdim=keepdim)

    @spelled
    def nanmean(self, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The mean of what is not nan. Raises: DtypeError unless floating."""
        x: Any = required_float(typed(self, dtype), "nanmean")
        there = wrap(x.array == x.array, x._device)
        return x.nansum(dim, keepdim) / there.sum(dim, keepdim)

    @spelled
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

    @spelled
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

    @spelled
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

    @spelled
    def logsumexp(self, dim: Dims, keepdim: bool = False) -> Tensor:
        """log(sum(exp(self))), without overflow."""
        x = floating(self)
        return apply(softmax_ops.logsumexp, (x,), dims=axes(x, dim, "logsumexp"), keepdim=keepdim)

    @spelled
    def softmax(self, dim: int, dtype: Any = None) -> Tensor:
        """exp(self) / sum(exp(self)) along `dim`. dtype: to convert to before."""
        return along(softmax_ops.softmax, floating(typed(self, dtype)), dim)

    @spelled
    def log_softmax(self, dim: int, dtype: Any = None) -> Tensor:
        """log(softmax(self)) along `dim`, without loss of small probabilities. dtype: to convert to before."""
        return along(softmax_ops.log_softmax, floating(typed(self, dtype)), dim)

    @spelled
    def all(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Whether every element is non-zero: bool, of uint8 uint8."""
        return _truth(self, "all", dim, keepdim)

    @spelled
    def any(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Whether some element is non-zero: bool, of uint8 uint8."""
        return _truth(self, "any", dim, keepdim)

    @spelled
    def count_nonzero(self, dim: Dims = None) -> Tensor:
        """How many elements are not zero, int64."""
        xp = self._device.xp
        return wrap(xp.asarray((self.array != 0).sum(axis=axes(self, dim, "count_nonzero"))), self._device)


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
