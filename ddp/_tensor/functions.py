"""The functions of `ddp` that are methods of `Tensor`, too; those of several tensors: `joining`, `contraction`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._tensor.base import TensorBase
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import bool_, of_number, promote, promote_scalar
from ddp._tensor.elementwise import select_where
from ddp._tensor.function_form import function_form, with_out
from ddp._tensor.interop import Interop
from ddp._tensor.operands import numpy_names
from ddp._tensor.reductions import Dims
from ddp._tensor.sorting import searchsorted
from ddp.errors import DtypeError

_form = functools.cache(function_form)  # aliases of one method are one function


def _forms(names: str, number_first: bool = False) -> Iterator[Callable[..., Tensor]]:
    """The methods of these names as functions. number_first: whose first operand may be a number."""
    return (_form(getattr(Tensor, name), number_first=number_first) for name in names.split())


def _others(names: str) -> Iterator[Callable[..., Any]]:
    """The same, of methods that return something other than one tensor."""
    return _forms(names)


# Arithmetic
add, div, divide, floor_divide, fmod, mul = _forms("add div divide floor_divide fmod mul", number_first=True)
multiply, remainder, rsub, sub, subtract = _forms("multiply remainder rsub sub subtract", number_first=True)
true_divide, xlogy = _forms("true_divide xlogy", number_first=True)

# Elementwise
abs, absolute, acos, acosh, addcdiv, addcmul, arccos = _forms("abs absolute acos acosh addcdiv addcmul arccos")
arccosh, arcsin, arcsinh, arctan, arctan2, arctanh, asin = _forms("arccosh arcsin arcsinh arctan arctan2 arctanh asin")
asinh, atan, atan2, atanh, ceil, cos, cosh, erf, erfc = _forms("asinh atan atan2 atanh ceil cos cosh erf erfc")
erfinv, exp, exp2, expm1, fix, floor, frac, hypot, lerp = _forms("erfinv exp exp2 expm1 fix floor frac hypot lerp")
log, log10, log1p, log2, logaddexp, logit, neg, negative = _forms("log log10 log1p log2 logaddexp logit neg negative")
positive, reciprocal, round, rsqrt, sigmoid, sign, sin = _forms("positive reciprocal round rsqrt sigmoid sign sin")
sinh, sqrt, square, tan, tanh, trunc = _forms("sinh sqrt square tan tanh trunc")

# Choices
clamp, clamp_max, clamp_min, clip, fmax, fmin, maximum = _forms("clamp clamp_max clamp_min clip fmax fmin maximum")
minimum, nan_to_num, relu = _forms("minimum nan_to_num relu")

# Comparisons, logic and bits
allclose, equal = _others("allclose equal")
bitwise_and, bitwise_left_shift, bitwise_not = _forms("bitwise_and bitwise_left_shift bitwise_not")
bitwise_or, bitwise_right_shift, bitwise_xor, eq = _forms("bitwise_or bitwise_right_shift bitwise_xor eq")
ge, greater, greater_equal, gt, isclose, isfinite, isinf = _forms("ge greater greater_equal gt isclose isfinite isinf")
isnan, le, less, less_equal, logical_and, logical_not = _forms("isnan le less less_equal logical_and logical_not")
logical_or, logical_xor, lt, ne, not_equal = _forms("logical_or logical_xor lt ne not_equal")

# Copies
clone, detach = _forms("clone detach")

# Indexing
argwhere, gather, index_add, index_copy, index_fill = _forms("argwhere gather index_add index_copy index_fill")
index_put, index_select, masked_fill, masked_scatter = _forms("index_put index_select masked_fill masked_scatter")
masked_select, scatter, scatter_add, take, take_along_dim = _forms(
    "masked_select scatter scatter_add take take_along_dim"
)
(nonzero,) = _others("nonzero")

# Other orders
diag, diag_embed, flip, fliplr, flipud, roll, rot90 = _forms("diag diag_embed flip fliplr flipud roll rot90")
tile, tril, triu = _forms("tile tril triu")

# Products
addmm, addmv, addr, baddbmm, bmm, dot, inner, matmul, mm = _forms("addmm addmv addr baddbmm bmm dot inner matmul mm")
mv, outer, trace = _forms("mv outer trace")

# Reductions
all, amax, amin, any, argmax, argmin, count_nonzero = _forms("all amax amin any argmax argmin count_nonzero")
aminmax, cummax, cummin, median = _others("aminmax cummax cummin median")
cumprod, cumsum, log_softmax, logsumexp, mean = _forms("cumprod cumsum log_softmax logsumexp mean")
nanmean, nansum = _forms("nanmean nansum")
norm, prod, softmax, std, sum, var = _forms("norm prod softmax std sum var")

# Shapes and views
as_strided, broadcast_to, diagonal, flatten = _forms("as_strided broadcast_to diagonal flatten")
chunk, split_with_sizes, tensor_split, unbind = _others("chunk split_with_sizes tensor_split unbind")
moveaxis, movedim, narrow, permute, ravel, reshape = _forms("moveaxis movedim narrow permute ravel reshape")
select, squeeze, swapaxes, swapdims, t = _forms("select squeeze swapaxes swapdims t")
transpose, unflatten, unsqueeze = _forms("transpose unflatten unsqueeze")

# Sorting and searching
argsort, bincount, histc, msort = _forms("argsort bincount histc msort")
kthvalue, sort, topk, unique, unique_consecutive = _others("kthvalue sort topk unique unique_consecutive")


@with_out
def pow(input: Any, exponent: Any) -> Tensor:
    """input ** exponent; one of both may be a number. Raises: ArgumentError for negative exponents of integers."""
    return input.pow(exponent) if isinstance(input, Tensor) else input**exponent


@with_out
def where(condition: Tensor, input: Any = None, other: Any = None) -> Any:
    """`input` where `condition` (bool) holds, else `other`; all three broadcast, and numbers may stand for tensors.

    With `condition` alone: where it is not zero, a tuple of int64 indices, one for each dimension.

    Raises: DtypeError, ShapeError.
    """
    if input is None and other is None:
        return condition.nonzero(as_tuple=True)
    return select_where(condition, input, other)


@numpy_names
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


@numpy_names
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


@with_out
@numpy_names
def max(input: Tensor, dim: Any = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
    """The largest element; with `dim`, (values, indices) along it; of two tensors, the larger of both elementwise."""
    return input.max(other) if other is not None else input.max(dim, keepdim) if keepdim else input.max(dim)


@with_out
@numpy_names
def min(input: Tensor, dim: Any = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
    """The smallest element; with `dim`, (values, indices) along it; of two tensors, the smaller of both elementwise."""
    return input.min(other) if other is not None else input.min(dim, keepdim) if keepdim else input.min(dim)


def split(tensor: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Stretches of one size along `dim`, the last one shorter if need be, or of the sizes given."""
    return tensor.split(split_size_or_sections, dim)


