"""Kernels of layer norm and RMS norm.

A block computes a row of the result or of the input's gradient. The gradients of weight and bias are sums over rows,
in two launches. The order of every sum depends on the sizes alone, so that every run gives the same bits.
"""

from __future__ import annotations

from typing import Any

from ddp._cuda.raw_kernel import (
    PARAMETERS,
    KernelSource,
    gradient_arguments,
    parameter_arguments,
)
from ddp.ops.arrays import Array, as_rows, compute_dtype
from ddp.ops.normalization import weight_dtype_of
from ddp.ops.op import Gradients, Needs, Saved

# x_hat = (x - m) * r;  y = x_hat * w + b.  The variance is computed from x - m in a second pass: the mean of x^2 would
# be inaccurate if m is large.
# gw = g * w;  dx = r * (gw - mean(gw) - x_hat * mean(gw * x_hat)), dw = sum g * x_hat, db = sum g over rows
ROW_NORM = KernelSource(
    "rows",
    PARAMETERS
    + """
extern "C" __global__ void normalize_rows(
    const T* x, const T* w, const A* w_wide, const T* b, const A* b_wide, T* out, A* means, A* rstds, Index rows,
    Index n, double eps
) {
    Parameter weight = {w, w_wide}, bias = {b, b_wide};
    FOR_ROWS(row, rows) {
        const T* t = x + row * n;
        A m = 0, squares = 0;
        if (means) {
            A sum = 0;
            for (Index i = threadIdx.x; i < n; i += blockDim.x) sum += A(t[i]);
            m = Block::sum(sum) / A(n);
        }
        for (Index i = threadIdx.x; i < n; i += blockDim.x) squares += (A(t[i]) - m) * (A(t[i]) - m);
        A r = 1 / sqrt(Block::sum(squares) / A(n) + A(eps));
        for (Index i = threadIdx.x; i < n; i += blockDim.x) {
            A y = (A(t[i]) - m) * r;
            if (weight.exists()) y *= weight.at(i);
            if (bias.exists()) y += bias.at(i);
            out[row * n + i] = T(y);
        }
        if (threadIdx.x == 0) {
            if (means) means[row] = m;
            rstds[row] = r;
        }
    }
}

extern "C" __global__ void normalize_rows_backward(
    const T* g, const T* x, const T* w, const A* w_wide, const A* means, const A* rstds, T* dx, Index rows, Index n
) {
    Parameter weight = {w, w_wide};
    FOR_ROWS(row, rows) {
        const T *u = g + row * n, *t = x + row * n;
        A m = means ? means[row] : A(0), r = rstds[row], sum = 0, along = 0;
        for (Index i = threadIdx.x; i < n; i += blockDim.x) {
            A gw = weight.exists() ? A(u[i]) * weight.at(i) : A(u[i]);
            sum += gw;
            along += gw * (A(t[i]) - m) * r;
        }
        sum = means ? Block::sum(sum) / A(n) : A(0);
        along = Block::sum(along) / A(n);
        for (Index i = threadIdx.x; i < n; i += blockDim.x) {
            A gw = weight.exists() ? A(u[i]) * weight.at(i) : A(u[i]);
            dx[row * n + i] = T(r * (gw - sum - (A(t[i]) - m) * r * along));
        }
    }
}

// Partial sums of dw and db: of every chunks-th row. dws, dbs: (chunks, n), null if not needed.
extern "C" __global__ void sum_columns(
    const T* g, const T* x, const A* means, const A* rstds, A* dws, A* dbs, Index rows, Index n, Index chunks
) {
    FOR_EACH(k, chunks * n) {
        Index chunk = k / n, i = k % n;
        A dw = 0, db = 0;
        for (Index row = chunk; row < rows; row += chunks) {
            A u = A(g[row * n + i]);
            db += u;
            if (dws) dw += u * (A(x[row * n + i]) - (means ? means[row] : A(0))) * rstds[row];
        }
        if (dws) dws[k] = dw;
        if (dbs) dbs[k] = db;
    }
}

// The sums of these partial sums.
extern "C" __global__ void sum_chunks(
    const A* dws, const A* dbs, T* dw, A* dw_wide, Index accumulate_w, T* db, A* db_wide, Index accumulate_b, Index n,
    Index chunks
) {
    GradOut grad_w = {dw, dw_wide, accumulate_w}, grad_b = {db, db_wide, accumulate_b};
    FOR_EACH(i, n) {
        A sum_w = 0, sum_b = 0;
        for (Index k = 0; k < chunks; k++) {
            if (dws) sum_w += dws[k * n + i];
            if (dbs) sum_b += dbs[k * n + i];
        }
        grad_w.put(i, sum_w);
        grad_b.put(i, sum_b);
    }
}
""",
)

