"""Cross entropy with class indices: one kernel reads the logits for the loss, another reads them for the gradient.

Between the two, no further array of the size of the logits is kept: with a large vocabulary, such an array would take
most of the memory.
"""

from __future__ import annotations

from typing import Any

from ddp._cuda.raw_kernel import KernelSource, parameter_arguments
from ddp.ops.arrays import Array, compute_dtype
from ddp.ops.op import Gradients, Needs, Saved

# A block computes a row of n logits x, for target t, class weights w and smoothing s:
#   loss = w[t] * (1 - s) * (log Z - x[t]) + s/n * (sum(w) * log Z - sum(w * x)),  Z = sum(exp(x))
#   dx = g * (w[t] * (1 - s) * (p - 1[t]) + s/n * (sum(w) * p - w)),  p = exp(x - max) / sum(exp(x - max))
# A loss near 0 is the difference of two large numbers, so log Z is computed in float64.
ENTROPY = KernelSource(
    "entropy",
    """
// The maximum of numbers v, and the sum of exp(v - maximum), in one pass: a new maximum scales the sum.
struct Exponentials {
    A max, sum;

    __device__ void add(A v) {
        if (v > max) {
            sum = sum * exp(max - v) + 1;
            max = v;
        } else if (v > LOWEST || v != v) {
            sum += exp(v - max);
        }
    }
    static __device__ Exponentials join(Exponentials a, Exponentials b) {
        if (b.max > a.max) {
            Exponentials c = a;
            a = b;
            b = c;
        }
        // If b's maximum is -inf, it has no number that counts, and its sum is 0 or nan.
        a.sum += b.max > LOWEST ? b.sum * exp(b.max - a.max) : b.sum;
        return a;
    }
};

// keep: null, or which rows count; weight: null, or of each class; weights: null, or receives the weight of each row
// weight_sum: null for n
extern "C" __global__ void entropy(
    const T* xs, const Index* targets, const bool* keep, const A* weight, double* losses, A* weights, A* maxima,
    A* sums, Index rows, Index n, const A* weight_sum, double smoothing
) {
    double total_weight = weight_sum ? (double)weight_sum[0] : (double)n;
    FOR_ROWS(r, rows) {
        const T* x = xs + r * n;
        Exponentials row = {LOWEST, 0};
#pragma unroll 4
        for (Index i = threadIdx.x; i < n; i += blockDim.x) row.add(A(x[i]));
        row = Block::reduce(row, Exponentials::join);
        row.sum += row.max - row.max;  // nan if the maximum is infinite
        A weighted_logits = 0;
        if (smoothing) {
            for (Index i = threadIdx.x; i < n; i += blockDim.x) {
                weighted_logits += weight ? weight[i] * A(x[i]) : A(x[i]);
            }
            weighted_logits = Block::sum(weighted_logits);
        }
        if (threadIdx.x) continue;
        bool kept = !keep || keep[r];
        Index target = kept ? targets[r] : 0;
        double log_z = log((double)row.sum) + (double)row.max, w = weight ? (double)weight[target] : 1.0;
        double loss = w * (1 - smoothing) * (log_z - (double)A(x[target]));
        if (smoothing) loss += smoothing / n * (log_z * total_weight - (double)weighted_logits);
        losses[r] = kept ? loss : 0.0;
        if (weights) weights[r] = kept ? A(w) : A(0);
        maxima[r] = row.max;
        sums[r] = row.sum;
    }
}

// The sum or the weighted mean of the losses, in T or in A, and the factor of gradients in backward. One block.
extern "C" __global__ void entropy_total(
    const double* losses, const A* weights, T* narrow, A* wide, A* scale, Index rows, Index mean
) {
    struct Pair {
        double loss, weight;
    } total = {0, 0};
#pragma unroll 4
    for (Index r = threadIdx.x; r < rows; r += blockDim.x) {
        total.loss += losses[r];
        total.weight += weights ? (double)weights[r] : 1.0;
    }
    total = Block::reduce(total, [](Pair a, Pair b) { return Pair{a.loss + b.loss, a.weight + b.weight}; });
    if (threadIdx.x) return;
    double out = mean ? total.loss / total.weight : total.loss;  // the mean of no rows is nan
    if (wide) *wide = A(out);
    else *narrow = T(A(out));
    *scale = mean ? A(1 / total.weight) : A(1);
}

// narrow, wide: the gradient of the loss in T or in A: one number if `reduced`, else one for each row, without scale
extern "C" __global__ void entropy_backward(
    const T* xs, const T* narrow, const A* wide, Index reduced, const A* scale, const Index* targets,
    const bool* keep, const A* weight, const A* weights, const A* maxima, const A* sums, T* dxs, Index rows, Index n,
    const A* weight_sum, double smoothing
) {
    A total_weight = weight_sum ? weight_sum[0] : A(n);
    FOR_ROWS(r, rows) {
        const T* x = xs + r * n;
        T* dx = dxs + r * n;
        bool kept = !keep || keep[r];
        Index target = kept ? targets[r] : 0, position = reduced ? 0 : r;
        A g = wide ? wide[position] : A(narrow[position]);
        if (scale) g *= *scale;
        A g_target = g * (weights ? weights[r] : A(1)) * A(1 - smoothing), g_smooth = g * A(smoothing / n);
        A max = maxima[r], inverse_sum = 1 / sums[r];
#pragma unroll 4
        for (Index i = threadIdx.x; i < n; i += blockDim.x) {
            A p = exp(A(x[i]) - max) * inverse_sum;
            A d = g_target * (i == target ? p - 1 : p);
            if (smoothing) d += g_smooth * (p * total_weight - (weight ? weight[i] : A(1)));
            dx[i] = T(kept ? d : A(0));
        }
    }
}
""",
)


