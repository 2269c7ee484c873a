"""Cross entropy of classes: one kernel reads the logits for the loss, one reads them again for the gradient.

So nothing of the size of the logits is kept or copied, which is what a large vocabulary costs.
"""

from __future__ import annotations

import math
from typing import Any

from ddp._cuda.raw_kernel import THREADS, KernelSource, wide
from ddp.ops.op import Array, Gradients, Needs, Saved

_ONE_BLOCK = 1 << 17  # rows; more of them are added up by more than one

# Rows run along any axis: with `inner` elements between neighbours, a row is (outer, n, inner) at one outer and inner.
# A block takes a row that lies in one piece; where inner > 1 a thread takes it, and its neighbours read beside it.
_ROWS = """
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

# A loss near 0 is the difference of large numbers: the logarithm is taken in float64, one a row.
ENTROPY = KernelSource(
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

// The sum of the losses or their weighted mean, and what a gradient is multiplied by for it; by one block.
extern "C" __global__ void entropy_total(
    const double* losses, const A* weights, T* narrow, A* single, A* scale, Index rows, Index mean
) {
    struct Pair {
        double loss, weight;
    } found = {0, 0};
    for (Index r = threadIdx.x; r < rows; r += blockDim.x) {
        found.loss += losses[r];
        found.weight += weights ? (double)weights[r] : 1.0;
    }
    found = Block::meet(found, [](Pair a, Pair b) { return Pair{a.loss + b.loss, a.weight + b.weight}; });
    if (threadIdx.x) return;
    double out = mean ? found.loss / found.weight : found.loss;  // nothing has no mean
    if (single) *single = A(out);
    else *narrow = T(A(out));
    *scale = mean ? A(1 / found.weight) : A(1);
}

extern "C" __global__ void entropy_each(const double* losses, T* narrow, A* single, Index rows) {
    FOR_EACH(r, rows) {
        if (single) single[r] = A(losses[r]);
        else narrow[r] = T(A(losses[r]));
    }
}

// g: the gradient of the loss, in T or in A, of each row if `apart`; scale: null where that is not reduced.
template <class Team> __device__ void entropy_backward(
    const T* xs, const T* narrow, const A* single, Index apart, const A* scale, const Index* target, const bool* keep,
    const A* weight, const A* weights, const A* tops, const A* sums, T* dxs, Index rows, Index n, Index inner,
    const A* masses, double smoothing
) {
    A mass = masses ? masses[0] : A(n);
    for (Index r = Team::first(); r < rows; r += Team::rows()) {
        const T* x = xs + begin(r, n, inner);
        T* dx = dxs + begin(r, n, inner);
        bool kept = !keep || keep[r];
        Index right = kept ? target[r] : 0;
        A g = single ? single[apart ? r : 0] : A(narrow[apart ? r : 0]);
        if (scale) g *= *scale;
        A at = g * (weights ? weights[r] : A(1)) * A(1 - smoothing), even = g * A(smoothing / n);
        A top = tops[r], part = 1 / sums[r];
#pragma unroll 4
        for (Index i = Team::start(); i < n; i += Team::step()) {
            A p = exp(A(x[i * inner]) - top) * part;
            A d = at * (i == right ? p - 1 : p);
            if (smoothing) d += even * (p * mass - (weight ? weight[i] : A(1)));
            dx[i * inner] = T(kept ? d : A(0));
        }
    }
}

#define ENTROPY_BACKWARD(name, Team) \\
    extern "C" __global__ void name( \\
        const T* x, const T* narrow, const A* single, Index apart, const A* scale, const Index* target, \\
        const bool* keep, const A* weight, const A* weights, const A* tops, const A* sums, T* dx, Index rows, \\
        Index n, Index inner, const A* masses, double smoothing \\
    ) { \\
        entropy_backward<Team>( \\
            x, narrow, single, apart, scale, target, keep, weight, weights, tops, sums, dx, rows, n, inner, masses, \\
            smoothing \\
        ); \\
    }

ENTROPY_BACKWARD(entropy_backward_along, Block)
ENTROPY_BACKWARD(entropy_backward_across, Thread)
""",
)


def _cut(x: Array, dim: int) -> tuple[int, int, int]:
    """How many rows run along `dim`, their length, and the elements between neighbours."""
    outer, n, inner = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    return outer * inner, n, inner


def _mass(weight: Array | None) -> Array | None:
    return None if weight is None else weight.sum(keepdims=True)  # an array: the host need not wait for it


def cross_entropy(
    xp: Any,
    x: Array,
    target: Array,
    keep: Array | None,
    weight: Array | None,
    smoothing: float,
    reduction: str,
    single: bool = False,
) -> tuple[Array, Any]:
    """As `loss._cross_entropy`. Nobody else writes to the targets: they were copied when they were checked."""
    kind, (rows, n, inner) = wide(x.dtype), _cut(x, 1)
    target = xp.ascontiguousarray(target, "int64")
    keep = None if keep is None else xp.ascontiguousarray(keep, bool)
    weight = None if weight is None else xp.array(weight, kind, order="C")  # its owner may write to it before backward
    losses, scale = xp.ndarray(rows, "float64"), xp.ndarray(1, kind)
    tops, sums = xp.ndarray(rows, kind), xp.ndarray(rows, kind)
    weights = None if keep is None and weight is None else xp.ndarray(rows, kind)
    x, mass = xp.ascontiguousarray(x), _mass(weight)
    if x.size:
        name, blocks = ("entropy_across", -(-rows // THREADS)) if inner > 1 else ("entropy_along", rows)
        arrays = x, target, keep, weight, losses, weights, tops, sums
        ENTROPY.rows(xp, name, x.dtype, blocks, *arrays, rows, n, inner, mass, float(smoothing))
    to = "float32" if single else x.dtype
    residual = target, keep, weight, weights, tops, sums, mass, smoothing
    if reduction == "none":
        out = xp.ndarray(target.shape, to)
        ENTROPY.over(xp, "entropy_each", x.dtype, rows, losses, *_either(out, x), rows)
        return out, (None, *residual)
    if rows > _ONE_BLOCK:
        out, factor = losses.reduce_weighted(xp, losses, weights, reduction)
        scale[...] = factor
        return out.astype(to), (scale, *residual)
    out = xp.ndarray((), to)
    mean = reduction == "mean"
    ENTROPY.rows(xp, "entropy_total", x.dtype, 1, losses, weights, *_either(out, x), scale, rows, mean)
    return out, (scale, *residual)


def cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    scale, target, keep, weight, weights, tops, sums, mass, smoothing = residual
    x = xp.ascontiguousarray(saved[0])
    dx, (rows, n, inner) = xp.ndarray(x.shape, x.dtype), _cut(x, 1)
    name, blocks = ("entropy_backward_across", -(-rows // THREADS)) if inner > 1 else ("entropy_backward_along", rows)
    arrays = (
        x,
        *_either(xp.ascontiguousarray(g), x),
        scale is None,
        scale,
        target,
        keep,
        weight,
        weights,
        tops,
        sums,
        dx,
    )
    ENTROPY.rows(xp, name, x.dtype, blocks if x.size else 0, *arrays, rows, n, inner, mass, float(smoothing))
    return (dx,)


def _either(array: Array, x: Array) -> tuple[Array | None, Array | None]:
    """As the kernels take what is of x's dtype or of the one that they compute in."""
    return (array, None) if array.dtype == x.dtype else (None, array)
