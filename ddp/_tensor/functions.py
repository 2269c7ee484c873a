"""The functions of `ddp` that are methods of `Tensor`, too; those of several tensors: `joining`, `contraction`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp._tensor.base import TensorBase
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import bool_, of_number, promote, promote_scalar
from ddp._tensor.elementwise import chosen
from ddp._tensor.function_form import function_form, with_out
from ddp._tensor.interop import Interop
from ddp._tensor.operands import numpy_names
from ddp._tensor.reductions import Dims
from ddp._tensor.sorting import searchsorted
from ddp.errors import DtypeError

# Elementwise
add = function_form(Tensor.add, number_first=True)
sub = function_form(Tensor.sub, number_first=True)
rsub = function_form(Tensor.rsub, number_first=True)
mul = function_form(Tensor.mul, number_first=True)
div = function_form(Tensor.div, number_first=True)
floor_divide = function_form(Tensor.floor_divide, number_first=True)
remainder = function_form(Tensor.remainder, number_first=True)
fmod = function_form(Tensor.fmod, number_first=True)
neg = function_form(Tensor.neg)
positive = function_form(Tensor.positive)
abs = function_form(Tensor.abs)
reciprocal = function_form(Tensor.reciprocal)
square = function_form(Tensor.square)
addcmul = function_form(Tensor.addcmul)
addcdiv = function_form(Tensor.addcdiv)
lerp = function_form(Tensor.lerp)
subtract, multiply, divide, true_divide = sub, mul, div, div
negative, absolute = neg, abs

# Choices
maximum = function_form(Tensor.maximum)
minimum = function_form(Tensor.minimum)
fmax = function_form(Tensor.fmax)
fmin = function_form(Tensor.fmin)
clamp = function_form(Tensor.clamp)
clamp_min = function_form(Tensor.clamp_min)
clamp_max = function_form(Tensor.clamp_max)
nan_to_num = function_form(Tensor.nan_to_num)
relu = function_form(Tensor.relu)
clip = clamp

# Comparisons, logic and bits
eq = function_form(Tensor.eq)
ne = function_form(Tensor.ne)
lt = function_form(Tensor.lt)
le = function_form(Tensor.le)
gt = function_form(Tensor.gt)
ge = function_form(Tensor.ge)
logical_and = function_form(Tensor.logical_and)
logical_or = function_form(Tensor.logical_or)
logical_xor = function_form(Tensor.logical_xor)
logical_not = function_form(Tensor.logical_not)
bitwise_and = function_form(Tensor.bitwise_and)
bitwise_or = function_form(Tensor.bitwise_or)
bitwise_xor = function_form(Tensor.bitwise_xor)
bitwise_not = function_form(Tensor.bitwise_not)
bitwise_left_shift = function_form(Tensor.bitwise_left_shift)
bitwise_right_shift = function_form(Tensor.bitwise_right_shift)
isnan = function_form(Tensor.isnan)
isinf = function_form(Tensor.isinf)
isfinite = function_form(Tensor.isfinite)
equal = function_form(Tensor.equal)
isclose = function_form(Tensor.isclose)
allclose = function_form(Tensor.allclose)
not_equal, less, less_equal, greater, greater_equal = ne, lt, le, gt, ge

# Copies
clone = function_form(Tensor.clone)
detach = function_form(Tensor.detach)

# Indexing
gather = function_form(Tensor.gather)
take_along_dim = function_form(Tensor.take_along_dim)
take = function_form(Tensor.take)
index_select = function_form(Tensor.index_select)
masked_select = function_form(Tensor.masked_select)
nonzero = function_form(Tensor.nonzero)
argwhere = function_form(Tensor.argwhere)
scatter = function_form(Tensor.scatter)
scatter_add = function_form(Tensor.scatter_add)
index_add = function_form(Tensor.index_add)
index_copy = function_form(Tensor.index_copy)
index_fill = function_form(Tensor.index_fill)
index_put = function_form(Tensor.index_put)
masked_fill = function_form(Tensor.masked_fill)
masked_scatter = function_form(Tensor.masked_scatter)

# Other orders
tile = function_form(Tensor.tile)
flip = function_form(Tensor.flip)
fliplr = function_form(Tensor.fliplr)
flipud = function_form(Tensor.flipud)
rot90 = function_form(Tensor.rot90)
roll = function_form(Tensor.roll)
tril = function_form(Tensor.tril)
triu = function_form(Tensor.triu)
diag = function_form(Tensor.diag)
diag_embed = function_form(Tensor.diag_embed)

# Elementwise
exp = function_form(Tensor.exp)
exp2 = function_form(Tensor.exp2)
expm1 = function_form(Tensor.expm1)
log = function_form(Tensor.log)
log2 = function_form(Tensor.log2)
log10 = function_form(Tensor.log10)
log1p = function_form(Tensor.log1p)
sqrt = function_form(Tensor.sqrt)
rsqrt = function_form(Tensor.rsqrt)
sin = function_form(Tensor.sin)
cos = function_form(Tensor.cos)
tan = function_form(Tensor.tan)
asin = function_form(Tensor.asin)
acos = function_form(Tensor.acos)
atan = function_form(Tensor.atan)
sinh = function_form(Tensor.sinh)
cosh = function_form(Tensor.cosh)
asinh = function_form(Tensor.asinh)
acosh = function_form(Tensor.acosh)
atanh = function_form(Tensor.atanh)
erf = function_form(Tensor.erf)
erfc = function_form(Tensor.erfc)
erfinv = function_form(Tensor.erfinv)
tanh = function_form(Tensor.tanh)
sigmoid = function_form(Tensor.sigmoid)
floor = function_form(Tensor.floor)
ceil = function_form(Tensor.ceil)
trunc = function_form(Tensor.trunc)
logit = function_form(Tensor.logit)
atan2 = function_form(Tensor.atan2)
logaddexp = function_form(Tensor.logaddexp)
hypot = function_form(Tensor.hypot)
xlogy = function_form(Tensor.xlogy, number_first=True)
round = function_form(Tensor.round)
frac = function_form(Tensor.frac)
sign = function_form(Tensor.sign)
arcsin, arccos, arctan = asin, acos, atan
arcsinh, arccosh, arctanh = asinh, acosh, atanh
arctan2, fix = atan2, trunc

# Products
matmul = function_form(Tensor.matmul)
mm = function_form(Tensor.mm)
bmm = function_form(Tensor.bmm)
mv = function_form(Tensor.mv)
dot = function_form(Tensor.dot)
outer = function_form(Tensor.outer)
inner = function_form(Tensor.inner)
trace = function_form(Tensor.trace)
addmm = function_form(Tensor.addmm)
addmv = function_form(Tensor.addmv)
addr = function_form(Tensor.addr)
baddbmm = function_form(Tensor.baddbmm)

# Reductions
sum = function_form(Tensor.sum)
nansum = function_form(Tensor.nansum)
mean = function_form(Tensor.mean)
nanmean = function_form(Tensor.nanmean)
var = function_form(Tensor.var)
std = function_form(Tensor.std)
prod = function_form(Tensor.prod)
norm = function_form(Tensor.norm)
amax = function_form(Tensor.amax)
amin = function_form(Tensor.amin)
aminmax = function_form(Tensor.aminmax)
argmax = function_form(Tensor.argmax)
argmin = function_form(Tensor.argmin)
median = function_form(Tensor.median)
logsumexp = function_form(Tensor.logsumexp)
softmax = function_form(Tensor.softmax)
log_softmax = function_form(Tensor.log_softmax)
cumsum = function_form(Tensor.cumsum)
cumprod = function_form(Tensor.cumprod)
cummax = function_form(Tensor.cummax)
cummin = function_form(Tensor.cummin)
all = function_form(Tensor.all)
any = function_form(Tensor.any)
count_nonzero = function_form(Tensor.count_nonzero)

# Shapes and views
reshape = function_form(Tensor.reshape)
ravel = function_form(Tensor.ravel)
flatten = function_form(Tensor.flatten)
unflatten = function_form(Tensor.unflatten)
transpose = function_form(Tensor.transpose)
swapaxes = function_form(Tensor.swapaxes)
swapdims = function_form(Tensor.swapdims)
t = function_form(Tensor.t)
permute = function_form(Tensor.permute)
movedim = function_form(Tensor.movedim)
moveaxis = function_form(Tensor.moveaxis)
squeeze = function_form(Tensor.squeeze)
unsqueeze = function_form(Tensor.unsqueeze)
broadcast_to = function_form(Tensor.broadcast_to)
split_with_sizes = function_form(Tensor.split_with_sizes)
chunk = function_form(Tensor.chunk)
tensor_split = function_form(Tensor.tensor_split)
unbind = function_form(Tensor.unbind)
narrow = function_form(Tensor.narrow)
select = function_form(Tensor.select)
diagonal = function_form(Tensor.diagonal)
as_strided = function_form(Tensor.as_strided)

# Sorting and searching
sort = function_form(Tensor.sort)
argsort = function_form(Tensor.argsort)
msort = function_form(Tensor.msort)
topk = function_form(Tensor.topk)
kthvalue = function_form(Tensor.kthvalue)
unique = function_form(Tensor.unique)
unique_consecutive = function_form(Tensor.unique_consecutive)
bincount = function_form(Tensor.bincount)
histc = function_form(Tensor.histc)


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
    return chosen(condition, input, other)


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
