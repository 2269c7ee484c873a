"""Functions of `ddp`: those that are also methods of `Tensor`, those of several tensors, and a few others.

Some hide Python's built-in functions, which this module can therefore not use: abs, all, any, complex, max, min, pow,
round, sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._device import device as Device
from ddp._device import to_device
from ddp._tensor.base import TensorBase, TensorFunction, Tensors, apply, wrap
from ddp._tensor.complex_numbers import ComplexTensor
from ddp._tensor.core import Tensor
from ddp._tensor.creation import parse_shape, rename
from ddp._tensor.dtypes import Dtype, Number, of_number, parse, promote, promote_scalar
from ddp._tensor.elementwise import select_where
from ddp._tensor.indexing import broadcast_shape
from ddp._tensor.inplace import function_form, with_out
from ddp._tensor.operands import check_tensor, convert, numpy_names
from ddp._tensor.reductions import resolve_axis, searchsorted
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops import shape
from ddp.ops.arrays import Ints

_form = functools.cache(function_form)  # aliases of one method are one function


def _forms(names: str, number_first: bool = False) -> Iterator[TensorFunction]:
    """Makes a function of each method in `names`. number_first: the first operand may be a number."""
    return (_form(getattr(Tensor, name), number_first=number_first) for name in names.split())


# `_forms`, typed for methods that do not return exactly one tensor.
_others: Callable[[str], Iterator[Callable[..., Any]]] = _forms


# Arithmetic
add, div, divide, floor_divide, fmod, mul = _forms("add div divide floor_divide fmod mul", number_first=True)
multiply, remainder, rsub, sub, subtract = _forms("multiply remainder rsub sub subtract", number_first=True)
true_divide, xlogy = _forms("true_divide xlogy", number_first=True)

# Elementwise
abs, absolute, acos, acosh, addcdiv, addcmul, arccos = _forms("abs absolute acos acosh addcdiv addcmul arccos")
arccosh, arcsin, arcsinh, arctan, arctan2, arctanh, asin = _forms("arccosh arcsin arcsinh arctan arctan2 arctanh asin")
asinh, atan, atan2, atanh, ceil, cos, cosh, erf, erfc = _forms("asinh atan atan2 atanh ceil cos cosh erf erfc")
erfinv, exp, exp2, expm1, fix, floor, frac, hypot, lerp = _forms("erfinv exp exp2 expm1 fix floor frac hypot lerp")
digamma, lgamma = _forms("digamma lgamma")
log, log10, log1p, log2, logaddexp, logit, neg, negative = _forms("log log10 log1p log2 logaddexp logit neg negative")
positive, reciprocal, round, rsqrt, sigmoid, sign, sin = _forms("positive reciprocal round rsqrt sigmoid sign sin")
sinh, sqrt, square, tan, tanh, trunc = _forms("sinh sqrt square tan tanh trunc")

# Choices
clamp, clamp_max, clamp_min, clip, fmax, fmin, maximum = _forms("clamp clamp_max clamp_min clip fmax fmin maximum")
minimum, nan_to_num, relu = _forms("minimum nan_to_num relu")

# Comparisons, logic and bits
allclose, equal = _others("allclose equal")
is_floating_point, numel = _others("is_floating_point numel")
bitwise_and, bitwise_left_shift, bitwise_not = _forms("bitwise_and bitwise_left_shift bitwise_not")
bitwise_or, bitwise_right_shift, bitwise_xor, eq = _forms("bitwise_or bitwise_right_shift bitwise_xor eq")
ge, greater, greater_equal, gt, isclose, isfinite, isinf = _forms("ge greater greater_equal gt isclose isfinite isinf")
isnan, le, less, less_equal, logical_and, logical_not = _forms("isnan le less less_equal logical_and logical_not")
logical_or, logical_xor, lt, ne, not_equal = _forms("logical_or logical_xor lt ne not_equal")

# Copies, and tensors outside the graph
clone, detach = _forms("clone detach")

# Indexing
argwhere, gather, index_add, index_copy, index_fill = _forms("argwhere gather index_add index_copy index_fill")
index_put, index_select, masked_fill, masked_scatter = _forms("index_put index_select masked_fill masked_scatter")
masked_select, scatter, scatter_add, take, take_along_dim = _forms(
    "masked_select scatter scatter_add take take_along_dim"
)
(nonzero,) = _others("nonzero")

# Diagonals, triangles, flips and repeats
diag, diag_embed, flip, fliplr, flipud, roll, rot90 = _forms("diag diag_embed flip fliplr flipud roll rot90")
tile, tril, triu = _forms("tile tril triu")

# Products
addmm, addmv, addr, baddbmm, bmm, dot, inner, matmul, mm = _forms("addmm addmv addr baddbmm bmm dot inner matmul mm")
mv, outer, trace = _forms("mv outer trace")

# Reductions
all, amax, amin, any, argmax, argmin, count_nonzero = _forms("all amax amin any argmax argmin count_nonzero")
aminmax, cummax, cummin, max, median, min = _others("aminmax cummax cummin max median min")
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
    """input ** exponent; one of them may be a number. Raises: as `Tensor.pow`."""
    return input.pow(exponent) if isinstance(input, Tensor) else input**exponent


@with_out
def where(condition: Tensor, input: Any = None, other: Any = None) -> Any:
    """`input` where `condition` (bool) holds, else `other`; all three broadcast, and numbers may stand for tensors.

    With `condition` alone: the indices where it is not zero, as a tuple of int64 vectors, one for each dimension.

    Raises: DtypeError if there are values and the condition is not bool, or if a value is neither a tensor, an array
    nor a number; ShapeError if the three do not broadcast.
    """
    if input is None and other is None:
        return condition.nonzero(as_tuple=True)
    return select_where(condition, input, other)


def _with_mean(name: str, doc: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def form(x: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
        spread = getattr(x, name)(dim, unbiased, keepdim, correction=correction)
        return spread, x.mean(None if isinstance(dim, bool) else dim, keepdim)

    return numpy_names(rename(form, f"{name}_mean", doc))


var_mean = _with_mean("var", "(variance, mean).")
std_mean = _with_mean("std", "(standard deviation, mean).")


def split(tensor: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> Tensors:
    """Splits along `dim` into parts of one size, of which the last may be smaller, or into parts of given sizes."""
    return tensor.split(split_size_or_sections, dim)


@with_out
def bucketize(input: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """For each element, the index i with boundaries[i-1] < input <= boundaries[i]. boundaries: a sorted vector.

    right: boundaries[i-1] <= input < boundaries[i].
    """
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


def is_tensor(obj: Any) -> bool:
    """Whether `obj` is a Tensor."""
    return isinstance(obj, TensorBase)


def result_type(tensor1: Any, tensor2: Any) -> Dtype:
    """The dtype of an operation on two tensors or Python numbers. Raises: DtypeError for anything else."""
    if isinstance(tensor1, TensorBase) and isinstance(tensor2, TensorBase):
        a = tensor1.array
        b = tensor2.array
        return promote(a.dtype, a.ndim, b.dtype, b.ndim)
    for x, y in ((tensor1, tensor2), (tensor2, tensor1)):
        if isinstance(x, TensorBase | Number) and isinstance(y, Number):
            return promote_scalar(x.array.dtype if isinstance(x, TensorBase) else of_number(x), y)
    raise DtypeError(
        f"result_type: expected tensors or numbers, not {type(tensor1).__name__}, {type(tensor2).__name__}"
    )


def _promote(tensors: Sequence[Tensor], name: str) -> list[TensorBase]:
    if isinstance(tensors, TensorBase) or [x for x in tensors if not isinstance(x, TensorBase)]:
        raise DtypeError(f"{name}: expected a sequence of tensors")
    if not tensors:
        raise ArgumentError(f"{name}: expected at least one tensor")
    dtype = tensors[0].dtype
    dims = tensors[0].ndim
    for x in tensors[1:]:
        dtype = promote(dtype, dims, x.dtype, x.ndim)
    return [convert(x, dtype) for x in tensors]


@with_out
@numpy_names
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Joins tensors along `dim`; all other sizes must be equal. A tensor of shape (0,) fits any other.

    Raises: ShapeError if other sizes differ, or for 0-d tensors; RangeError if there is no dimension `dim`;
    ArgumentError for an empty sequence; DtypeError if an element is not a tensor.
    """
    xs = _promote(tensors, "cat")
    nonempty = [x for x in xs if x.array.shape != (0,)] or xs[:1]
    axis = resolve_axis(nonempty[0], dim, "cat")
    first = nonempty[0].array.shape
    for x in nonempty:
        size = x.array.shape
        if (
            not size
            or len(size) != len(first)
            or (*size[:axis], *size[axis + 1 :]) != (*first[:axis], *first[axis + 1 :])
        ):
            raise ShapeError(f"cat along dimension {axis}: shapes {first} and {size} differ elsewhere, or are 0-d")
    return apply(shape.cat, xs, dim=axis)


