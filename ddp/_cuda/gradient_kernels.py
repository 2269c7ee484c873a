"""Kernels over many gradients: their norm, clipping, unscaling, and the update of a GradScaler's scale.

One launch works on all gradients of a dtype. A norm of an order other than 2 takes several launches for each gradient.
Further launches copy gradients that have gaps in memory or, for a norm, another dtype. The host never waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp._cuda import array_table
from ddp._cuda.raw_kernel import FLOATING, KernelSource
from ddp.ops.arrays import Array, compute_dtype
from ddp.ops.shape import concatenate

# Maximum number of blocks of `norm_parts`.
_BLOCKS = 1024

_SINGLE = np.dtype(np.float32)
_DOUBLE = np.dtype(np.float64)

GRADIENTS = KernelSource(
    "clipping",
    array_table.TABLE_SOURCE
    + """
// The sum of squares of each block.
extern "C" __global__ void norm_parts(const Index* rows, const Index* chunks, Index count, Index chunk, A* parts) {
    A sum = 0;
    for (Index c = blockIdx.x; c < count; c += gridDim.x) {
        const Index* row = rows + chunks[c] * ROW;
        for_each(row, Part(row, c, chunk), [&](A x) { sum += x * x; });
    }
    sum = Block::sum(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// x *= max_norm / (norm + 1e-6), if that factor is below 1. The norm is in float or in double; the other is null.
extern "C" __global__ void clip(
    const Index* rows, const Index* chunks, Index count, Index chunk, const float* narrow, const double* wide,
    double max_norm
) {
    A factor = A(max_norm) / ((narrow ? A(*narrow) : A(*wide)) + A(1e-6));
    if (factor >= 1) return;
    for (Index c = blockIdx.x; c < count; c += gridDim.x) {
        const Index* row = rows + chunks[c] * ROW;
        replace(row, Part(row, c, chunk), [=](A x) { return x * factor; });
    }
}

// x /= scale;  found_inf = 1 if an x was infinite or nan
extern "C" __global__ void unscale(
    const Index* rows, const Index* chunks, Index count, Index chunk, const float* scale, float* found_inf
) {
    A factor = 1 / A(*scale);
    bool finite = true;
    for (Index c = blockIdx.x; c < count; c += gridDim.x) {
        const Index* row = rows + chunks[c] * ROW;
        replace(row, Part(row, c, chunk), [&](A x) {
            finite = finite && x - x == 0;
            return x * factor;
        });
    }
    if (!finite) *found_inf = 1;  // threads may race, but write the same value
}

// Multiplies the scale by `backoff` if a step was skipped, by `growth` after `interval` steps without a skip.
extern "C" __global__ void update_scale(
    float* scale, int* growth_tracker, float* found_infs, Index count, double growth, double backoff, Index interval
) {
    if (blockIdx.x || threadIdx.x) return;
    bool skipped = false;
    for (Index i = 0; i < count; i++) {
        skipped = skipped || found_infs[i] != 0;
        found_infs[i] = 0;
    }
    int steps = skipped ? 0 : *growth_tracker + 1;
    float next = *scale;
    if (skipped) next *= float(backoff);
    else if (steps == interval) next *= float(growth);
    if (next - next == 0) *scale = next;  // if finite
    *growth_tracker = steps == interval ? 0 : steps;
}
""",
    FLOATING,
)

_tables = array_table.TableCache()


def total_norm(xp: Any, gradients: Sequence[Array], order: float, root: bool = True) -> Array:
    """The norm of the vector of all gradients, as a 0-d array.

    Gradients of different dtypes are converted: to float64 if one of them is float64, else to float32.
    root: False: returns the sum of powers, without the root. For order inf: the maximum, in both cases
    """
    dtypes = {g.dtype for g in gradients}
    common = np.float64 if _DOUBLE in dtypes else np.float32
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(common)
    if order != 2:
        magnitudes = [xp.abs(g.astype(compute_dtype(dtype), copy=False)) for g in gradients if g.size]
        norms = [x.max() if order == math.inf else (x**order).sum() for x in magnitudes]
        joined = concatenate(xp, [x.reshape(1) for x in norms] or [xp.zeros(1, compute_dtype(dtype))], 0)
        if order == math.inf:
            return joined.max()
        total = joined.sum()
        return total ** (1 / order) if root else total
    # The table holds addresses alone: this list keeps copies alive until the launch.
    dense = [_dense(xp, g if g.dtype == dtype else g.astype(dtype)) for g in gradients]
    table = _tables.of(xp, dtype, dense)
    # Zeros, because the GPU emulation of the tests may run fewer blocks.
    parts = xp.zeros(max(1, min(table.count, _BLOCKS)), compute_dtype(dtype))
    GRADIENTS.launch_rows(xp, "norm_parts", dtype, min(table.count, _BLOCKS), *table.arguments, parts)
    total = parts.sum()
    return xp.sqrt(total) if root else total


def scale_to_norm(xp: Any, gradients: Sequence[Array], total: Array, max_norm: float) -> None:
    """Scales the gradients, in place, so that their norm is at most `max_norm`. total: their norm, one number"""
    total = xp.asarray(total, total.dtype if total.dtype in (_SINGLE, _DOUBLE) else _SINGLE)
    norms = (total, None) if total.dtype == _SINGLE else (None, total)
    _replace(xp, "clip", gradients, *norms, float(max_norm))


def unscale(xp: Any, gradients: Sequence[Array], scale: Array, found_inf: Array) -> None:
    """Divides the gradients by `scale`, in place. Sets `found_inf` to 1 if an element is not finite.

    scale, found_inf: one float32
    """
    _replace(xp, "unscale", gradients, scale, found_inf)


def update_scale(
    xp: Any, scale: Array, growth_tracker: Array, found_infs: Array, growth: float, backoff: float, interval: int
) -> None:
    """Updates the scale after a step, and sets `found_infs` to 0.

    scale, found_infs: float32; growth_tracker: int32, the number of steps since the scale last grew or a step was last
    skipped
    """
    numbers = (float(growth), float(backoff), interval)
    GRADIENTS.launch_rows(xp, "update_scale", _SINGLE, 1, scale, growth_tracker, found_infs, found_infs.size, *numbers)


def _replace(xp: Any, entry: str, gradients: Sequence[Array], *arguments: Any) -> None:
    """Launches a kernel that changes gradients in place, once for each dtype."""
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        of_dtype = [g for g in gradients if g.dtype == dtype]
        dense = [_dense(xp, g) for g in of_dtype]
        table = _tables.of(xp, dtype, dense)
        GRADIENTS.launch_rows(xp, entry, dtype, table.count, *table.arguments, *arguments)
        for g, changed in zip(of_dtype, dense, strict=True):
            if changed is not g:
                g[...] = changed


def _dense(xp: Any, g: Array) -> Array:
    """`g`, or a copy if its memory has gaps."""
    return g if g.flags.c_contiguous or array_table.dense_order(g) is not None else xp.ascontiguousarray(g)
