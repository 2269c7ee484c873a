"""Reductions over axes: `dims` are non-negative axes, all of them for a full reduction."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, select, total, unreduce


# z = sum x;  dx = g, broadcast
def _sum(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    return total(x, dims, keepdim), (x.shape, dims, keepdim)


def _sum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (xp.broadcast_to(unreduce(g, *residual), residual[0]),)


sum = Op("sum", _sum, _sum_backward, inputs=("x",))


# z = mean of x over n elements;  dx = g/n, broadcast
def _mean(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    count = 1
    for dim in dims:
        count *= x.shape[dim]
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


# z = log sum e^x;  dx = g*e^(x - z)
def _logsumexp(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    top = x.max(axis=dims, keepdims=True)
    # Infinite maxima stay what they are: inf - inf would be nan.
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    out = (xp.log(total(xp.exp(x - top), dims, keepdims=True, wide=True)) + top).astype(x.dtype, copy=False)
    residual = (x.shape, dims, keepdim)
    return out if keepdim else out.squeeze(dims), residual


def _logsumexp_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, out = saved
    return (unreduce(g, *residual) * xp.exp(x - unreduce(out, *residual)),)


logsumexp = Op("logsumexp", _logsumexp, _logsumexp_backward, inputs=("x",), saves=("x", "out"))


def peak(xp: Any, x: Array, dim: int) -> Array:
    """The largest elements along `dim`, which stays with size 1; zeros where there is none."""
    if x.shape[dim]:
        return x.max(axis=dim, keepdims=True)
    return xp.zeros([1 if i == dim else n for i, n in enumerate(x.shape)], x.dtype)


# z_i = e^x_i / sum e^x;  dx = z*(g - sum g*z)
def _softmax(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
    out = xp.exp(x - peak(xp, x, dim))
    out /= total(out, dim, keepdims=True, wide=True)
    return out, dim


def _softmax_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    out = saved[0]
    dx = g * out
    dx -= out * total(dx, dim, keepdims=True, wide=True)
    return (dx,)


softmax = Op("softmax", _softmax, _softmax_backward, inputs=("x",), saves=("out",))


# z_i = x_i - log sum e^x;  dx = g - e^z * sum g
def _log_softmax(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
    if not x.size:
        return x.copy(), dim  # the logarithm of an empty sum would warn
    out = x - peak(xp, x, dim)
    out -= xp.log(total(xp.exp(out), dim, keepdims=True, wide=True))
    return out, dim


def _log_softmax_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    dx = g - xp.exp(saved[0]) * total(g, dim, keepdims=True, wide=True)
    return (dx.astype(g.dtype, copy=False),)


log_softmax = Op("log_softmax", _log_softmax, _log_softmax_backward, inputs=("x",), saves=("out",))
