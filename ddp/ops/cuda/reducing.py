"""Reductions as CuPy arrays take them: added up in float32, float64 of float64, in an order that sizes alone decide.

A sum is one launch, or two where few results take many elements each. Nothing is added by atomics: every run gives the
same digits. Integers and bool go to the functions of the array module, except their sums.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddp.ops import moments, reducing
from ddp.ops._op import Array, Gradients, Needs, Saved, unreduce
from ddp.ops.cuda._source import wide
from ddp.ops.cuda.folding import LARGEST, PRODUCT, SMALLEST, Reducing
from ddp.ops.cuda.pointwise import Elementwise
from ddp.ops.reducing import count_of

_FLOATS = "fV"
_INT64 = np.dtype("int64")
Dims = tuple[int, ...]

SUM = Reducing("sum", ("x",), "v = x;")
NANSUM = Reducing("nansum", ("x",), "v = x == x ? x : A(0);")
NANSUM_BACKWARD = Elementwise("nansum_dx", ("x", "g"), ("dx",), "dx = x == x ? g : A(0);")
MEAN = Reducing("mean", ("x",), "v = x;", end="v / count", numbers=("count",))
SCALED = Elementwise("scaled", ("g",), ("dx",), "dx = g * scale;", ("scale",))
EXTREMES = {
    "amax": Reducing("amax", ("x",), "v = x;", LARGEST),
    "amin": Reducing("amin", ("x",), "v = x;", SMALLEST),
}
# How many elements share an extreme, and what each of them gets.
SHARES = Reducing("shares", ("x", "out"), "v = x == out || x != x ? A(1) : A(0);")
SHARED = Elementwise("shared", ("g", "x", "out", "n"), ("dx",), "dx = x == out || x != x ? g / n : A(0);")
PROD = Reducing("prod", ("x",), "v = x;", PRODUCT)
SQUARES = Reducing(
    "squares",
    ("x", "m"),
    "A d = x - m; v = d * d;",
    # No freedom is nan for one value and infinite for several, as in PyTorch.
    end="freedom > 0 ? v / freedom : v > 0 ? -(LOWEST) : log(A(-1))",
    numbers=("freedom",),
)
VAR_BACKWARD = Elementwise("var_dx", ("g", "x", "m"), ("dx",), "dx = (x - m) * (g * scale);", ("scale",))

NORMS = {
    "2": Reducing("norm_2", ("x",), "v = x * x;", end="sqrt(v)"),
    "1": Reducing("norm_1", ("x",), "v = fabs(x);"),
    "0": Reducing("norm_0", ("x",), "v = x != 0 ? A(1) : A(0);"),
    "inf": Reducing("norm_inf", ("x",), "v = fabs(x);", LARGEST),
    "-inf": Reducing("norm_least", ("x",), "v = fabs(x);", SMALLEST),
    "p": Reducing("norm_p", ("x",), "v = pow(fabs(x), p);", end="pow(v, 1 / p)", numbers=("p",)),
}
_SIGNED = "x > 0 ? {0} : x < 0 ? -({0}) : ({0}) * 0"
NORMS_BACKWARD = {
    "2": Elementwise("norm_2_dx", ("g", "x", "out"), ("dx",), "dx = out == 0 ? A(0) : x * (g / out);"),
    "1": Elementwise("norm_1_dx", ("g", "x"), ("dx",), f"dx = {_SIGNED.format('g')};"),
    "p": Elementwise(
        "norm_p_dx",
        ("g", "x", "out"),
        ("dx",),
        "A s = fabs(x), h = out == 0 ? A(0) : g / pow(out, p - 1);"
        " A d = (s == 0 && p < 2 ? A(1) : pow(s, p - 1)) * h; dx = x > 0 ? d : x < 0 ? -d : d * 0;",
        ("p",),
    ),
    "extreme": Elementwise(
        "norm_extreme_dx",
        ("g", "x", "out", "n"),
        ("dx",),
        "A d = fabs(x) == out || x != x ? g / n : A(0); dx = x > 0 ? d : x < 0 ? -d : d * 0;",
    ),
}
NORM_SHARES = Reducing("norm_shares", ("x", "out"), "v = fabs(x) == out || x != x ? A(1) : A(0);")


def _one(results: list[Array] | None) -> Array:
    assert results is not None
    return results[0]


def _sum(xp: Any, x: Array, dims: Dims, keepdim: bool) -> tuple[Array, Any]:
    dtype = _INT64 if x.dtype.kind in "biu" else x.dtype
    return SUM(xp, (x,), dims, keepdim, (), dtype), (x.shape, dims, keepdim)


reducing.sum.launches(_sum, reducing.sum.backward, native=True)


def _nansum(xp: Any, x: Array, dims: Dims, keepdim: bool) -> tuple[Array, Any]:
    if x.dtype.kind not in _FLOATS:
        return reducing.nansum.forward(xp, x, dims, keepdim)
    return NANSUM(xp, (x,), dims, keepdim), (x.shape, dims, keepdim)


def _nansum_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    return (_one(NANSUM_BACKWARD(xp, (saved[0], unreduce(g, *shapes)))),)


reducing.nansum.launches(_nansum, _nansum_backward, native=True, saves=("x",))


def _mean(xp: Any, x: Array, dims: Dims, keepdim: bool) -> tuple[Array, Any]:
    count = count_of(x.shape, dims)
    return MEAN(xp, (x,), dims, keepdim, (count,)), ((x.shape, dims, keepdim), count)


def _mean_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shapes, count = residual
    g = _one(SCALED(xp, (g,), (1 / max(count, 1),)))
    return (xp.broadcast_to(unreduce(g, *shapes), shapes[0]),)


reducing.mean.launches(_mean, _mean_backward, native=True)


def _extreme(name: str) -> None:
    op, kernel = getattr(reducing, name), EXTREMES[name]

    def forward(xp: Any, x: Array, dims: Dims, keepdim: bool) -> tuple[Array, Any]:
        if x.dtype.kind not in _FLOATS or not count_of(x.shape, dims):
            return op.forward(xp, x, dims, keepdim)  # which refuses the extreme of nothing
        return kernel(xp, (x,), dims, keepdim), (x.shape, dims, keepdim)

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
        x, out = saved[0], unreduce(saved[1], *shapes)
        n = SHARES(xp, (x, out), shapes[1], True, (), wide(x.dtype))
        return (_one(SHARED(xp, (unreduce(g, *shapes), x, out, n))),)

    op.launches(forward, backward, native=True)


_extreme("amax")
_extreme("amin")


def _prod(xp: Any, x: Array, dims: Dims, keepdim: bool) -> tuple[Array, Any]:
    dtype = _INT64 if x.dtype.kind in "biu" else x.dtype
    return PROD(xp, (x,), dims, keepdim, (), dtype), (dims, keepdim)


def _prod_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    if g.dtype.kind == "V":
        return reducing.prod.widened.backward(xp, g, needs, saved, (residual, None))
    return reducing.prod.backward(xp, g, needs, saved, residual)


reducing.prod.launches(_prod, _prod_backward, native=True)


def _var(xp: Any, x: Array, dims: Dims, keepdim: bool, correction: float) -> tuple[Array, Any]:
    count = count_of(x.shape, dims)
    middle = MEAN(xp, (x,), dims, True, (count,), wide(x.dtype))
    freedom = max(count - correction, 0)
    out = SQUARES(xp, (x, middle), dims, keepdim, (freedom,), x.dtype)
    return out, (middle, freedom, (x.shape, dims, keepdim))


def _var_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    middle, freedom, shapes = residual
    scale = 2 / freedom if freedom else math.inf
    return (_one(VAR_BACKWARD(xp, (unreduce(g, *shapes), saved[0], middle), (scale,))),)


moments.var.launches(_var, _var_backward, native=True)


def _vector_norm(xp: Any, x: Array, p: float, dims: Dims, keepdim: bool) -> tuple[Array, Any]:
    shapes = (x.shape, dims, keepdim)
    name = {2: "2", 1: "1", 0: "0", math.inf: "inf", -math.inf: "-inf"}.get(p, "p")
    if name.endswith("inf") and not x.size:
        name = "1"
    return NORMS[name](xp, (x,), dims, keepdim, (p,) if name == "p" else ()), (p, shapes)


def _vector_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    p, shapes = residual
    x, out, g = saved[0], unreduce(saved[1], *shapes), unreduce(g, *shapes)
    if p == 0:
        return (None,)
    if p == 1:
        return (_one(NORMS_BACKWARD["1"](xp, (g, x))),)
    if p == 2:
        return (_one(NORMS_BACKWARD["2"](xp, (g, x, out))),)
    if math.isinf(p):
        n = NORM_SHARES(xp, (x, out), shapes[1], True, (), wide(x.dtype))
        return (_one(NORMS_BACKWARD["extreme"](xp, (g, x, out, n))),)
    return (_one(NORMS_BACKWARD["p"](xp, (g, x, out), (p,))),)


moments.vector_norm.launches(_vector_norm, _vector_norm_backward, native=True)