# Maximum number of chunks of rows in `sum_columns`.
_CHUNKS = 128


def _threads(n: int) -> int:
    """Threads of a block for a row of n elements: a power of two from 32 to 512, at least n if possible."""
    return min(512, max(32, 1 << max(0, n - 1).bit_length()))


def norm(
    xp: Any, x: Array, w: Array | None, b: Array | None, eps: float, centered: bool
) -> tuple[Array, Array | None, Array]:
    """Returns (x - m)*r*w + b, m and r. m and r have one value for each row. x: (rows, n); w, b: (n,)

    centered: subtracts the mean; otherwise m is 0 and returned as None
    """
    rows, n = x.shape
    dtype = x.dtype
    compute = compute_dtype(dtype)
    out = xp.ndarray((rows, n), dtype)
    rstd = xp.ndarray(rows, compute)
    mean = xp.ndarray(rows, compute) if centered else None
    weight = parameter_arguments(xp, w, dtype, compute)
    bias = parameter_arguments(xp, b, dtype, compute)
    arguments = (xp.ascontiguousarray(x), *weight, *bias, out, mean, rstd, rows, n, float(eps))
    ROW_NORM.launch_rows(xp, "normalize_rows", dtype, rows if n else 0, *arguments, threads=_threads(n))
    return out, mean, rstd


def _normalized(
    xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float, centered: bool
) -> tuple[Array, Any]:
    out, mean, rstd = norm(xp, as_rows(x, axes), w, b, eps, centered)
    return out.reshape(x.shape), (axes, mean, rstd, weight_dtype_of(x, w, b))


def layer_norm(xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    return _normalized(xp, x, w, b, axes, eps, True)


def layer_norm_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, grad_outs: Saved = (None, None, None)
) -> Gradients:
    w, x = saved
    axes, mean, rstd, grad_dtype = residual  # mean: None for RMS norm
    shape = g.shape
    g = xp.ascontiguousarray(as_rows(g, axes))
    x = None if x is None else xp.ascontiguousarray(as_rows(x, axes))  # None if no needed gradient depends on x
    rows, n = g.shape
    dtype = g.dtype
    compute = rstd.dtype
    dx = None
    if needs[0]:
        dx = xp.ndarray((rows, n), dtype)
        arguments = (g, x, *parameter_arguments(xp, w, dtype, compute), mean, rstd, dx, rows, n)
        ROW_NORM.launch_rows(xp, "normalize_rows_backward", dtype, rows if n else 0, *arguments, threads=_threads(n))
        dx = dx.reshape(shape)
    if not (needs[1] or needs[2]):
        return dx, None, None
    param_shape = shape[len(shape) - axes :]
    dw, grad_w = gradient_arguments(xp, needs[1], param_shape, grad_dtype, grad_outs[1], dtype, compute)
    db, grad_b = gradient_arguments(xp, needs[2], param_shape, grad_dtype, grad_outs[2], dtype, compute)
    chunks = max(1, min(_CHUNKS, rows // 8))
    dws, dbs = (xp.ndarray((chunks, n), compute) if need else None for need in needs[1:])
    ROW_NORM.launch(xp, "sum_columns", dtype, chunks * n, g, x, mean, rstd, dws, dbs, rows, n, chunks)
    ROW_NORM.launch(xp, "sum_chunks", dtype, n, dws, dbs, *grad_w, *grad_b, n, chunks)
    return dx, dw, db


def rms_norm(xp: Any, x: Array, w: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    return _normalized(xp, x, w, None, axes, eps, False)


def rms_norm_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, grad_outs: Saved = (None, None)
) -> Gradients:
    return layer_norm_backward(xp, g, (*needs, False), saved, residual, (*grad_outs, None))[:2]
