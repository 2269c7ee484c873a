"""Matrix products, and the linear layer with its bias in one pair."""

from __future__ import annotations

import math
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, fold, total


def _half_in_single(a: Array, b: Array) -> Array:
    # NumPy has no float16 kernel: its own loop is 250 times slower than float32.
    if a.dtype == "float16":
        return (a.astype("float32") @ b.astype("float32")).astype("float16")
    return a @ b


def _plain(a: Array, b: Array) -> Array:
    return a @ b


PRODUCTS = {"numpy": _half_in_single, "cupy": _plain}


def product(xp: Any, a: Array, b: Array) -> Array:
    """a @ b, by the way that suits the array module."""
    return PRODUCTS[xp.__name__](a, b)


# z = x @ y;  dx = g @ y^T, dy = x^T @ g, summed over broadcast leading axes; a vector is a matrix of one row or column
def _matmul(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return product(xp, x, y), (x.shape, y.shape)


def _matmul_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    y, x = saved
    x_shape, y_shape = shapes
    if len(x_shape) == 1:
        g = g[..., None, :] if len(y_shape) > 1 else g[None]
    if len(y_shape) == 1:
        g = g[..., None]
    dx = dy = None
    if needs[0]:
        rows = (1, *x_shape) if len(x_shape) == 1 else x_shape
        columns = y[:, None] if len(y_shape) == 1 else y
        dx = fold(product(xp, g, columns.swapaxes(-1, -2)), rows).reshape(x_shape)
    if needs[1]:
        columns = (*y_shape, 1) if len(y_shape) == 1 else y_shape
        rows = x[None] if len(x_shape) == 1 else x
        dy = fold(product(xp, rows.swapaxes(-1, -2), g), columns).reshape(y_shape)
    return dx, dy


matmul = Op("matmul", _matmul, _matmul_backward, inputs=("x", "y"), saves={"x": ("y",), "y": ("x",)})


# z = x @ w^T + b;  dx = g @ w, dw = g^T @ x, db = sum g, rows of all leading axes taken together
def _linear(xp: Any, x: Array, w: Array, b: Array | None) -> tuple[Array, Any]:
    out = product(xp, _rows(x), w.T)
    if b is not None:
        out += b
    return out.reshape(*x.shape[:-1], w.shape[0]), x.shape


def _linear_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    w, x = saved
    g = _rows(g)
    dx = product(xp, g, w).reshape(shape) if needs[0] else None
    dw = product(xp, g.T, _rows(x)) if needs[1] else None
    return dx, dw, total(g, 0) if needs[2] else None


def _rows(x: Array) -> Array:
    """x: (..., n) as (rows, n)."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


linear = Op("linear", _linear, _linear_backward, inputs=("x", "w", "b"), saves={"x": ("w",), "w": ("x",), "b": ()})
