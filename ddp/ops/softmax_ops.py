"""softmax, log_softmax and logsumexp."""

from __future__ import annotations

from typing import Any

from ddp.ops.arrays import Array, ForwardResult, Ints, total, unreduce, upcast
from ddp.ops.op import Gradients, Needs, Op, Saved


def exponentials(xp: Any, x: Array, dim: int) -> tuple[Array, Array, Array]:
    """Returns e^(x - top), the maxima `top` along `dim`, and the sums of e^(x - top).

    x: not float16. In the maxima and the sums, `dim` has size 1.
    """
    top = x.max(axis=dim, keepdims=True)
    e = xp.exp(x - top)
    return e, top, e.sum(axis=dim, keepdims=True)


# z_i = e^x_i / sum e^x;  dx = z*(g - sum g*z)
def _softmax(xp: Any, x: Array, dim: int) -> ForwardResult:
    if not x.size:
        return x.copy(), dim
    upcast_x = upcast(x)
    e, _, sums = exponentials(xp, upcast_x, dim)
    e /= sums
    return e.astype(x.dtype, copy=False), dim


def _softmax_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    upcast_g, z = map(upcast, (g, saved[0]))
    dx = z * (upcast_g - (upcast_g * z).sum(axis=dim, keepdims=True))
    return (dx.astype(g.dtype, copy=False),)


softmax = Op("softmax", _softmax, _softmax_backward, inputs=("x",), saves=("out",))


# z_i = x_i - log sum e^x;  dx = g - e^z * sum g
def _log_softmax(xp: Any, x: Array, dim: int) -> ForwardResult:
    if not x.size:
        return x.copy(), dim
    upcast_x = upcast(x)
    _, top, sums = exponentials(xp, upcast_x, dim)
    return (upcast_x - top - xp.log(sums)).astype(x.dtype, copy=False), dim


def _log_softmax_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    upcast_g, z = map(upcast, (g, saved[0]))
    dx = upcast_g - xp.exp(z) * upcast_g.sum(axis=dim, keepdims=True)
    return (dx.astype(g.dtype, copy=False),)


log_softmax = Op("log_softmax", _log_softmax, _log_softmax_backward, inputs=("x",), saves=("out",))


# z = log sum e^x;  dx = g*e^(x - z)
def _logsumexp(xp: Any, x: Array, dims: Ints, keepdim: bool) -> ForwardResult:
    if not x.size:
        return total(xp.exp(x), dims, keepdim) - float("inf"), (x.shape, dims, keepdim)
    top = x.max(axis=dims, keepdims=True)
    # Infinite maxima are not subtracted: inf - inf is nan.
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    out = (xp.log(total(xp.exp(x - top), dims, keepdims=True, keep_float32=True)) + top).astype(x.dtype, copy=False)
    residual = (x.shape, dims, keepdim)
    return out if keepdim else out.squeeze(dims), residual


def _logsumexp_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, out = saved
    z = unreduce(out, *residual)
    dx = xp.exp(x - xp.where(z == float("-inf"), 0, z))  # a row of -inf alone gives 0, not nan
    dx *= unreduce(g, *residual)
    return (dx,)


logsumexp = Op("logsumexp", _logsumexp, _logsumexp_backward, inputs=("x",), saves=("x", "out"))
