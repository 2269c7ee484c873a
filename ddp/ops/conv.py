"""Convolution over images and its transpose; one is the other's gradient."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, total
from ddp.ops.unfolded import Shape, unfolded
from ddp.ops.windows import Pair, Walk


# z[n,o,p,q] = b[o] + sum_{c,i,j} w[o,c,i,j] * x[n,c,p*s+i*d,q*s+j*d] (x framed with zeros);
# dw[o,c,i,j] = sum_{n,p,q} g[n,o,p,q] * x[n,c,p*s+i*d,q*s+j*d], db = sum g over n, p, q;
# dx[n,c,p*s+i*d,q*s+j*d] += w[o,c,i,j] * g[n,o,p,q]
def _conv2d(
    xp: Any, x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Array, Any]:
    walk = Walk(x.shape[2:], w.shape[2:], stride, padding, dilation)
    shape = Shape.of(x.shape[0], w.shape, groups, walk)
    return unfolded(xp, shape, x.dtype).correlate(x, w, b), (shape, w.shape)


def _conv2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    (w, x), (shape, filters) = saved, residual
    dx, dw, db = unfolded(xp, shape, g.dtype).adjoint(g, w, x, needs[2])
    if needs[1] and dw is None:  # no sample
        dw = xp.zeros(filters, g.dtype)
    return dx, dw, total(g, (0, 2, 3)) if needs[2] and db is None else db


conv2d = Op("conv2d", _conv2d, _conv2d_backward, inputs=("x", "w", "b"), saves={"x": ("w",), "w": ("x",), "b": ()})


# z = the dx of conv2d at g = x, + b;  dx = conv2d(g, w), dw = the dw of conv2d at x = g, g = x, db = sum g over n, p, q
def _conv_transpose2d(
    xp: Any,
    x: Array,
    w: Array,
    b: Array | None,
    size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> tuple[Array, Any]:
    walk = Walk(size, w.shape[2:], stride, padding, dilation, x.shape[2:])
    shape = Shape.of(x.shape[0], w.shape, groups, walk)
    out = unfolded(xp, shape, x.dtype).adjoint(x, w, None, False)[0]
    assert out is not None
    if b is not None:
        out += b[:, None, None]
    return out, (shape, w.shape)


def _conv_transpose2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    (w, x), (shape, filters) = saved, residual
    layout = unfolded(xp, shape, g.dtype)
    dx = dw = None
    if needs[0]:
        dx = layout.correlate(g, w, None)
    if needs[1]:
        dw = layout.adjoint(x, None, g, False)[1]
        if dw is None:  # no sample
            dw = xp.zeros(filters, g.dtype)
    return dx, dw, total(g, (0, 2, 3)) if needs[2] else None


conv_transpose2d = Op(
    "conv_transpose2d",
    _conv_transpose2d,
    _conv_transpose2d_backward,
    inputs=("x", "w", "b"),
    saves={"x": ("w",), "w": ("x",), "b": ()},
)
