"""Normalisation over rows: layer_norm, rms_norm, normalize. That over channels is in `norm_channels`.

Rows go in tiles that stay in cache through all passes over them, with statistics in float32 for float16. Backward reads
the input and two numbers a row, not the normalised input: that would be one more array to write, and to keep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, as_rows, single
from ddp.ops.lines import lines, long_rows

# Bytes of input at a time. A GPU has no cache to stay in, and a launch to pay for every tile.
TILES = {"numpy": 1 << 19, "cupy": 1 << 62}
FAR = 4.0  # mean^2 above this many variances: what is computed from plain sums loses digits there


def kind_of(x: Array, *parameters: Array | None) -> Any:
    """The dtype of the gradients of weight and bias: theirs, which may be float32 beside a float16 x."""
    return next((each.dtype for each in parameters if each is not None), x.dtype)


def largest(xp: Any, length: int, nbytes: int) -> int:
    """How many of `length` items of `nbytes` go in one of `tiles`."""
    return min(length, max(1, TILES[xp.__name__] // max(nbytes, 1)))


def tiles(xp: Any, length: int, nbytes: int) -> Iterator[slice]:
    """Slices of 0 to `length`: as many items of `nbytes` as TILES holds, at least one."""
    step = max(1, largest(xp, length, nbytes))
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _dots_of_blas(xp: Any, x: Array, y: Array) -> Array:
    return xp.vecdot(x, y)


def _dots_of_einsum(xp: Any, x: Array, y: Array) -> Array:
    return xp.einsum("...i,...i->...", x, y)


DOTS = {"numpy": _dots_of_blas, "cupy": _dots_of_einsum}


def dots(xp: Any, x: Array, y: Array) -> Array:
    """The sums of x * y over the last axis."""
    return DOTS[xp.__name__](xp, x, y)


def _any_is_far(xp: Any, mean: Array, var: Array) -> bool:
    return bool((mean * mean > FAR * var).any())


def _say_far(xp: Any, mean: Array, var: Array) -> bool:
    return True  # asking the GPU would wait for it


IS_FAR = {"numpy": _any_is_far, "cupy": _say_far}


def is_far(xp: Any, mean: Array, var: Array) -> bool:
    """Whether sums over x should be taken of x - mean."""
    return IS_FAR[xp.__name__](xp, mean, var)


# z = (x - m)*r*w + b, m = mean x, r = 1/sqrt(var x + eps), over rows of the last `axes` axes, which hold n elements;
# with h = (x - m)*r:  dx = r*(g*w - mean(g*w) - h*mean(g*w*h)), dw = sum g*h, db = sum g over rows
def _layer_norm(xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    """w, b: of the last `axes` axes of x."""
    dtype, shape, kind = x.dtype, x.shape, kind_of(x, w, b)
    x, w, b = single(x, w, b)
    x = as_rows(x, axes)
    rows, n = x.shape
    out = xp.empty((rows, n), x.dtype)
    mean, rstd = xp.empty(rows, x.dtype), xp.empty(rows, x.dtype)
    averaging = xp.full(n, 1 / max(n, 1), x.dtype)
    draw = lines(xp, largest(xp, rows, n * x.itemsize), n, x.dtype, _flat(w), _flat(b))
    with long_rows(xp, n):
        for tile in tiles(xp, rows, n * x.itemsize):
            t = x[tile]
            m = t @ averaging
            var = dots(xp, t, t) / n
            var -= m * m
            mean[tile] = m
            if is_far(xp, m, var):
                t = t - m[:, None]
                var = dots(xp, t, t) / n
                m = xp.zeros_like(m)
            r = rstd[tile] = 1 / xp.sqrt(var + eps)
            draw.line(t, r, -m * r, out[tile])
    return out.reshape(shape).astype(dtype, copy=False), (axes, mean, rstd, kind)


def _layer_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    axes, mean, rstd, kind = residual
    dtype, shape = g.dtype, g.shape
    inner = shape[len(shape) - axes :]
    g, x, w = single(as_rows(g, axes), x, w)
    rows, n = g.shape
    sums = xp.zeros((2, n), g.dtype)  # of g*m*r, and of g
    if x is None:
        sums[1] = xp.ones(rows, g.dtype) @ g
        return None, None, sums[1].reshape(inner).astype(kind, copy=False)
    x, w = as_rows(x, axes), _flat(w)
    dx = xp.empty((rows, n), g.dtype) if needs[0] else None
    dw = xp.zeros(n, g.dtype)
    weight = xp.ones(n, g.dtype) if w is None else w
    draw = lines(xp, largest(xp, rows, n * g.itemsize), n, g.dtype, w)
    with long_rows(xp, n):
        for tile in tiles(xp, rows, n * g.itemsize):
            u, t, m, r = g[tile], x[tile], mean[tile], rstd[tile]
            if is_far(xp, m, 1 / (r * r)):
                t = t - m[:, None]
                m = xp.zeros_like(m)
            product = xp.multiply(u, t, out=draw.room(len(t)))
            dw += r @ product
            sums += xp.stack((m * r, xp.ones_like(r))) @ u
            if dx is not None:
                along = u @ weight  # sum g*w
                slope = (product @ weight - m * along) * (r * r * r / -n)
                draw.plane(u, r, t, slope, along * (r / -n) - m * slope, dx[tile])
    dw -= sums[0]
    return (
        dx.reshape(shape).astype(dtype, copy=False) if dx is not None else None,
        dw.reshape(inner).astype(kind, copy=False) if needs[1] else None,
        sums[1].reshape(inner).astype(kind, copy=False) if needs[2] else None,
    )


NEEDED = {"x": ("w", "x"), "w": ("x",), "b": ()}
layer_norm = Op("layer_norm", _layer_norm, _layer_norm_backward, inputs=("x", "w", "b"), saves=NEEDED)


# z = x*r*w, r = 1/sqrt(mean x^2 + eps), over rows of the last `axes` axes, which hold n elements;
# with h = x*r:  dx = r*(g*w - h*mean(g*w*h)), dw = sum g*h over rows
def _rms_norm(xp: Any, x: Array, w: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    """w: of the last `axes` axes of x."""
    dtype, shape, kind = x.dtype, x.shape, kind_of(x, w)
    x, w = single(x, w)
    x = as_rows(x, axes)
    rows, n = x.shape
    out, rstd = xp.empty((rows, n), x.dtype), xp.empty(rows, x.dtype)
    draw = lines(xp, largest(xp, rows, n * x.itemsize), n, x.dtype, _flat(w))
    with long_rows(xp, n):
        for tile in tiles(xp, rows, n * x.itemsize):
            t = x[tile]
            r = rstd[tile] = 1 / xp.sqrt(dots(xp, t, t) / n + eps)
            draw.line(t, r, None, out[tile])
    return out.reshape(shape).astype(dtype, copy=False), (axes, rstd, kind)


def _rms_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    axes, rstd, kind = residual
    dtype, shape = g.dtype, g.shape
    g, x, w = single(as_rows(g, axes), as_rows(x, axes), w)
    rows, n = g.shape
    dx = xp.empty((rows, n), g.dtype) if needs[0] else None
    dw = xp.zeros(n, g.dtype)
    w = _flat(w)
    weight = xp.ones(n, g.dtype) if w is None else w
    draw = lines(xp, largest(xp, rows, n * g.itemsize), n, g.dtype, w)
    with long_rows(xp, n):
        for tile in tiles(xp, rows, n * g.itemsize):
            u, t, r = g[tile], x[tile], rstd[tile]
            product = xp.multiply(u, t, out=draw.room(len(t)))
            dw += r @ product
            if dx is not None:
                draw.plane(u, r, t, (product @ weight) * (r * r * r / -n), None, dx[tile])
    return (
        dx.reshape(shape).astype(dtype, copy=False) if dx is not None else None,
        dw.reshape(shape[len(shape) - axes :]).astype(kind, copy=False) if needs[1] else None,
    )


rms_norm = Op("rms_norm", _rms_norm, _rms_norm_backward, inputs=("x", "w"), saves={"x": ("w", "x"), "w": ("x",)})


def _flat(x: Array | None) -> Array | None:
    return None if x is None else x.reshape(-1)


# z = x/d, d = max(|x|_p, eps) along dim;  dx = (g - [|x|_p > eps] * sum(g*z) * sign(x)*(|x|/|x|_p)^(p - 1)) / d
def _normalize(xp: Any, x: Array, p: float, dim: int, eps: float) -> tuple[Array, Any]:
    dtype = x.dtype
    (x,) = single(x)
    if p == 2:
        norm = xp.sqrt((x * x).sum(axis=dim, keepdims=True))
    elif p == 1:
        norm = xp.abs(x).sum(axis=dim, keepdims=True)
    elif p == math.inf:
        size = xp.abs(x)
        norm = size.max(axis=dim, keepdims=True) if size.size else size.sum(axis=dim, keepdims=True)
    else:
        norm = (xp.abs(x) ** p).sum(axis=dim, keepdims=True) ** (1 / p)
    return (x / xp.maximum(norm, eps)).astype(dtype, copy=False), (norm, p, dim, eps)


def _normalize_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    norm, p, dim, eps = residual
    dtype = g.dtype
    g, x = single(g, saved[0])
    over = xp.where(norm > eps, norm, 1)
    if p == 2:
        slope = x / over
    elif p == 1:
        slope = xp.sign(x)
    elif p == math.inf:
        slope = xp.sign(x) * (xp.abs(x) == norm)
        slope /= xp.maximum(xp.abs(slope).sum(axis=dim, keepdims=True), 1)  # maxima that are equal share
    else:
        slope = xp.sign(x) * (xp.abs(x) / over) ** (p - 1)
    slope *= (g * x).sum(axis=dim, keepdims=True) / over * (norm > eps)
    dx = (g - slope) / xp.maximum(norm, eps)
    return (dx.astype(dtype, copy=False),)


normalize = Op("normalize", _normalize, _normalize_backward, inputs=("x",), saves=("x",))
