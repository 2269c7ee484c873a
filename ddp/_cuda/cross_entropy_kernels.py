"""Cross entropy of classes: one kernel reads the logits for the loss, one reads them again for the gradient.

Nothing of the size of the logits is kept, which is what a large vocabulary costs.
"""

from __future__ import annotations

from typing import Any

from ddp._cuda.raw_kernel import KernelSource, wide
from ddp.ops.arrays import Array
from ddp.ops.op import Gradients, Needs, Saved

# A block takes a row. loss = w[t] * (1 - s) * (log Z - x[t]) + s/n * (sum(w) * log Z - sum(w * x)), s: the smoothing
# dx = g * (w[t] * (1 - s) * (p - 1[t]) + s/n * (sum(w) * p - w)), p = exp(x - top) / sum
# A loss near 0 is the difference of large numbers: the logarithm is taken in float64, one a row.
ENTROPY = KernelSource(
    "entropy",
    """
// The largest of some numbers, and the sum of exp(x - largest): in one pass, since a larger one only scales the sum.
struct Exponentials {
    A top, sum;

    __device__ void add(A v) {
        if (v > top) {
            sum = sum * exp(top - v) + 1;
            top = v;
        } else if (v > LOWEST || v != v) {
            sum += exp(v - top);
        }
    }
    static __device__ Exponentials join(Exponentials a, Exponentials b) {
        if (b.top > a.top) {
            Exponentials c = a;
            a = b;
            b = c;
        }
        // The one without numbers adds nothing but its nans.
        a.sum += b.top > LOWEST ? b.sum * exp(b.top - a.top) : b.sum;
        return a;
    }
};

// mass: the sum of the weights, null for n
extern "C" __global__ void entropy(
    const T* xs, const Index* targets, const bool* keep, const A* weight, double* losses, A* weights, A* tops, A* sums,
    Index rows, Index n, const A* masses, double smoothing
) {
    double mass = masses ? (double)masses[0] : (double)n;
    FOR_ROWS(r, rows) {
        const T* x = xs + r * n;
        Exponentials found = {LOWEST, 0};
#pragma unroll 4
        for (Index i = threadIdx.x; i < n; i += blockDim.x) found.add(A(x[i]));
        found = Block::reduce(found, Exponentials::join);
        found.sum += found.top - found.top;  // nan where the largest is infinite, or all is -inf
        A even = 0;
        if (smoothing) {
            for (Index i = threadIdx.x; i < n; i += blockDim.x) even += weight ? weight[i] * A(x[i]) : A(x[i]);
            even = Block::sum(even);
        }
        if (threadIdx.x) continue;
        bool kept = !keep || keep[r];
        Index target = kept ? targets[r] : 0;
        double whole = log((double)found.sum) + (double)found.top, w = weight ? (double)weight[target] : 1.0;
        double loss = w * (1 - smoothing) * (whole - (double)A(x[target]));
        if (smoothing) loss += smoothing / n * (whole * mass - (double)even);
        losses[r] = kept ? loss : 0.0;  // whatever the logits there are
        if (weights) weights[r] = kept ? A(w) : A(0);
        tops[r] = found.top;
        sums[r] = found.sum;
    }
}

// The sum of the losses or their weighted mean, and the factor of a gradient that follows; by one block.
extern "C" __global__ void entropy_total(
    const double* losses, const A* weights, T* narrow, A* single, A* scale, Index rows, Index mean
) {
    struct Pair {
        double loss, weight;
    } found = {0, 0};
#pragma unroll 4
    for (Index r = threadIdx.x; r < rows; r += blockDim.x) {
        found.loss += losses[r];
        found.weight += weights ? (double)weights[r] : 1.0;
    }
    found = Block::reduce(found, [](Pair a, Pair b) { return Pair{a.loss + b.loss, a.weight + b.weight}; });
    if (threadIdx.x) return;
    double out = mean ? found.loss / found.weight : found.loss;  // nothing has no mean
    if (single) *single = A(out);
    else *narrow = T(A(out));
    *scale = mean ? A(1 / found.weight) : A(1);
}

// g: the gradient of the loss, in T or in A, of each row if `reduced` is 0; scale: null then
extern "C" __global__ void entropy_backward(
    const T* xs, const T* narrow, const A* single, Index reduced, const A* scale, const Index* target,
    const bool* keep, const A* weight, const A* weights, const A* tops, const A* sums, T* dxs, Index rows, Index n,
    const A* masses, double smoothing
) {
    A mass = masses ? masses[0] : A(n);
    FOR_ROWS(r, rows) {
        const T* x = xs + r * n;
        T* dx = dxs + r * n;
        bool kept = !keep || keep[r];
        Index right = kept ? target[r] : 0, at = reduced ? 0 : r;
        A g = single ? single[at] : A(narrow[at]);
        if (scale) g *= *scale;
        A one = g * (weights ? weights[r] : A(1)) * A(1 - smoothing), even = g * A(smoothing / n);
        A top = tops[r], part = 1 / sums[r];
#pragma unroll 4
        for (Index i = threadIdx.x; i < n; i += blockDim.x) {
            A p = exp(A(x[i]) - top) * part;
            A d = one * (i == right ? p - 1 : p);
            if (smoothing) d += even * (p * mass - (weight ? weight[i] : A(1)));
            dx[i] = T(kept ? d : A(0));
        }
    }
}
""",
)