concat = concatenate = cat


@with_out
@numpy_names
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Joins tensors of one shape along a new dimension `dim`.

    Raises: ShapeError if the shapes differ; RangeError, ArgumentError, DtypeError as cat.
    """
    xs = _promote(tensors, "stack")
    if len(shapes := {x.array.shape for x in xs}) > 1:
        raise ShapeError(f"stack: shapes {', '.join(map(str, shapes))} differ")
    return apply(shape.stack, xs, dim=resolve_axis(xs[0], dim, "stack", new=1))


@with_out
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Joins tensors along dimension 1; vectors and 0-d tensors along dimension 0."""
    xs = atleast_1d(list(tensors))
    return cat(xs, 0 if xs and xs[0].ndim == 1 else 1)


@with_out
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Joins tensors along dimension 0, after `atleast_2d`."""
    return cat(atleast_2d(list(tensors)), 0)


@with_out
def dstack(tensors: Sequence[Tensor]) -> Tensor:
    """Joins tensors along dimension 2, after `atleast_3d`."""
    return cat(atleast_3d(list(tensors)), 2)


@with_out
def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """As hstack, but vectors and 0-d tensors become columns."""
    return hstack([x if x.ndim > 1 else x.reshape(-1, 1) for x in tensors])


def complex(real: Tensor, imag: Tensor) -> ComplexTensor:
    """real + i*imag, of tensors of one dtype that broadcast. Raises: DtypeError if one is not a tensor; ShapeError."""
    for x in (real, imag):
        check_tensor("complex", x)
    return ComplexTensor(*broadcast_tensors(real, imag))


def polar(abs: Tensor, angle: Tensor) -> ComplexTensor:
    """abs*(cos angle + i*sin angle), of tensors of one shape and dtype. Raises: DtypeError if one is not a tensor."""
    for x in (abs, angle):
        check_tensor("polar", x)
    return ComplexTensor(abs * angle.cos(), abs * angle.sin())


def view_as_complex(input: Tensor) -> ComplexTensor:
    """Pairs of real numbers as complex numbers: input (..., 2), result (...). Raises: ShapeError."""
    check_tensor("view_as_complex", input)
    if input.array.shape[-1:] != (2,):
        raise ShapeError(f"view_as_complex: expected a shape (..., 2), got {tuple(input.shape)}")
    return ComplexTensor(*input.unbind(-1))


def view_as_real(input: ComplexTensor) -> Tensor:
    """Complex numbers as pairs: (..., 2). A copy."""
    return stack([input.real, input.imag], -1)


def real(input: ComplexTensor) -> Tensor:
    """The real part."""
    return input.real


def imag(input: ComplexTensor) -> Tensor:
    """The imaginary part."""
    return input.imag


def conj(input: ComplexTensor) -> ComplexTensor:
    """real - i*imag"""
    return input.conj()


def angle(input: ComplexTensor) -> Tensor:
    """The angle of each number in the complex plane, in radians, in [-pi, pi]."""
    return input.angle()


def cartesian_prod(*tensors: Tensor) -> Tensor:
    """All combinations of one element from each vector: (n0 * n1 * ..., number of vectors).

    A single vector is returned unchanged.
    """
    if len(tensors) == 1:
        return tensors[0]
    return stack([grid.reshape(-1) for grid in meshgrid(*tensors, indexing="ij")], 1)


def repeat_interleave(
    input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Repeats each element, or each slice along `dim`, next to itself. output_size: see `Tensor.repeat_interleave`.

    With `input` alone: repeats each index i input[i] times.
    """
    if repeats is None:
        places = wrap(input.device.xp.arange(input.numel()), input.device)
        return places.repeat_interleave(input, 0, output_size)
    return input.repeat_interleave(repeats, dim, output_size)


