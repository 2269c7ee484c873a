"""Variances and norms: how far elements are from their mean, or from zero."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, single, total, unreduce
from ddp.ops.distance import SQUARES
from ddp.ops.reducing import count_of


# z = sum (x - m)^2 / (n - c), m the mean of n elements, c the correction;  dx = 2*g*(x - m)/(n - c)
def _var(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool, correction: float) -> tuple[Array, Any]:
    count = count_of(x.shape, dims)
    added = total(x, dims, keepdims=True, wide=True)
    middle = added / count if count else added + float("nan")
    d = x - middle
    d *= d
    freedom = max(count - correction, 0)
    out = total(d, dims, keepdim, wide=True)
    # No freedom is nan for one value and infinite for several, as in PyTorch.
    out = out / freedom if freedom else xp.where(out > 0, xp.inf, xp.nan)
    return out.astype(x.dtype, copy=False), (middle, freedom, (x.shape, dims, keepdim))


def _var_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    middle, freedom, shapes = residual
    dx = saved[0] - middle
    dx *= unreduce(g, *shapes) * (2 / freedom if freedom else float("inf"))
    return (dx.astype(g.dtype, copy=False),)


var = Op("var", _var, _var_backward, inputs=("x",), saves=("x",))


# z = sqrt x;  dx = g/(2*z), and 0 where z = 0: elements that are all alike have a deviation, and no direction
def _root(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.sqrt(x), None


def _root_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    out = saved[0]
    zero = out == 0
    dx = g / (2 * out + zero)
    return (xp.where(zero, 0, dx).astype(g.dtype, copy=False),)


deviation = Op("deviation", _root, _root_backward, inputs=("x",), saves=("out",))


# z = (sum |x|^p)^(1/p);  dx = g*sign x*(|x|/z)^(p - 1), 0 where z = 0; none for p = 0.
# p = inf, -inf: z = max |x|, min |x|;  dx = g*sign x, shared equally by the elements of that size
def _vector_norm(xp: Any, x: Array, p: float, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    residual = (p, (x.shape, dims, keepdim))
    if p == 2:
        if x.ndim == len(dims) and x.dtype.char != "e" and x.flags.c_contiguous:
            out = xp.sqrt(SQUARES[xp.__name__](x.reshape(-1)))
            return (out.reshape((1,) * x.ndim) if keepdim else out), residual
        (wide,) = single(x)
        return xp.sqrt(total(wide * wide, dims, keepdim)).astype(x.dtype, copy=False), residual
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
        (wide,) = single(size)
        out = total(wide**p, dims, keepdim) ** (1 / p)
    return out.astype(x.dtype, copy=False), residual


def _vector_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, out = saved
    p, shapes = residual
    g, out = unreduce(g, *shapes), unreduce(out, *shapes)
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
        return (x * xp.where(zero, 0, g / (out + zero)).astype(x.dtype, copy=False),)
    if p < 2:
        size = xp.where(size == 0, 1, size)  # whose sign is 0, so that a negative power of 0 is not asked for
    scale = xp.where(zero, 0, g / (out + zero) ** (p - 1))
    return ((xp.sign(x) * size ** (p - 1) * scale).astype(x.dtype, copy=False),)


vector_norm = Op("vector_norm", _vector_norm, _vector_norm_backward, inputs=("x",), saves=("x", "out"))
