"""Layer norm and RMS norm: a block a row forward and for the input's gradient; columns for the parameters' gradients.

Each sum is taken in an order that follows from the sizes alone: every run gives the same digits.
"""

from __future__ import annotations

from typing import Any

from ddp._cuda.raw_kernel import PARAMETERS, KernelSource, either, slope, wide
from ddp.ops.arrays import Array, as_rows
from ddp.ops.normalization import kind_of
from ddp.ops.op import Gradients, Needs, Saved

# x_hat = (x - m) * r;  y = x_hat * w + b.  The variance is that of x - m, in a second pass: sums of squares would lose
# digits where the mean is far from zero.
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

// One line of partial sums for each chunk of rows. dws, dbs: (chunks, n), null where not wanted.
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

extern "C" __global__ void join_chunks(
    const A* dws, const A* dbs, T* dw, A* dw_wide, Index onto_w, T* db, A* db_wide, Index onto_b, Index n, Index chunks
) {
    Slope to_w = {dw, dw_wide, onto_w}, to_b = {db, db_wide, onto_b};
    FOR_EACH(i, n) {
        A sum_w = 0, sum_b = 0;
        for (Index k = 0; k < chunks; k++) {
            if (dws) sum_w += dws[k * n + i];
            if (dbs) sum_b += dbs[k * n + i];
        }
        to_w.put(i, sum_w);
        to_b.put(i, sum_b);
    }
}
""",
)

_CHUNKS = 128  # of rows, at most


def _threads(n: int) -> int:
    """Of a block for a row of n: a power of two, one element for each thread as far as there are so many."""
    return min(512, max(32, 1 << max(0, n - 1).bit_length()))


def norm(
    xp: Any, x: Array, w: Array | None, b: Array | None, eps: float, centered: bool
) -> tuple[Array, Array | None, Array]:
    """(x - m)*r*w + b, m, r of every row; without `centered`, m is 0 and stays None. x: (rows, n), w, b: of n."""
    (rows, n), kind, dtype = x.shape, wide(x.dtype), x.dtype
    out, rstd = xp.ndarray((rows, n), dtype), xp.ndarray(rows, kind)
    mean = xp.ndarray(rows, kind) if centered else None
    arrays = xp.ascontiguousarray(x), *either(xp, w, dtype, kind), *either(xp, b, dtype, kind), out, mean, rstd
    ROW_NORM.rows(xp, "normalize_rows", dtype, rows if n else 0, *arrays, rows, n, float(eps), threads=_threads(n))
    return out, mean, rstd


def _normalized(
    xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float, centered: bool
) -> tuple[Array, Any]:
    out, mean, rstd = norm(xp, as_rows(x, axes), w, b, eps, centered)
    return out.reshape(x.shape), (axes, mean, rstd, kind_of(x, w, b))


def layer_norm(xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    return _normalized(xp, x, w, b, axes, eps, True)


def layer_norm_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Saved = (None, None, None)
) -> Gradients:
    w, x = saved
    axes, mean, rstd, to = residual  # mean: None where rows were not centered
    shape, g = g.shape, xp.ascontiguousarray(as_rows(g, axes))
    x = None if x is None else xp.ascontiguousarray(as_rows(x, axes))  # None where nothing that is needed reads it
    (rows, n), kind, dtype = g.shape, rstd.dtype, g.dtype
    dx = None
    if needs[0]:
        dx = xp.ndarray((rows, n), dtype)
        arrays = g, x, *either(xp, w, dtype, kind), mean, rstd, dx
        ROW_NORM.rows(xp, "normalize_rows_backward", dtype, rows if n else 0, *arrays, rows, n, threads=_threads(n))
        dx = dx.reshape(shape)
    if not (needs[1] or needs[2]):
        return dx, None, None
    inner = shape[len(shape) - axes :]
    dw, to_w = slope(xp, needs[1], inner, to, outs[1], dtype, kind)
    db, to_b = slope(xp, needs[2], inner, to, outs[2], dtype, kind)
    chunks = max(1, min(_CHUNKS, rows // 8))
    dws, dbs = (xp.ndarray((chunks, n), kind) if need else None for need in needs[1:])
    ROW_NORM.over(xp, "sum_columns", dtype, chunks * n, g, x, mean, rstd, dws, dbs, rows, n, chunks)
    ROW_NORM.over(xp, "join_chunks", dtype, n, dws, dbs, *to_w, *to_b, n, chunks)
    return dx, dw, db


def rms_norm(xp: Any, x: Array, w: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    return _normalized(xp, x, w, None, axes, eps, False)


def rms_norm_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Saved = (None, None)
) -> Gradients:
    return layer_norm_backward(xp, g, (*needs, False), saved, residual, (*outs, None))[:2]