@with_out
def bucketize(input: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Between which of `boundaries`, a sorted vector, each element lies: boundaries[i-1] < input <= boundaries[i].

    right: boundaries[i-1] <= input < boundaries[i].
    """
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


def is_tensor(obj: Any) -> bool:
    """Whether `obj` is a Tensor."""
    return isinstance(obj, TensorBase)


def is_floating_point(input: Interop) -> bool:
    """Whether the dtype of `input` is floating."""
    return input.is_floating_point()


def numel(input: TensorBase) -> int:
    """The number of elements of `input`."""
    return input.array.size


def result_type(tensor1: Any, tensor2: Any) -> np.dtype[Any]:
    """The dtype of an operation on two tensors or Python numbers. Raises: DtypeError for anything else."""
    if isinstance(tensor1, TensorBase) and isinstance(tensor2, TensorBase):
        a, b = tensor1.array, tensor2.array
        return promote(a.dtype, a.ndim, b.dtype, b.ndim)
    for x, y in ((tensor1, tensor2), (tensor2, tensor1)):
        if not isinstance(y, bool | int | float):
            continue
        if isinstance(x, TensorBase):
            return promote_scalar(x.array.dtype, y)
        if isinstance(x, bool | int | float):
            return promote_scalar(of_number(x), y) if of_number(x) != bool_ else of_number(y)
    raise DtypeError(
        f"result_type: expected tensors or numbers, got {type(tensor1).__name__} and {type(tensor2).__name__}"
    )


if not TYPE_CHECKING:  # checkers know which names are defined here
    __all__ = [n for n, f in globals().items() if n[0] != "_" and getattr(f, "__module__", "") == __name__]
