"""softmax, its logarithm, and cross entropy: a row is reduced and written in one kernel.

Rows run along any axis: with `inner` elements between neighbours, a row is (outer, n, inner) at one outer and inner. A
block takes a row that lies in one piece; where inner > 1 a thread takes it, and its neighbours read beside it.
"""

from __future__ import annotations

import math
from typing import Any

from ddp.ops._op import Array
from ddp.ops.cuda._source import THREADS, Source, flat, wide

_ROWS = """
// Where row r begins.
__device__ inline Index begin(Index r, Index n, Index inner) { return r / inner * n * inner + r % inner; }

// The maximum of a row, and the sum of the exponentials of what is below it.
template <class Team> __device__ void exponentials(const T* x, Index n, Index inner, A& top, A& added) {
    top = LOWEST;
    for (Index i = Team::start(); i < n; i += Team::step()) {
        A v = A(x[i * inner]);
        top = v > top || v != v ? v : top;
    }
    top = Team::max(top);
    added = 0;
    for (Index i = Team::start(); i < n; i += Team::step()) added += exp(A(x[i * inner]) - top);
    added = Team::sum(added);
}
"""

SOFTMAX = Source(
    "softmax",
    _ROWS
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

# A loss near 0 is the difference of large numbers: the logarithm is taken in float64, one a row.
ENTROPY = Source(
    "entropy",
    _ROWS
    + """
template <class Team> __device__ void entropy(
    const T* xs, const Index* targets, const bool* keep, const A* weight, double* losses, A* weights, A* tops, A* sums,
    Index rows, Index n, Index inner, const A* masses, double smoothing
) {
    double mass = masses ? (double)masses[0] : (double)n;
    for (Index r = Team::first(); r < rows; r += Team::rows()) {
        const T* x = xs + begin(r, n, inner);
        A top, added, even = 0;
        exponentials<Team>(x, n, inner, top, added);
        if (smoothing) {
            for (Index i = Team::start(); i < n; i += Team::step()) {
                even += weight ? weight[i] * A(x[i * inner]) : A(x[i * inner]);
            }
            even = Team::sum(even);
        }
        if (!Team::leads()) continue;
        bool kept = !keep || keep[r];
        Index target = kept ? targets[r] : 0;
        double whole = log((double)added) + (double)top, w = weight ? (double)weight[target] : 1.0;
        double loss = w * (1 - smoothing) * (whole - (double)A(x[target * inner]));
        if (smoothing) loss += smoothing / n * (whole * mass - (double)even);
        losses[r] = kept ? loss : 0.0;  // whatever the logits there are
        if (weights) weights[r] = kept ? A(w) : A(0);
        tops[r] = top;
        sums[r] = added;
    }
}

#define ENTROPY(name, Team) \\
    extern "C" __global__ void name( \\
        const T* x, const Index* target, const bool* keep, const A* weight, double* losses, A* weights, A* tops, \\
        A* sums, Index rows, Index n, Index inner, const A* masses, double smoothing \\
    ) { \\
        entropy<Team>( \\
            x, target, keep, weight, losses, weights, tops, sums, rows, n, inner, masses, smoothing \\
        ); \\
    }

ENTROPY(entropy_along, Block)
ENTROPY(entropy_across, Thread)

// at: of each row what comes for its target, even: for every class by its weight.
extern "C" __global__ void entropy_backward(
    const T* x, const Index* target, const bool* keep, const A* weight, const A* tops, const A* sums, const A* at,
    const A* even, T* dx, Index rows, Index n, Index inner, const A* masses
) {
    A mass = masses ? masses[0] : A(n);
    FOR_EACH(k, rows * n) {
        Index r = k / (n * inner) * inner + k % inner, i = k / inner % n;
        A d = 0;
        if (!keep || keep[r]) {
            A p = exp(A(x[k]) - tops[r]) / sums[r];
            d = at[r] * (i == target[r] ? p - 1 : p);
            if (even) d += even[r] * (p * mass - (weight ? weight[i] : A(1)));
        }
        dx[k] = T(d);
    }
}
""",
)


def _cut(x: Array, dim: int) -> tuple[int, int, int]:
    """How many rows run along `dim`, their length, and the elements between neighbours."""
    outer, n, inner = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    return outer * inner, n, inner


def _rows(xp: Any, source: Source, name: str, dtype: Any, cut: tuple[int, int, int], *arguments: Any) -> None:
    rows, n, inner = cut
    if inner > 1:
        source.rows(xp, f"{name}_across", dtype, -(-rows // THREADS), *arguments, rows, n, inner)
    else:
        source.rows(xp, f"{name}_along", dtype, rows, *arguments, rows, n, inner)


def _mass(weight: Array | None) -> Array | None:
    return None if weight is None else weight.sum(keepdims=True)  # an array: the host need not wait for it


def softmax(xp: Any, x: Array, dim: int, name: str = "softmax") -> Array:
    """softmax or log_softmax of x along `dim`."""
    out = xp.empty(x.shape, x.dtype)
    if x.size:
        _rows(xp, SOFTMAX, name, x.dtype, _cut(x, dim), xp.ascontiguousarray(x), out)
    return out


def softmax_backward(xp: Any, g: Array, out: Array, dim: int, name: str = "softmax") -> Array:
    """The gradient of x, from that of softmax or log_softmax and from its result."""
    dx = xp.empty(out.shape, out.dtype)
    if out.size:
        arrays = xp.ascontiguousarray(g), xp.ascontiguousarray(out), dx
        _rows(xp, SOFTMAX, f"{name}_backward", out.dtype, _cut(out, dim), *arrays)
    return dx


def entropy(
    xp: Any, x: Array, target: Array, keep: Array | None, weight: Array | None, smoothing: float
) -> tuple[Array, Array | None, Array, Array]:
    """The loss of each sample in float64, its weight (None if all weigh 1), and the maxima and sums of its row.

    x: (N, C, ...); target: (N, ...) of int64 in [0, C), or anything where `keep` is False; weight: (C,).
    """
    kind, cut = wide(x.dtype), _cut(x, 1)
    losses, tops, sums = (xp.empty(target.shape, each) for each in ("float64", kind, kind))
    weights = None if keep is None and weight is None else xp.empty(target.shape, kind)
    if x.size:
        arrays = xp.ascontiguousarray(x), target, keep, weight, losses, weights, tops, sums
        name = "entropy_across" if cut[2] > 1 else "entropy_along"
        blocks = -(-cut[0] // THREADS) if cut[2] > 1 else cut[0]
        ENTROPY.rows(xp, name, x.dtype, blocks, *arrays, *cut, _mass(weight), float(smoothing))
    return losses, weights, tops, sums


def entropy_backward(
    xp: Any,
    x: Array,
    target: Array,
    keep: Array | None,
    weight: Array | None,
    tops: Array,
    sums: Array,
    at: Array,
    even: Array | None,
) -> Array:
    """The gradient of x. at, even: of each sample what comes for its target, and for every class by its weight."""
    dx = xp.empty(x.shape, x.dtype)
    rows, n, inner = _cut(x, 1)
    kind = tops.dtype
    arrays = xp.ascontiguousarray(x), target, keep, weight, tops, sums, flat(xp, at, kind), flat(xp, even, kind), dx
    ENTROPY.over(xp, "entropy_backward", x.dtype, x.size, *arrays, rows, n, inner, _mass(weight))
    return dx