def _triangle(which: str, side: str) -> TensorFunction:
    def form(row: int, col: int, offset: int = 0, *, dtype: Any = None, device: Any = None) -> Tensor:
        target = Device("cpu" if device is None else device)
        # Computed on the CPU: the host needs the number of indices, and would wait for a GPU.
        matrix = np.ones(parse_shape((row, col), None, f"{which}_indices"), bool)
        indices = np.stack(np.nonzero(getattr(np, which)(matrix, offset)))
        return wrap(to_device(indices.astype(parse("int64" if dtype is None else dtype), copy=False), target), target)

    doc = f"Where a (row, col) matrix is on or {side} a diagonal: int64 (2, n), row by row."
    doc += " Raises: ShapeError for a negative size."
    return rename(form, f"{which}_indices", doc)


tril_indices = _triangle("tril", "below")
triu_indices = _triangle("triu", "above")


def broadcast_tensors(*tensors: Any) -> Tensors:
    """Expands the tensors to the shape that they broadcast to, without copying.

    Raises: ShapeError if they do not broadcast.
    """
    xs = _as_list(tensors)
    shape = broadcast_shape("broadcast_tensors", *[x.shape for x in xs])
    # No view if the shape is the same: a view of a leaf belongs to a graph, which the first backward frees.
    return tuple([x if x.shape == shape else x.expand(shape) for x in xs])


