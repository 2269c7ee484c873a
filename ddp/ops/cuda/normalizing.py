"""The sums of rows, and lines drawn over them: what normalisation of channels over several ranks is made of."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import Source, flat, wide

SOURCE = Source(
    "normalizing",
    """
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

// f(k, row) of each element; a division of 64 bits takes as long as to read a few elements.
template <class F> __device__ void each_of_rows(Index rows, Index n, F f) {
    if (rows * n < 1ll << 31) FOR_EACH(k, rows * n) f(k, (Index)((unsigned)k / (unsigned)n));
    else FOR_EACH(k, rows * n) f(k, k / n);
}

extern "C" __global__ void line(const T* x, const A* scale, const A* shift, T* out, Index rows, Index n) {
    each_of_rows(rows, n, [=](Index k, Index row) { out[k] = T(A(x[k]) * scale[row] + shift[row]); });
}

extern "C" __global__ void plane(
    const T* x, const A* a, const T* y, const A* s, const A* c, T* out, Index rows, Index n
) {
    each_of_rows(rows, n, [=](Index k, Index row) { out[k] = T(A(x[k]) * a[row] + A(y[k]) * s[row] + c[row]); });
}
""",
)


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
