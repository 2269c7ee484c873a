"""softmax and its logarithm: a row is reduced and written in one kernel. Cross entropy (`entropy`) reduces alike.

Rows run along any axis: with `inner` elements between neighbours, a row is (outer, n, inner) at one outer and inner. A
block takes a row that lies in one piece; where inner > 1 a thread takes it, and its neighbours read beside it.
"""

from __future__ import annotations

import math
from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import THREADS, Source

ROWS = """
// Where row r begins.
__device__ inline Index begin(Index r, Index n, Index inner) { return r / inner * n * inner + r % inner; }

// The largest of some numbers, and the sum of the exponentials of what is below it: found in one pass, since a larger
// one only scales the sum.
struct Exponentials {
    A top, added;

    __device__ void take(A v) {
        if (v > top) {
            added = added * exp(top - v) + 1;
            top = v;
        } else if (v > LOWEST || v != v) {
            added += exp(v - top);
        }
    }
    static __device__ Exponentials join(Exponentials a, Exponentials b) {
        if (b.top > a.top) {
            Exponentials c = a;
            a = b;
            b = c;
        }
        // The one without numbers adds nothing but its nans.
        a.added += b.top > LOWEST ? b.added * exp(b.top - a.top) : b.added;
        return a;
    }
};

// Of a row. Where the largest is infinite, or all of it is -inf, the sum is nan.
template <class Team> __device__ void exponentials(const T* x, Index n, Index inner, A& top, A& added) {
    Exponentials found = {LOWEST, 0};
#pragma unroll 4
    for (Index i = Team::start(); i < n; i += Team::step()) found.take(A(x[i * inner]));
    found = Team::meet(found, Exponentials::join);
    top = found.top;
    added = found.added + (top - top);
}
"""

SOFTMAX = Source(
    "softmax",
    ROWS
    + """
template <class Team> __device__ void softmax(const T* xs, T* outs, Index rows, Index n, Index inner, bool logs) {
    for (Index r = Team::first(); r < rows; r += Team::rows()) {
        const T* x = xs + begin(r, n, inner);
        T* out = outs + begin(r, n, inner);
        A top, added;
        exponentials<Team>(x, n, inner, top, added);
        A less = log(added);
        for (Index i = Team::start(); i < n; i += Team::step()) {
            A v = A(x[i * inner]) - top;
            out[i * inner] = T(logs ? v - less : exp(v) / added);
        }
    }
}

template <class Team>
__device__ void softmax_backward(const T* gs, const T* zs, T* dxs, Index rows, Index n, Index inner, bool logs) {
    for (Index r = Team::first(); r < rows; r += Team::rows()) {
        Index at = begin(r, n, inner);
        const T *g = gs + at, *z = zs + at;
        T* dx = dxs + at;
        A added = 0;
        for (Index i = Team::start(); i < n; i += Team::step()) {
            added += logs ? A(g[i * inner]) : A(g[i * inner]) * A(z[i * inner]);
        }
        added = Team::sum(added);
        for (Index i = Team::start(); i < n; i += Team::step()) {
            A u = A(g[i * inner]), v = A(z[i * inner]);
            dx[i * inner] = T(logs ? u - exp(v) * added : v * (u - added));
        }
    }
}

#define SOFTMAX(name, logs) \\
    extern "C" __global__ void name##_along(const T* x, T* out, Index rows, Index n, Index inner) { \\
        softmax<Block>(x, out, rows, n, inner, logs); \\
    } \\
    extern "C" __global__ void name##_across(const T* x, T* out, Index rows, Index n, Index inner) { \\
        softmax<Thread>(x, out, rows, n, inner, logs); \\
    } \\
    extern "C" __global__ void name##_backward_along( \\
        const T* g, const T* z, T* dx, Index rows, Index n, Index inner \\
    ) { softmax_backward<Block>(g, z, dx, rows, n, inner, logs); } \\
    extern "C" __global__ void name##_backward_across( \\
        const T* g, const T* z, T* dx, Index rows, Index n, Index inner \\
    ) { softmax_backward<Thread>(g, z, dx, rows, n, inner, logs); }

SOFTMAX(softmax, false)
SOFTMAX(log_softmax, true)
""",
)


def cut(x: Array, dim: int) -> tuple[int, int, int]:
    """How many rows run along `dim`, their length, and the elements between neighbours."""
    outer, n, inner = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    return outer * inner, n, inner


def _rows(xp: Any, source: Source, name: str, dtype: Any, cut: tuple[int, int, int], *arguments: Any) -> None:
    rows, n, inner = cut
    if inner > 1:
        source.rows(xp, f"{name}_across", dtype, -(-rows // THREADS), *arguments, rows, n, inner)
    else:
        source.rows(xp, f"{name}_along", dtype, rows, *arguments, rows, n, inner)


def softmax(xp: Any, x: Array, dim: int, name: str = "softmax") -> Array:
    """softmax or log_softmax of x along `dim`."""
    out = xp.ndarray(x.shape, x.dtype)
    if x.size:
        _rows(xp, SOFTMAX, name, x.dtype, cut(x, dim), xp.ascontiguousarray(x), out)
    return out


def softmax_backward(xp: Any, g: Array, out: Array, dim: int, name: str = "softmax") -> Array:
    """The gradient of x, from that of softmax or log_softmax and from its result."""
    dx = xp.ndarray(out.shape, out.dtype)
    if out.size:
        arrays = xp.ascontiguousarray(g), xp.ascontiguousarray(out), dx
        _rows(xp, SOFTMAX, f"{name}_backward", out.dtype, cut(out, dim), *arrays)
    return dx
