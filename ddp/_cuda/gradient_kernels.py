"""Gradients clipped by their norm, and unscaled: one launch for all of them, and nothing that the host would wait for.

The 2-norm of all gradients is one launch, whose blocks leave a sum each, and CuPy's sum of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp._cuda import array_table
from ddp._cuda.raw_kernel import FLOATING, KernelSource, wide
from ddp.ops.arrays import Array
from ddp.ops.shape import concatenate

_BLOCKS = 1024  # of a norm

GRADIENTS = KernelSource(
    "clipping",
    array_table.TABLE_SOURCE
    + """
// Of each block: the sum of squares.
extern "C" __global__ void norm_parts(const Index* rows, const Index* chunks, Index count, Index chunk, A* parts) {
    A own = 0;
    for (Index c = blockIdx.x; c < count; c += gridDim.x) {
        const Index* row = rows + chunks[c] * ROW;
        each(row, Part(row, c, chunk), [&](A x) { own += x * x; });
    }
    own = Block::sum(own);
    if (threadIdx.x == 0) parts[blockIdx.x] = own;
}

// x *= largest / (norm + 1e-6), where that is below 1. One of the norms is null.
extern "C" __global__ void shrink(
    const Index* rows, const Index* chunks, Index count, Index chunk, const float* narrow, const double* wide,
    double largest
) {
    A factor = A(largest) / ((narrow ? A(*narrow) : A(*wide)) + A(1e-6));
    if (factor >= 1) return;
    for (Index c = blockIdx.x; c < count; c += gridDim.x) {
        const Index* row = rows + chunks[c] * ROW;
        replace(row, Part(row, c, chunk), [=](A x) { return x * factor; });
    }
}

// x /= scale;  found = 1 where an x was infinite or nan
extern "C" __global__ void unscale(
    const Index* rows, const Index* chunks, Index count, Index chunk, const float* scale, float* found
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
    if (!finite) *found = 1;  // whoever writes writes the same
}

// After the steps: the scale shrinks if one of them was left out, and grows after `interval` that were not.
extern "C" __global__ void adapt(
    float* scale, int* good, float* founds, Index count, double growth, double backoff, Index interval
) {
    if (blockIdx.x || threadIdx.x) return;
    bool any = false;
    for (Index i = 0; i < count; i++) {
        any = any || founds[i] != 0;
        founds[i] = 0;
    }
    int now = any ? 0 : *good + 1;
    float next = any ? *scale * float(backoff) : now == interval ? *scale * float(growth) : *scale;
    if (next - next == 0) *scale = next;
    *good = now == interval ? 0 : now;
}
""",
    FLOATING,
)

_tables = array_table.TableCache()


def total_norm(xp: Any, gradients: Sequence[Array], order: float, root: bool = True) -> Array:
    """The norm of all gradients as one vector: 0-d, float32, or float64 if one of them is. root: else without it"""
    dtypes = {g.dtype for g in gradients}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float64 if _DOUBLE in dtypes else np.float32)
    if order != 2:
        sizes = [xp.abs(g.astype(wide(dtype), copy=False)) for g in gradients if g.size]
        norms = [x.max() if order == math.inf else (x**order).sum() for x in sizes]
        joined = concatenate(xp, [x.reshape(1) for x in norms] or [xp.zeros(1, wide(dtype))], 0)
        if order == math.inf:
            return joined.max()
        total = joined.sum()
        return total ** (1 / order) if root else total
    # Copies live until the launch.
    dense = [_dense(xp, g if g.dtype == dtype else g.astype(dtype)) for g in gradients]
    table = _tables.of(xp, dtype, dense)
    # A block that the emulation leaves out adds nothing.
    parts = xp.zeros(max(1, min(table.count, _BLOCKS)), wide(dtype))
    GRADIENTS.rows(xp, "norm_parts", dtype, min(table.count, _BLOCKS), *table.arguments, parts)
    total = parts.sum()
    return xp.sqrt(total) if root else total


def scale_to_norm(xp: Any, gradients: Sequence[Array], total: Array, largest: float) -> None:
    """Scales the gradients so that their norm, `total` now, is at most `largest`. total: on the device, one number"""
    total = xp.asarray(total, total.dtype if total.dtype in (_SINGLE, _DOUBLE) else _SINGLE)
    norms = (total, None) if total.dtype == _SINGLE else (None, total)
    _replace(xp, "shrink", gradients, *norms, float(largest))


def unscale(xp: Any, gradients: Sequence[Array], scale: Array, found: Array) -> None:
    """Divides the gradients by `scale`; found becomes 1 if one was not finite. Both: one float32 on the device"""
    _replace(xp, "unscale", gradients, scale, found)


def update_scale(
    xp: Any, scale: Array, good: Array, founds: Array, growth: float, backoff: float, interval: int
) -> None:
    """What follows for the scale from what was found; `founds` is zero afterwards. good: one int32"""
    numbers = float(growth), float(backoff), interval
    GRADIENTS.rows(xp, "adapt", _SINGLE, 1, scale, good, founds, founds.size, *numbers)


_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


def _replace(xp: Any, entry: str, gradients: Sequence[Array], *arguments: Any) -> None:
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        own = [g for g in gradients if g.dtype == dtype]
        dense = [_dense(xp, g) for g in own]
        table = _tables.of(xp, dtype, dense)
        GRADIENTS.rows(xp, entry, dtype, table.count, *table.arguments, *arguments)
        for g, changed in zip(own, dense, strict=True):
            if changed is not g:
                g[...] = changed


def _dense(xp: Any, g: Array) -> Array:
    """`g`, or a copy of one with gaps."""
    return g if g.flags.c_contiguous or array_table.dense_order(g) is not None else xp.ascontiguousarray(g)
