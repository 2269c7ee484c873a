"""Reductions over axes, moments, cumulative operations, and sorting."""

from __future__ import annotations

import math
from typing import Any

from ddp.ops.arrays import (
    Array,
    ForwardResult,
    Ints,
    array_function,
    compute_dtype,
    from_bfloat16,
    sum_of_squares,
    total,
    unreduce,
    upcast,
    where_or_zero,
)
from ddp.ops.indexing import add_flat, positions
from ddp.ops.op import Gradients, Needs, Op, Saved
from ddp.ops.shape import along

# Reductions over axes: `dims` are non-negative axes, all of them for a full reduction.


def count_of(shape: Ints, dims: Ints) -> int:
    """How many elements are reduced to each result."""
    count = 1
    for dim in dims:
        count *= shape[dim]
    return count


# z = sum x;  dx = g, broadcast
def _sum(xp: Any, x: Array, dims: Ints, keepdim: bool) -> ForwardResult:
    return total(x, dims, keepdim), (x.shape, dims, keepdim)


def _sum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (xp.broadcast_to(unreduce(g, *residual), residual[0]),)


sum = Op("sum", _sum, _sum_backward, inputs=("x",))


# z = sum of the elements that are not nan;  dx = g where x is not nan
def _nansum(xp: Any, x: Array, dims: Ints, keepdim: bool) -> ForwardResult:
    is_number = x == x  # only nan differs from itself
    return total(where_or_zero(xp, is_number, x), dims, keepdim), (is_number, (x.shape, dims, keepdim))


def _nansum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    is_number, shapes = residual
    return (where_or_zero(xp, is_number, xp.broadcast_to(unreduce(g, *shapes), is_number.shape)),)


nansum = Op("nansum", _nansum, _nansum_backward, inputs=("x",))


# z = mean of x over n elements;  dx = g/n, broadcast
def _mean(xp: Any, x: Array, dims: Ints, keepdim: bool) -> ForwardResult:
    count = count_of(x.shape, dims)
    added = total(x, dims, keepdim, keep_float32=True)
    # The mean of nothing is nan, without a division by zero.
    out = added / count if count else added + float("nan")
    return out.astype(x.dtype, copy=False), ((x.shape, dims, keepdim), count)


def _mean_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shapes, count = residual
    return _sum_backward(xp, g / max(count, 1), needs, saved, shapes)


mean = Op("mean", _mean, _mean_backward, inputs=("x",))


# z = max x;  dx = g, shared equally by the elements that equal z; if z is nan, by the nans
def _amax(xp: Any, x: Array, dims: Ints, keepdim: bool) -> ForwardResult:
    return x.max(axis=dims, keepdims=keepdim), (x.shape, dims, keepdim)


def _extreme_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, out = saved
    hit = x == unreduce(out, *residual)
    hit |= x != x  # only nan differs from itself
    count = hit.sum(axis=residual[1], keepdims=True).astype(x.dtype)
    return (where_or_zero(xp, hit, unreduce(g, *residual) / count),)


amax = Op("amax", _amax, _extreme_backward, inputs=("x",), saves=("x", "out"))


# z = min x;  dx = g, shared equally by the elements that equal z; if z is nan, by the nans
def _amin(xp: Any, x: Array, dims: Ints, keepdim: bool) -> ForwardResult:
    return x.min(axis=dims, keepdims=keepdim), (x.shape, dims, keepdim)


amin = Op("amin", _amin, _extreme_backward, inputs=("x",), saves=("x", "out"))


