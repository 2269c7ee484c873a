"""Normalisation: a block takes a row, reads it once for its statistics, and again from cache."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import Source, flat, wide

# means: null where rows are not centered. Gradients of the columns go in two stages, of which this is the first: the
# rows are dealt to `chunks`, and neighbouring threads read neighbouring columns.
SOURCE = Source(
    "normalizing",
    """
extern "C" __global__ void normalize(
    const T* x, const A* w, const A* b, T* out, A* means, A* rstds, Index rows, Index n, double eps
) {
    FOR_ROWS(row, rows) {
        const T* t = x + row * n;
        A m = 0;
        if (means) {
            A added = 0;
            for (Index i = threadIdx.x; i < n; i += blockDim.x) added += A(t[i]);
            m = Block::sum(added) / A(n);
        }
        A squares = 0;
        for (Index i = threadIdx.x; i < n; i += blockDim.x) squares += (A(t[i]) - m) * (A(t[i]) - m);
        A r = 1 / sqrt(Block::sum(squares) / A(n) + A(eps));
        for (Index i = threadIdx.x; i < n; i += blockDim.x) {
            A h = (A(t[i]) - m) * r;
            out[row * n + i] = T((w ? h * w[i] : h) + (b ? b[i] : A(0)));
        }
        if (threadIdx.x == 0) {
            if (means) means[row] = m;
            rstds[row] = r;
        }
    }
}

extern "C" __global__ void norm_backward(
    const T* g, const T* x, const A* w, const A* means, const A* rstds, T* dx, Index rows, Index n
) {
    FOR_ROWS(row, rows) {
        const T *u = g + row * n, *t = x + row * n;
        A m = means ? means[row] : A(0), r = rstds[row], along = 0, across = 0;
        for (Index i = threadIdx.x; i < n; i += blockDim.x) {
            A gw = w ? A(u[i]) * w[i] : A(u[i]);
            along += gw;
            across += gw * (A(t[i]) - m) * r;
        }
        along = means ? Block::sum(along) / A(n) : A(0);
        across = Block::sum(across) / A(n);
        for (Index i = threadIdx.x; i < n; i += blockDim.x) {
            A gw = w ? A(u[i]) * w[i] : A(u[i]), h = (A(t[i]) - m) * r;
            dx[row * n + i] = T(r * (gw - along - h * across));
        }
    }
}

extern "C" __global__ void norm_columns(
    const T* g, const T* x, const A* means, const A* rstds, A* dw, A* db, Index rows, Index n, Index chunks
) {
    FOR_EACH(k, chunks * n) {
        Index chunk = k / n, i = k % n;
        A of_w = 0, of_b = 0;
        for (Index row = chunk; row < rows; row += chunks) {
            A u = A(g[row * n + i]);
            of_w += u * (A(x[row * n + i]) - (means ? means[row] : A(0))) * rstds[row];
            of_b += u;
        }
        dw[k] = of_w;
        if (db) db[k] = of_b;
    }
}

// Of every row: the sums of x and of x*(y - shift), or without y of (x - shift)^2.
extern "C" __global__ void pair_sums(
    const T* x, const T* y, const A* shifts, A* first, A* second, Index rows, Index n
) {
    FOR_ROWS(row, rows) {
        A shift = shifts ? shifts[row] : A(0), one = 0, two = 0;
        for (Index i = threadIdx.x; i < n; i += blockDim.x) {
            A t = A(x[row * n + i]);
            one += t;
            two += y ? t * (A(y[row * n + i]) - shift) : (t - shift) * (t - shift);
        }
        one = Block::sum(one);
        two = Block::sum(two);
        if (threadIdx.x == 0) {
            first[row] = one;
            second[row] = two;
        }
    }
}

extern "C" __global__ void line(const T* x, const A* scale, const A* shift, T* out, Index rows, Index n) {
    FOR_EACH(k, rows * n) out[k] = T(A(x[k]) * scale[k / n] + shift[k / n]);
}

