"""softmax and its logarithms, in blocks that stay in the cache: every pass but the first and the last is free there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ddp.ops.op import Array, Gradients, Needs, Op, Saved, array_function, compute_dtype, total, unreduce
from ddp.ops.products import ones


@array_function
def block_elements(xp: Any) -> int:
    """Elements of a block: what is read, what is written and a scratch array of float32 fit 1 MiB of L2 together."""
    return 1 << 16


def columns(x: Array, dim: int) -> Array:
    """x as (outer, n) or (outer, n, inner), where n runs along `dim`: a view if the memory allows one."""
    if x.ndim == 2 and dim == 1:
        return x
    outer, n, inner = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    return x.reshape(outer, n) if inner == 1 else x.reshape(outer, n, inner)


def blocks(xp: Any, shape: tuple[int, ...]) -> Iterator[Any]:
    """Indices that cut (outer, n) or (outer, n, inner) into blocks that hold n whole."""
    outer, n = shape[:2]
    inner = shape[2] if len(shape) > 2 else 1
    size = block_elements(xp)
    if outer * n * inner <= size:
        yield ...
        return
    rows = max(size // max(n * inner, 1), 1)
    across = inner if rows > 1 or len(shape) == 2 else max(size // max(n, 1), 16)
    for row in range(0, outer, rows):
        for column in range(0, inner, across):
            part = slice(row, row + rows)
            yield part if len(shape) == 2 else (part, slice(None), slice(column, column + across))


@array_function
def row_sums(xp: Any, x: Array, weight: Array | None) -> Array:
    """The sums of the rows of x, or of x * weight. x: (r, n), weight: (n,)."""
    # As a product of matrix and vector: five times faster than NumPy's sum along short rows.
    result: Array = x.dot(ones(xp, x.shape[1], x.dtype) if weight is None else weight)
    return result


def added(xp: Any, x: Array, weight: Array | None = None) -> Array:
    """The sum of `x`, or of x * weight, along axis 1, which stays. x: (r, n) or (r, n, m); weight: (n,)."""
    if x.ndim == 2:
        return row_sums(xp, x, weight)[:, None]
    if weight is not None:
        x = x * weight[:, None]
    return x.sum(axis=1, keepdims=True)


def scratch(xp: Any, x: Array, dtype: Any) -> Array:
    """Memory for one block of `x`, of as many elements as its largest."""
    n = x.shape[1]
    inner = x.shape[2] if x.ndim > 2 else 1
    size = block_elements(xp)
    return xp.empty(min(x.size, max(size, n * min(inner, 16))), dtype)


def shaped(buffer: Array, x: Array) -> Array:
    """The head of `buffer` in the shape of the block `x`."""
    return buffer[: x.size].reshape(x.shape)


FAR = 60.0  # e^60 is no danger to float32, nor is a sum of many


def exponentials_from_top(xp: Any, part: Array, e: Array, limit: float = FAR) -> tuple[Array | float, Array]:
    top = part.max(axis=1, keepdims=True)
    xp.subtract(part, top, out=e, dtype=e.dtype)
    xp.exp(e, out=e)
    return top, added(xp, e)


@array_function
def exponentials(xp: Any, part: Array, e: Array, limit: float = FAR) -> tuple[Array | float, Array]:
    """Writes e^(part - top) into `e`; returns top and the sums along axis 1, which stays.

    part, e: (r, n) or (r, n, m). top: the maxima along axis 1, or 0 where all |part| that count are below `limit`.
    """
    # A maximum of every row, and its subtraction, cost NumPy more than the exponentials do. They guard from overflow
    # and underflow: where the largest element of all and the smallest sum are far from both, nothing needs a guard.
    if xp.maximum.reduce(part, axis=None) <= limit:
        xp.exp(part, out=e, dtype=e.dtype)
        sums = added(xp, e)
        if xp.minimum.reduce(sums, axis=None) >= math.exp(-limit):
            return 0.0, sums
    return exponentials_from_top(xp, part, e, limit)


# z_i = e^x_i / sum e^x;  dx = z*(g - sum g*z)
def _softmax(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
    out = xp.empty(x.shape, x.dtype)
    if x.size:
        wide, rows, results = compute_dtype(x), columns(x, dim), columns(out, dim)
        same = wide == x.dtype
        for at in blocks(xp, rows.shape):
            part = rows[at]
            e = results[at] if same else xp.empty(part.shape, wide)
            xp.divide(e, exponentials(xp, part, e)[1], out=e)
            if not same:
                results[at] = e
    return out, dim


def _softmax_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    out = saved[0]
    dx = xp.empty(out.shape, out.dtype)
    if out.size:
        wide, rows, gs, results = compute_dtype(out), columns(out, dim), columns(g, dim), columns(dx, dim)
        same = wide == out.dtype
        for at in blocks(xp, rows.shape):
            z, part = rows[at], gs[at]
            d = results[at] if same else xp.empty(z.shape, wide)
            xp.multiply(z, part, out=d, dtype=wide)
            xp.subtract(part, added(xp, d), out=d)
            xp.multiply(d, z, out=d)
            if not same:
                results[at] = d
    return (dx,)


softmax = Op("softmax", _softmax, _softmax_backward, inputs=("x",), saves=("out",))


# z_i = x_i - log sum e^x;  dx = g - e^z * sum g
def _log_softmax(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
    out = xp.empty(x.shape, x.dtype)
    if x.size:
        wide, rows, results = compute_dtype(x), columns(x, dim), columns(out, dim)
        same = wide == x.dtype
        buffer = scratch(xp, rows, wide)
        for at in blocks(xp, rows.shape):
            part = rows[at]
            # A near limit: the logarithm of the sum is rounded at its own size.
            top, sums = exponentials(xp, part, shaped(buffer, part), 8.0)
            z = results[at] if same else xp.empty(part.shape, wide)
            if not isinstance(top, float):
                part = xp.subtract(part, top, out=z, dtype=wide)
            xp.subtract(part, xp.log(sums), out=z, dtype=wide)
            if not same:
                results[at] = z
    return out, dim


def _log_softmax_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    out = saved[0]
    dx = xp.empty(out.shape, out.dtype)
    if out.size:
        wide, rows, gs, results = compute_dtype(out), columns(out, dim), columns(g, dim), columns(dx, dim)
        same = wide == out.dtype
        for at in blocks(xp, rows.shape):
            part = gs[at] if same else gs[at].astype(wide)
            d = results[at] if same else xp.empty(part.shape, wide)
            xp.exp(rows[at], out=d, dtype=wide)
            xp.multiply(d, added(xp, part), out=d)
            xp.subtract(part, d, out=d)
            if not same:
                results[at] = d
    return (dx,)


log_softmax = Op("log_softmax", _log_softmax, _log_softmax_backward, inputs=("x",), saves=("out",))


# z = log sum e^x;  dx = g*e^(x - z)
def _logsumexp(xp: Any, x: Array, dims: tuple[int, ...], keepdim: bool) -> tuple[Array, Any]:
    if not x.size:
        return total(xp.exp(x), dims, keepdim) - float("inf"), (x.shape, dims, keepdim)
    top = x.max(axis=dims, keepdims=True)
    # Infinite maxima stay what they are: inf - inf would be nan.
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    out = (xp.log(total(xp.exp(x - top), dims, keepdims=True, wide=True)) + top).astype(x.dtype, copy=False)
    residual = (x.shape, dims, keepdim)
    return out if keepdim else out.squeeze(dims), residual


def _logsumexp_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, out = saved
    z = unreduce(out, *residual)
    dx = xp.exp(x - xp.where(z == float("-inf"), 0, z))  # of nothing but -inf: 0, not nan
    dx *= unreduce(g, *residual)
    return (dx,)


logsumexp = Op("logsumexp", _logsumexp, _logsumexp_backward, inputs=("x",), saves=("x", "out"))