# z = the median (of an even count, the lower of the two in the middle), nan if an element is nan;  dx = g, shared
# equally by the elements that equal z; if z is nan, by the nans
def _median(xp: Any, x: Array) -> ForwardResult:
    flat = x.reshape(-1)
    out = xp.partition(flat, (flat.size - 1) // 2)[(flat.size - 1) // 2]
    if x.dtype.kind == "f":
        out = xp.where((flat != flat).any(), flat.dtype.type(xp.nan), out)
    return out, (x.shape, tuple(range(x.ndim)), False)


median = Op("median", _median, _extreme_backward, inputs=("x",), saves=("x", "out"))


# z = x at index along `dim`, where index has size 1: one element of each 1-d slice along `dim`;  dx = g at index
def _select(xp: Any, x: Array, index: Array, dim: int, keepdim: bool) -> ForwardResult:
    out = xp.take_along_axis(x, index, axis=dim)
    return out if keepdim else out.squeeze(dim), (x.shape, index, dim)


def _select_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, index, dim = residual
    dx = xp.zeros(shape, g.dtype)
    xp.put_along_axis(dx, index, g.reshape(index.shape), axis=dim)
    return (dx,)


select = Op("select", _select, _select_backward, inputs=("x",))


# z = product of x;  dx = g*(product of all others), which is correct with zeros, too
def _prod(xp: Any, x: Array, dims: Ints, keepdim: bool) -> ForwardResult:
    out = x.prod(axis=dims, keepdims=keepdim, dtype=_accumulation_dtype(x))
    return _round_like(out, x), (dims, keepdim)


def _prod_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    dtype = saved[0].dtype
    (dims, keepdim) = residual
    x, g = map(upcast, (saved[0], unreduce(g, saved[0].shape, dims, keepdim)))
    order = [*dims, *(d for d in range(x.ndim) if d not in dims)]
    reduced_first = x.transpose(order)
    factors = math.prod(reduced_first.shape[: len(dims)])
    rows = reduced_first.reshape(factors, math.prod(reduced_first.shape[len(dims) :]))
    others = _others(xp, rows).reshape(reduced_first.shape).transpose([order.index(d) for d in range(x.ndim)])
    return ((others * g).astype(dtype, copy=False),)


def _others(xp: Any, x: Array) -> Array:
    """For each element, the product of all others in its column: of those before it, times those after it."""
    before = xp.ones_like(x)
    after = xp.ones_like(x)
    before[1:] = xp.cumprod(x[:-1], axis=0)
    after[:-1] = xp.cumprod(x[:0:-1], axis=0)[::-1]
    before *= after
    return before


prod = Op("prod", _prod, _prod_backward, inputs=("x",), saves=("x",))


# Variances and norms: how far elements are from their mean, or from zero.


@array_function
def moments(xp: Any, x: Array) -> tuple[Array, Array]:
    """The means and the biased variances over the first and last axis, in float64; 0 if there are no elements.

    x: (outer, n, inner); returns two arrays (n,).
    """
    if not x.size:
        return xp.zeros(x.shape[1]), xp.zeros(x.shape[1])
    mean = x.mean(axis=(0, 2), dtype="float64")
    if x.dtype != "float64":
        # float64 holds the sum of equal float32 numbers exactly: equal elements have a variance of 0.
        return mean, x.var(axis=(0, 2), dtype="float64")
    # Sums of float64 are rounded, even of equal numbers: the mean of the deviations corrects the mean.
    correction = (x - mean[:, None]).mean(axis=(0, 2))
    mean += xp.where(xp.isfinite(correction), correction, 0)
    return mean, xp.square(x - mean[:, None]).mean(axis=(0, 2))


@array_function
def standardize(xp: Any, x: Array, mean: Array, rstd: Array) -> Array:
    """(x - mean)*rstd in the dtype of x. mean, rstd: float64, broadcast against x."""
    # In this order nothing overflows. Only x - near can cancel; the last addition corrects for the rounding of `near`.
    near = mean.astype(x.dtype)
    out = x - near
    out *= rstd.astype(x.dtype)
    out += ((near - mean) * rstd).astype(x.dtype)
    return out


# z = sum (x - m)^2 / (n - c), m the mean of n elements, c the correction;  dx = 2*g*(x - m)/(n - c);
# root: z is the square root of that;  dx = g*(x - m)/((n - c)*z), and 0 where z = 0 (no derivative exists)
def _var(xp: Any, x: Array, dims: Ints, keepdim: bool, correction: float, root: bool = False) -> ForwardResult:
    count = count_of(x.shape, dims)
    kept = tuple(i for i in range(x.ndim) if i not in dims)
    upcast_x = upcast(x)
    if kept and kept[0]:  # the first axis is reduced: adding up whole rows reads memory in order
        columns = upcast_x.transpose(*dims, *kept).reshape(count, count_of(x.shape, kept), 1)
    else:
        columns = upcast_x.transpose(*kept, *dims).reshape(1, count_of(x.shape, kept), count)
    ones = [1 if i in dims else n for i, n in enumerate(x.shape)]
    middle, out = (moment.reshape(ones) for moment in moments(xp, columns))
    freedom = max(count - correction, 0)
    # Without degrees of freedom, the result is infinite if all values are finite and some of them differ. Otherwise it
    # is nan, for example for a single value.
    out = out * (count / freedom) if freedom else xp.where(out > 0, xp.inf, xp.nan)
    divisor = freedom / 2
    if root:
        out = xp.sqrt(out)
        divisor = freedom * xp.where(out == 0, xp.inf, out)
    z = out if keepdim else out.reshape([x.shape[i] for i in kept])
    return z.astype(x.dtype), (middle, divisor)


def _var_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    middle, divisor = residual
    x = upcast(saved[0])
    factor = xp.divide(g.reshape(middle.shape), divisor, dtype="float64")
    return (standardize(xp, x, middle, factor).astype(g.dtype, copy=False),)


var = Op("var", _var, _var_backward, inputs=("x",), saves=("x",), derived=True)


# z = (sum |x|^p)^(1/p);  dx = g*sign x*(|x|/z)^(p - 1), 0 where z = 0; none for p = 0.
# p = inf, -inf: z = max |x|, min |x|;  dx = g*sign x, shared equally by the elements of that size
def _vector_norm(xp: Any, x: Array, p: float, dims: Ints, keepdim: bool) -> ForwardResult:
    residual = (p, (x.shape, dims, keepdim))
    if p == 2:
        if x.ndim == len(dims) and x.dtype.char != "e" and x.flags.c_contiguous:
            out = xp.sqrt(sum_of_squares(xp, x.reshape(-1)))
            return (out.reshape((1,) * x.ndim) if keepdim else out), residual
        upcast_x = upcast(x)
        return xp.sqrt(total(upcast_x * upcast_x, dims, keepdim)).astype(x.dtype, copy=False), residual
    size = xp.abs(x)
    if p == 0:
        out = (x != 0).sum(axis=dims, keepdims=keepdim)
    elif p == 1:
        out = total(size, dims, keepdim)
    elif p in (float("inf"), float("-inf")):
        if size.size:
            out = size.max(axis=dims, keepdims=keepdim) if p > 0 else size.min(axis=dims, keepdims=keepdim)
        else:
            out = total(size, dims, keepdim)
    else:
        upcast_x = upcast(size)
        out = total(upcast_x**p, dims, keepdim) ** (1 / p)
    return out.astype(x.dtype, copy=False), residual


def _vector_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, out = saved
    p, shapes = residual
    g = unreduce(g, *shapes)
    out = unreduce(out, *shapes)
    if p == 0:
        return (None,)
    if p == 1:
        return (xp.sign(x) * g,)
    size = xp.abs(x)
    if p in (float("inf"), float("-inf")):
        hit = size == out
        hit |= size != size
        return (xp.sign(x) * xp.where(hit, g / hit.sum(axis=shapes[1], keepdims=True).astype(x.dtype), 0),)
    zero = out == 0
    if p == 2:
        g, out = map(upcast, (g, out))  # g / out may be too large for float16, though x * g / out is not
        return ((x * xp.where(zero, 0, g / (out + zero))).astype(x.dtype, copy=False),)
    if p < 2:
        size = xp.where(size == 0, 1, size)  # avoids a negative power of 0; sign(x) makes the gradient 0 there
    scale = xp.where(zero, 0, g / (out + zero) ** (p - 1))
    return ((xp.sign(x) * size ** (p - 1) * scale).astype(x.dtype, copy=False),)


vector_norm = Op("vector_norm", _vector_norm, _vector_norm_backward, inputs=("x",), saves=("x", "out"))


# Running sums, products and extremes along an axis.


def _accumulation_dtype(x: Array) -> Any:
    """The dtype to add up and multiply in: int64 for integers and bool, float32 for 16-bit floats, else that of x."""
    if x.dtype.kind in "bui":
        return "int64"
    return compute_dtype(x.dtype)


def _round_like(out: Array, x: Array) -> Array:
    return out.astype(x.dtype) if x.dtype.char == "e" else out


def _from_the_end(xp: Any, x: Array, dim: int) -> Array:
    """For each element, the sum of it and all later ones along `dim`."""
    return xp.flip(xp.cumsum(xp.flip(x, dim), axis=dim, dtype=_accumulation_dtype(x)), dim)


# z_i = sum of x_j, j <= i;  dx_i = sum of g_j, j >= i
def _cumsum(xp: Any, x: Array, dim: int) -> ForwardResult:
    return _round_like(xp.cumsum(x, axis=dim, dtype=_accumulation_dtype(x)), x), dim


def _cumsum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    return (_round_like(_from_the_end(xp, g, dim), g),)


cumsum = Op("cumsum", _cumsum, _cumsum_backward, inputs=("x",))


# z_i = product of x_j, j <= i;  dx_i = (sum of g_j*z_j, j >= i)/x_i;
# if an element is 0: dx_i = z_(i-1)*s_i, s_i = g_i + x_(i+1)*s_(i+1), without a division
def _cumprod(xp: Any, x: Array, dim: int) -> ForwardResult:
    return _round_like(xp.cumprod(x, axis=dim, dtype=_accumulation_dtype(x)), x), dim


def _cumprod_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    x, out = saved
    if (x != 0).all():
        return ((_from_the_end(xp, g * out, dim) / x).astype(x.dtype, copy=False),)
    x, out, g = (xp.moveaxis(array, dim, 0) for array in (x, out, g))
    dx = xp.empty_like(x)
    dx[-1] = g[-1]
    for i in range(len(x) - 2, -1, -1):
        dx[i] = g[i] + x[i + 1] * dx[i + 1]
    dx[1:] *= out[:-1]
    return (xp.moveaxis(dx, 0, dim),)


cumprod = Op("cumprod", _cumprod, _cumprod_backward, inputs=("x",), saves=("x", "out"))


@array_function
def accumulate(xp: Any, name: str, x: Array) -> Array:
    """The running result of the ufunc `name` along axis 0."""
    return getattr(xp, name).accumulate(x, axis=0)


def running(xp: Any, name: str, x: Array, dim: int) -> Array:
    """For each i along `dim`, the index (int64) of the extreme of x_j, j <= i: the last of equal ones.

    name: "maximum" or "minimum". nan counts as the extreme.
    """
    x = xp.moveaxis(x, dim, 0)
    values = accumulate(xp, name, x)
    hit = x == values
    hit |= x != x  # only nan differs from itself
    places = xp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
    index = accumulate(xp, "maximum", xp.where(hit, places, 0))
    return xp.ascontiguousarray(xp.moveaxis(index, 0, dim))


# z_i = x at index_i along `dim`, where an element may be chosen more than once;  dx = g, added up there
def _choose(xp: Any, x: Array, index: Array, dim: int) -> ForwardResult:
    return xp.take_along_axis(x, index, axis=dim), (x.shape, index, dim)


def _choose_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, index, dim = residual
    dx = xp.zeros(math.prod(shape), g.dtype)
    return (add_flat(xp, dx, positions(xp, index, dim, shape), g).reshape(shape),)


running_extreme = Op("running_extreme", _choose, _choose_backward, inputs=("x",))


# Sorting, the largest elements, distinct elements, searching. Indices have no gradient, so nothing here is an op.
#
# nan counts as larger than every number, in sorting and in searching.


def argsort(xp: Any, x: Array, dim: int, descending: bool) -> Array:
    """The indices that sort `x` along `dim`; equal elements keep their order."""
    x = from_bfloat16(xp, x)
    if not descending:
        return xp.argsort(x, axis=dim, kind="stable")
    # A reversed ascending order has equal elements in reverse, too. So the input is reversed before it is sorted.
    order = xp.flip(xp.argsort(xp.flip(x, dim), axis=dim, kind="stable"), dim)
    return x.shape[dim] - 1 - order


def extremes(xp: Any, x: Array, k: int, dim: int, largest: bool, ordered: bool) -> Array:
    """The indices of the k largest, or smallest, elements along `dim`; the most extreme first if `ordered`."""
    n = x.shape[dim]
    x = from_bfloat16(xp, x)
    if not 0 < k < n:
        order = argsort(xp, x, dim, largest)
        return order[along(dim, slice(0, k))]
    part = slice(n - k, n) if largest else slice(0, k)
    index = xp.argpartition(x, n - k if largest else k - 1, axis=dim)[along(dim, part)]
    if ordered:
        order = argsort(xp, xp.take_along_axis(x, index, axis=dim), dim, largest)
        index = xp.take_along_axis(index, order, axis=dim)
    return index


def ranked(xp: Any, x: Array, k: int, dim: int) -> Array:
    """The index of the k-th smallest element (k from 1) along `dim`. The result has size 1 along `dim`."""
    index = xp.argpartition(from_bfloat16(xp, x), k - 1, axis=dim)
    return index[along(dim, slice(k - 1, k))]


def unique(xp: Any, x: Array, dim: int | None, inverse: bool, counts: bool) -> tuple[Array, Array | None, Array | None]:
    """The sorted distinct elements of `x` (or slices along `dim`), the index of each element among them, their counts.

    The indices are None unless `inverse` is set, the counts unless `counts` is. Two nans are distinct.
    """
    results = xp.unique(from_bfloat16(xp, x), return_inverse=inverse, return_counts=counts, axis=dim, equal_nan=False)
    values, *optional = results if inverse or counts else (results,)
    indices = None
    if inverse:
        indices = optional.pop(0).reshape(x.shape if dim is None else -1)
    return values.astype(x.dtype, copy=False), indices, optional.pop(0) if counts else None


def runs(xp: Any, x: Array, dim: int | None) -> tuple[Array, Array, Array]:
    """The runs of equal neighbours: each run's first element, each element's run number, and each run's length."""
    rows = x.reshape(-1, 1) if dim is None else xp.moveaxis(x, dim, 0).reshape(x.shape[dim], -1)
    n = rows.shape[0]
    first = xp.ones(n, bool)
    if n > 1:
        first[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    starts = xp.flatnonzero(first)
    inverse = xp.cumsum(first) - 1
    counts = xp.diff(xp.append(starts, n))
    if dim is None:
        return x.reshape(-1)[starts], inverse.reshape(x.shape), counts
    return xp.take(x, starts, axis=dim), inverse, counts


def searchsorted(xp: Any, rows: Array, x: Array, side: str) -> Array:
    """Where to insert each element of `x` into `rows`, which are sorted along the last axis.

    rows: one row (1-d), used for all of x; or as many rows as x has, each used for the same row of x
    """
    rows = from_bfloat16(xp, rows)
    x = from_bfloat16(xp, x)
    if rows.ndim == 1:
        return xp.asarray(xp.searchsorted(rows, x, side=side))
    out = xp.zeros(x.shape, "int64")
    if not rows.size or not x.size:
        return out
    flat, values, places = (array.reshape(-1, array.shape[-1]) for array in (rows, x, out))
    for row, value, place in zip(flat, values, places, strict=True):
        place[...] = xp.searchsorted(row, value, side=side)
    return out


def bincount(xp: Any, x: Array, weights: Array | None, minlength: int) -> Array:
    """How often each integer from 0 on occurs in x; with weights, the sum of the weights of these elements."""
    if not x.size:
        return xp.zeros(minlength, "int64" if weights is None else weights.dtype)
    return xp.bincount(x, weights=weights, minlength=minlength)