def _as_rows(xp: Any, x: Array) -> Array:
    """The logits (N, C, ...) with classes last, (rows, C): a copy where there are axes behind the classes."""
    return xp.ascontiguousarray(xp.moveaxis(x, 1, -1)).reshape(-1, x.shape[1])


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
    """As `losses.cross_entropy`. Nothing else writes to the targets: they were copied when they were checked."""
    kind, logits = wide(x.dtype), _as_rows(xp, x)
    rows, n = logits.shape
    target = xp.ascontiguousarray(target, "int64")
    keep = None if keep is None else xp.ascontiguousarray(keep, bool)
    weight = None if weight is None else xp.array(weight, kind, order="C")  # its owner may write to it before backward
    losses, scale = xp.ndarray(rows, "float64"), xp.ndarray(1, kind)
    tops, sums = xp.ndarray(rows, kind), xp.ndarray(rows, kind)
    weights = None if keep is None and weight is None else xp.ndarray(rows, kind)
    mass = None if weight is None else weight.sum(keepdims=True)  # an array: the host need not wait for it
    arrays = logits, target, keep, weight, losses, weights, tops, sums
    ENTROPY.rows(xp, "entropy", x.dtype, rows if n else 0, *arrays, rows, n, mass, float(smoothing))
    to = "float32" if single else x.dtype
    residual = target, keep, weight, weights, tops, sums, mass, smoothing
    if reduction == "none":
        return losses.astype(kind).astype(to).reshape(target.shape), (None, *residual)
    out, mean = xp.ndarray((), to), reduction == "mean"
    ENTROPY.rows(xp, "entropy_total", x.dtype, 1, losses, weights, *_either(out, x), scale, rows, mean)
    return out, (scale, *residual)


def cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    scale, target, keep, weight, weights, tops, sums, mass, smoothing = residual
    x = saved[0]
    logits = _as_rows(xp, x)
    rows, n = logits.shape
    dx = xp.ndarray(logits.shape, x.dtype)
    g = xp.ascontiguousarray(g)
    arrays = logits, *_either(g, x), scale is not None, scale, target, keep, weight, weights, tops, sums, dx
    ENTROPY.rows(xp, "entropy_backward", x.dtype, rows if n else 0, *arrays, rows, n, mass, float(smoothing))
    shape = x.shape[0], *x.shape[2:], n
    return (xp.moveaxis(dx.reshape(shape), -1, 1),)


def _either(array: Array, x: Array) -> tuple[Array | None, Array | None]:
    """As the kernels take what is of x's dtype or of the one that they compute in."""
    return (array, None) if array.dtype == x.dtype else (None, array)