def broadcast_shapes(*shapes: Any) -> Ints:
    """The shape that these shapes (tuples or numbers) broadcast to. Raises: ShapeError if they do not broadcast."""
    return broadcast_shape("broadcast_shapes", *[(n,) if isinstance(n, int) else tuple(n) for n in shapes])


def atleast_1d(*tensors: Any) -> Any:
    """Makes tensors at least 1-d: 0-d becomes (1,). Several tensors give a tuple."""
    return _map_tensors(tensors, lambda x: x if x.ndim else x.reshape(1))


def atleast_2d(*tensors: Any) -> Any:
    """Makes tensors at least 2-d: (n,) becomes (1, n). Several tensors give a tuple."""
    return _map_tensors(tensors, lambda x: x if x.ndim > 1 else x.reshape(1, -1))


def atleast_3d(*tensors: Any) -> Any:
    """Makes tensors at least 3-d: (n,) becomes (1, n, 1), (m, n) becomes (m, n, 1). Several tensors give a tuple."""
    return _map_tensors(tensors, lambda x: x if x.ndim > 2 else atleast_2d(x).unsqueeze(-1))


def _as_list(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a tuple of the tensors, which are given one by one or as one sequence."""
    first = tensors[0] if len(tensors) == 1 else None
    return tuple(first) if isinstance(first, Iterable) and not isinstance(first, TensorBase) else tensors


def _map_tensors(tensors: tuple[Any, ...], change: Any) -> Any:
    xs = _as_list(tensors)
    for x in xs:
        check_tensor("atleast", x)
    changed = tuple([change(x) for x in xs])
    return changed[0] if xs is tensors and len(xs) == 1 else changed


def meshgrid(*tensors: Any, indexing: str = "ij") -> Tensors:
    """Expands vectors (n0,), (n1,), ... to the coordinates of a grid, without copying.

    Results are (n0, n1, ...) for "ij", (n1, n0, ...) for "xy".

    Raises: ShapeError for more than one dimension; ArgumentError for another indexing, or an empty list; DtypeError if
    an argument is not a tensor.
    """
    vectors = _as_list(tensors)
    if indexing not in ("ij", "xy") or not vectors:
        raise ArgumentError(f"meshgrid: expected tensors, and an indexing of 'ij' or 'xy', not {indexing!r}")
    for x in vectors:
        check_tensor("meshgrid", x)
        if x.ndim > 1:
            raise ShapeError(f"meshgrid: expected vectors, got shape {x.shape}")
    xs = [x.reshape(-1) for x in vectors]
    if indexing == "xy" and len(xs) > 1:
        return tuple([grid.transpose(0, 1) for grid in meshgrid(*xs)])
    shape = [len(x) for x in xs]
    return tuple([x.reshape([-1 if i == j else 1 for j in range(len(xs))]).expand(shape) for i, x in enumerate(xs)])


if not TYPE_CHECKING:  # type checkers find the names themselves
    __all__ = [n for n, f in globals().items() if n[0] != "_" and getattr(f, "__module__", "") == __name__]