extern "C" __global__ void plane(
    const T* x, const A* a, const T* y, const A* s, const A* c, T* out, Index rows, Index n
) {
    FOR_EACH(k, rows * n) out[k] = T(A(x[k]) * a[k / n] + A(y[k]) * s[k / n] + c[k / n]);
}
""",
)

SHARES = 1 << 16  # threads that are worth having for the sums of columns


def norm(
    xp: Any, x: Array, w: Array | None, b: Array | None, eps: float, centered: bool
) -> tuple[Array, Array | None, Array]:
    """(x - m)*r*w + b, m, r of every row; without `centered`, m is 0 and stays None. x: (rows, n), w, b: (n,)."""
    rows, n = x.shape
    kind = wide(x.dtype)
    out, rstd = xp.empty((rows, n), x.dtype), xp.empty(rows, kind)
    mean = xp.empty(rows, kind) if centered else None
    arrays = xp.ascontiguousarray(x), flat(xp, w, kind), flat(xp, b, kind), out, mean, rstd
    SOURCE.rows(xp, "normalize", x.dtype, rows, *arrays, rows, n, float(eps))
    return out, mean, rstd


def norm_backward(xp: Any, g: Array, x: Array, w: Array | None, mean: Array | None, rstd: Array) -> Array:
    """The gradient of x; mean: None where rows were not centered."""
    rows, n = g.shape
    dx = xp.empty((rows, n), g.dtype)
    arrays = xp.ascontiguousarray(g), xp.ascontiguousarray(x), flat(xp, w, rstd.dtype), mean, rstd, dx
    SOURCE.rows(xp, "norm_backward", g.dtype, rows, *arrays, rows, n)
    return dx


def norm_columns(xp: Any, g: Array, x: Array, mean: Array | None, rstd: Array) -> tuple[Array, Array | None]:
    """The gradients of w and, where rows were centered, of b: (n,)."""
    rows, n = g.shape
    chunks = max(1, min(rows, SHARES // max(n, 1)))
    dw = xp.empty((chunks, n), rstd.dtype)
    db = None if mean is None else xp.empty((chunks, n), rstd.dtype)
    arrays = xp.ascontiguousarray(g), xp.ascontiguousarray(x), mean, rstd, dw, db
    SOURCE.over(xp, "norm_columns", g.dtype, dw.size, *arrays, rows, n, chunks)
    return dw.sum(axis=0), None if db is None else db.sum(axis=0)


def pair_sums(xp: Any, x: Array, y: Array | None, shift: Array | None) -> tuple[Array, Array]:
    """Of every row: the sums of x and of x*(y - shift), or without y of (x - shift)^2. x, y: (rows, n)."""
    rows, n = x.shape
    kind = wide(x.dtype)
    first, second = xp.empty(rows, kind), xp.empty(rows, kind)
    arrays = xp.ascontiguousarray(x), flat(xp, y), flat(xp, shift, kind), first, second
    SOURCE.rows(xp, "pair_sums", x.dtype, rows, *arrays, rows, n)
    return first, second


def line(xp: Any, x: Array, scale: Array, shift: Array) -> Array:
    """x*scale + shift. x: (rows, n); scale, shift: (rows,)."""
    rows, n = x.shape
    out, kind = xp.empty((rows, n), x.dtype), wide(x.dtype)
    arrays = xp.ascontiguousarray(x), flat(xp, scale, kind), flat(xp, shift, kind), out
    SOURCE.over(xp, "line", x.dtype, rows * n, *arrays, rows, n)
    return out


def plane(xp: Any, x: Array, a: Array, y: Array, s: Array, c: Array) -> Array:
    """x*a + y*s + c. x, y: (rows, n); a, s, c: (rows,)."""
    rows, n = x.shape
    out, kind = xp.empty((rows, n), x.dtype), wide(x.dtype)
    arrays = xp.ascontiguousarray(x), flat(xp, a, kind), xp.ascontiguousarray(y), flat(xp, s, kind), flat(xp, c, kind)
    SOURCE.over(xp, "plane", x.dtype, rows * n, *arrays, out, rows, n)
    return out