def _as_rows(xp: Any, x: Array) -> Array:
    """The logits (N, C, ...) as (rows, C). A copy unless x has this order in memory."""
    return xp.ascontiguousarray(xp.moveaxis(x, 1, -1)).reshape(-1, x.shape[1])


def cross_entropy(
    xp: Any,
    x: Array,
    target: Array,
    keep: Array | None,
    weight: Array | None,
    smoothing: float,
    reduction: str,
    float32_loss: bool = False,
) -> tuple[Array, Any]:
    """See `losses.cross_entropy`. Backward reads `target` without a copy, because `check_targets` has copied it."""
    compute = compute_dtype(x.dtype)
    logits = _as_rows(xp, x)
    rows, n = logits.shape
    target = xp.ascontiguousarray(target, "int64")
    keep = None if keep is None else xp.ascontiguousarray(keep, bool)
    # A copy, because the caller may write to the weights before backward.
    weight = None if weight is None else xp.array(weight, compute, order="C")
    losses = xp.ndarray(rows, "float64")
    scale = xp.ndarray(1, compute)
    maxima = xp.ndarray(rows, compute)
    sums = xp.ndarray(rows, compute)
    weights = None if keep is None and weight is None else xp.ndarray(rows, compute)
    weight_sum = None if weight is None else weight.sum(keepdims=True)  # an array, so that the host does not wait
    arrays = (logits, target, keep, weight, losses, weights, maxima, sums)
    ENTROPY.launch_rows(xp, "entropy", x.dtype, rows if n else 0, *arrays, rows, n, weight_sum, float(smoothing))
    out_dtype = "float32" if float32_loss else x.dtype
    residual = (target, keep, weight, weights, maxima, sums, weight_sum, smoothing)
    if reduction == "none":
        return losses.astype(compute).astype(out_dtype).reshape(target.shape), (None, *residual)
    out = xp.ndarray((), out_dtype)
    mean = reduction == "mean"
    outs = (out, None) if out.dtype == x.dtype else (None, out)
    ENTROPY.launch_rows(xp, "entropy_total", x.dtype, 1, losses, weights, *outs, scale, rows, mean)
    return out, (scale, *residual)


def cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    scale, target, keep, weight, weights, maxima, sums, weight_sum, smoothing = residual
    x = saved[0]
    logits = _as_rows(xp, x)
    rows, n = logits.shape
    dx = xp.ndarray(logits.shape, x.dtype)
    arguments = (target, keep, weight, weights, maxima, sums, dx, rows, n, weight_sum, float(smoothing))
    gradient = (*parameter_arguments(xp, g, x.dtype, maxima.dtype), scale is not None, scale)
    ENTROPY.launch_rows(xp, "entropy_backward", x.dtype, rows if n else 0, logits, *gradient, *arguments)
    shape = (x.shape[0], *x.shape[2:], n)
    return (xp.moveaxis(dx.reshape(shape), -1, 1),)
