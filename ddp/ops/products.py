"""Matrix products, and the linear layer with its bias in one pair."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, fold, total


def _half_in_single(xp: Any, a: Array, b: Array, out: Array | None) -> Array:
    # NumPy has no float16 kernel: its own loop is 250 times slower than float32.
    if a.dtype.char == "e":
        return (a.astype("float32") @ b.astype("float32")).astype("float16")
    return xp.matmul(a, b, out)


PRODUCTS: dict[str, Callable[..., Array]] = {"numpy": _half_in_single}  # CuPy's: `ddp.ops.cuda.entries`


def product(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b, by the way that suits the array module; in `out` if that is as good."""
    return PRODUCTS[xp.__name__](xp, a, b, out)


def rows_of(x: Array) -> Array:
    """x: (..., n) as (rows, n)."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@functools.lru_cache(maxsize=32)
def _kept_ones(n: int, dtype: Any) -> Array:
    return np.ones(n, dtype)


def ones(xp: Any, n: int, dtype: Any) -> Array:
    """Ones to add up with, as one side of a product; not to be written to."""
    return _kept_ones(n, dtype) if xp is np and n <= 1 << 16 else xp.ones(n, dtype)


def _sums_by_product(xp: Any, g: Array, out: Array | None = None) -> Array:
    if g.dtype.char == "e":
        return total(g, 0)
    # As a product of vector and matrix: three times faster than NumPy's sum over axis 0, large and small.
    return xp.matmul(ones(xp, g.shape[0], g.dtype), g, out=out)


COLUMN_SUMS: dict[str, Callable[..., Array]] = {"numpy": _sums_by_product}


def column_sums(xp: Any, g: Array, out: Array | None = None) -> Array:
    """The sum of g: (rows, n) over its rows; in `out` if that is as good."""
    return COLUMN_SUMS[xp.__name__](xp, g, out)


# z = x @ y;  dx = g @ y^T, dy = x^T @ g, summed over broadcast leading axes; a vector is a matrix of one row or column
def _matmul(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    shapes = x.shape, y.shape
    if y.ndim == 2 and x.ndim > 2:  # one large product instead of many small ones
        return product(xp, rows_of(x), y).reshape(*x.shape[:-1], y.shape[1]), shapes
    return product(xp, x, y), shapes


def _matmul_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any, outs: Sequence[Array | None] = (None, None)
) -> Gradients:
    y, x = saved
    x_shape, y_shape = shapes
    dx = dy = None
    if len(y_shape) == 2 and len(x_shape) > 1:
        rows = rows_of(g)
        if needs[0]:
            dx = product(xp, rows, y.T).reshape(x_shape)
        if needs[1]:
            dy = product(xp, rows_of(x).T, rows, outs[1])
        return dx, dy
    if len(x_shape) == 1:
        g = g[..., None, :] if len(y_shape) > 1 else g[None]
    if len(y_shape) == 1:
        g = g[..., None]
    if needs[0]:
        shape = (1, *x_shape) if len(x_shape) == 1 else x_shape
        columns = y[:, None] if len(y_shape) == 1 else y
        dx = fold(product(xp, g, columns.swapaxes(-1, -2)), shape).reshape(x_shape)
    if needs[1]:
        shape = (*y_shape, 1) if len(y_shape) == 1 else y_shape
        lines = x[None] if len(x_shape) == 1 else x
        dy = fold(product(xp, lines.swapaxes(-1, -2), g), shape).reshape(y_shape)
    return dx, dy


matmul = Op("matmul", _matmul, _matmul_backward, inputs=("x", "y"), saves={"x": ("y",), "y": ("x",)}, into=True)
matmul.launches(_matmul, _matmul_backward, native=True)


# z = x @ w^T + b;  dx = g @ w, dw = g^T @ x, db = sum g, rows of all leading axes taken together
def _linear(xp: Any, x: Array, w: Array, b: Array | None) -> tuple[Array, Any]:
    out = product(xp, rows_of(x), w.T)
    if b is not None:
        out += b
    return out if x.ndim == 2 else out.reshape(*x.shape[:-1], w.shape[0]), x.shape


def _linear_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any, outs: Sequence[Array | None] = (None, None, None)
) -> Gradients:
    w, x = saved
    g = rows_of(g)
    dx = dw = db = None
    if needs[0]:
        dx = product(xp, g, w)
        if len(shape) != 2:
            dx = dx.reshape(shape)
    if needs[1]:
        dw = product(xp, g.T, rows_of(x), outs[1])
    if needs[2]:
        db = column_sums(xp, g, outs[2])
    return dx, dw, db


linear = Op(
    "linear",
    _linear,
    _linear_backward,
    inputs=("x", "w", "b"),
    saves={"x": ("w",), "w": ("x",), "b": ()},
    into=True,
)
