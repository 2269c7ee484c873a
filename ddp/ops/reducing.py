"""Reductions over axes: `dims` are non-negative axes, all of them for a full reduction."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, select, total, unreduce


def count_of(shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
    """How many elements meet in each result."""
    count = 1
    for dim in dims:
        count *= shape[dim]
    return count


# z = sum x;  dx = g, broadcast
def _sum(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    return total(x, dims, keepdim), (x.shape, dims, keepdim)


def _sum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (xp.broadcast_to(unreduce(g, *residual), residual[0]),)


sum = Op("sum", _sum, _sum_backward, inputs=("x",))


# z = sum of what is not nan;  dx = g where x is not nan
def _nansum(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    there = x == x  # nan alone is unlike itself
    return total(select(xp, there, x), dims, keepdim), (there, (x.shape, dims, keepdim))


def _nansum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    there, shapes = residual
    return (select(xp, there, xp.broadcast_to(unreduce(g, *shapes), there.shape)),)


nansum = Op("nansum", _nansum, _nansum_backward, inputs=("x",))


# z = mean of x over n elements;  dx = g/n, broadcast
def _mean(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    count = count_of(x.shape, dims)
    added = total(x, dims, keepdim, wide=True)
    # The mean of nothing is nan, without a division by zero.
    out = added / count if count else added + float("nan")
    return out.astype(x.dtype, copy=False), ((x.shape, dims, keepdim), count)


def _mean_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shapes, count = residual
    return _sum_backward(xp, g / max(count, 1), needs, saved, shapes)


mean = Op("mean", _mean, _mean_backward, inputs=("x",))


# z = max x;  dx = g, shared equally by the elements that equal the maximum, or are nan where it is
def _amax(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    return x.max(axis=dims, keepdims=keepdim), (x.shape, dims, keepdim)


def _extreme_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, out = saved
    hit = x == unreduce(out, *residual)
    hit |= x != x  # nan alone is unlike itself
    count = hit.sum(axis=residual[1], keepdims=True).astype(x.dtype)
    return (select(xp, hit, unreduce(g, *residual) / count),)


amax = Op("amax", _amax, _extreme_backward, inputs=("x",), saves=("x", "out"))


# z = min x;  dx = g, shared equally by the elements that equal the minimum, or are nan where it is
def _amin(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    return x.min(axis=dims, keepdims=keepdim), (x.shape, dims, keepdim)


amin = Op("amin", _amin, _extreme_backward, inputs=("x",), saves=("x", "out"))


# z = the lower of the two in the middle of all, nan beside a nan;  dx = g, shared equally by the elements that equal it
def _median(xp: Any, x: Array) -> tuple[Array, Any]:
    flat = x.reshape(-1)
    out = xp.partition(flat, (flat.size - 1) // 2)[(flat.size - 1) // 2]
    if x.dtype.kind == "f":
        out = xp.where((flat != flat).any(), flat.dtype.type(xp.nan), out)
    return out, (x.shape, tuple(range(x.ndim)), False)


median = Op("median", _median, _extreme_backward, inputs=("x",), saves=("x", "out"))


# z = x at index along `dim`, where it keeps the dimension and names one element of each line;  dx = g there
def _pick(xp: Any, x: Array, index: Array, dim: int, keepdim: bool) -> tuple[Array, Any]:
    out = xp.take_along_axis(x, index, axis=dim)
    return out if keepdim else out.squeeze(dim), (x.shape, index, dim)


def _pick_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, index, dim = residual
    dx = xp.zeros(shape, g.dtype)
    xp.put_along_axis(dx, index, g.reshape(index.shape), axis=dim)
    return (dx,)


pick = Op("pick", _pick, _pick_backward, inputs=("x",))


# z = product of x;  dx = g*(product of all others), which is right beside zeros too
def _prod(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    wide = {"b": "int64", "u": "int64", "i": "int64"}.get(x.dtype.kind, "float32" if x.dtype.char == "e" else None)
    out = x.prod(axis=dims, keepdims=keepdim, dtype=wide)
    return out.astype(x.dtype, copy=False) if x.dtype.char == "e" else out, (dims, keepdim)


def _prod_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, (dims, keepdim) = saved[0], residual
    g = unreduce(g, x.shape, dims, keepdim)
    if len(dims) == 1:
        return (_others(xp, x, dims[0]) * g,)
    return ((_others(xp, x.reshape(-1), 0) * g.reshape(-1)).reshape(x.shape),)  # all of them: that is what there is


def _others(xp: Any, x: Array, dim: int) -> Array:
    """The product of all other elements along `dim`: of those before it, times those after it."""
    x = x.swapaxes(0, dim)
    before, after = xp.ones_like(x), xp.ones_like(x)
    before[1:] = xp.cumprod(x[:-1], axis=0)
    after[:-1] = xp.cumprod(x[:0:-1], axis=0)[::-1]
    before *= after
    return before.swapaxes(0, dim)


prod = Op("prod", _prod, _prod_backward, inputs=("x",), saves=("x",))
