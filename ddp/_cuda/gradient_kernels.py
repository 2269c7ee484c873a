"""Gradients held within bounds, and unscaled: one launch for all of them, and nothing that the host would wait for.

The norm of all gradients is one launch, too: each block leaves a sum, and the block that comes last adds these up in
their order. So the result does not depend on which block that was.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp._cuda import array_table
from ddp._cuda.raw_kernel import FLOATING, KernelSource, wide
from ddp._device import capturing
from ddp.ops.op import Array

_BLOCKS = 1024  # of a norm

GRADIENTS = KernelSource(
    "clipping",
    array_table.TABLE_SOURCE
    + """
enum { ONE = 1, TWO, LARGEST, ANY };  // norms

static __device__ A larger(A a, A b) { return a > b || a != a ? a : b; }  // a nan stays

static __device__ A size_of(A x, Index kind, A order) {
    if (kind == TWO) return x * x;
    x = x < 0 ? -x : x;
    return kind == ANY ? pow(x, order) : x;
}

// The sum over blocks and rows of |x|^order, or the largest |x|; with `root`, the norm.
// partials: one a block; arrived: 0 before and after. A sum is written before its block arrives; so who arrives last
// sees all of them.
extern "C" __global__ void total_norm(
    const Index* rows, const Index* chunks, Index count, Index chunk, A* partials, int* arrived, A* total, Index kind,
    double order, Index root
) {
    __shared__ bool last;
    A own = 0;
    for (Index c = blockIdx.x; c < count; c += gridDim.x) {
        const Index* row = rows + chunks[c] * ROW;
        if (kind == LARGEST) {
            each(row, Part(row, c, chunk), [&](A x) { own = larger(x < 0 ? -x : x, own); });
        } else {
            each(row, Part(row, c, chunk), [&](A x) { own += size_of(x, kind, A(order)); });
        }
    }
    own = kind == LARGEST ? Block::max(own) : Block::sum(own);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = own;
        __threadfence();
        last = atomicAdd(arrived, 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    own = 0;
    for (Index b = threadIdx.x; b < gridDim.x; b += blockDim.x) {
        A other = ((volatile A*)partials)[b];
        own = kind == LARGEST ? larger(other, own) : own + other;
    }
    own = kind == LARGEST ? Block::max(own) : Block::sum(own);
    if (threadIdx.x) return;
    *total = !root ? own : kind == TWO ? sqrt(own) : kind == ANY ? pow(own, 1 / A(order)) : own;
    *arrived = 0;
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

// x = min(max(x, -bound), bound)
extern "C" __global__ void clamp(const Index* rows, const Index* chunks, Index count, Index chunk, double bound) {
    A most = A(bound);
    for (Index c = blockIdx.x; c < count; c += gridDim.x) {
        const Index* row = rows + chunks[c] * ROW;
        replace(row, Part(row, c, chunk), [=](A x) { return x < -most ? -most : x > most ? most : x; });
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
_scratch: dict[Any, tuple[Array, Array]] = {}
_lock = threading.Lock()


def total_norm(xp: Any, gradients: Sequence[Array], order: float, root: bool = True) -> Array:
    """The norm of all gradients as one vector: 0-d, float32, or float64 if one of them is. root: else without it"""
    dtypes = {g.dtype for g in gradients}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float64 if _DOUBLE in dtypes else np.float32)
    # Copies live until the launch.
    dense = [_dense(xp, g if g.dtype == dtype else g.astype(dtype)) for g in gradients]
    table = _tables.of(xp, dtype, dense)
    partials, arrived = _scratch_of(xp, wide(dtype))
    total = xp.empty((), wide(dtype))
    kind = {1.0: 1, 2.0: 2, math.inf: 3}.get(order, 4)
    arguments = *table.arguments, partials, arrived, total, kind, float(order), root
    GRADIENTS.rows(xp, "total_norm", dtype, min(max(table.count, 1), _BLOCKS), *arguments)
    return total


def scale_to_norm(xp: Any, gradients: Sequence[Array], total: Array, largest: float) -> None:
    """Scales the gradients so that their norm, `total` now, is at most `largest`. total: on the device, one number"""
    if total.dtype not in (_SINGLE, _DOUBLE):
        total = total.astype(_SINGLE)
    norms = (total, None) if total.dtype == _SINGLE else (None, total)
    _replace(xp, "shrink", gradients, *norms, float(largest))


def clamp_values(xp: Any, gradients: Sequence[Array], bound: float) -> None:
    """Holds the gradients within [-bound, bound]."""
    _replace(xp, "clamp", gradients, float(bound))


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


def _scratch_of(xp: Any, dtype: Any) -> tuple[Array, Array]:
    """A number a block, and the count of blocks that arrived: one a stream, as two norms at once would mix theirs."""
    if capturing.now is not None:
        made = xp.empty(_BLOCKS, dtype), xp.zeros(1, np.int32)
        capturing.now.keep(made)
        return made
    key = array_table.stream_key(xp), dtype.char
    with _lock:
        if key not in _scratch:
            _scratch[key] = xp.empty(_BLOCKS, dtype), xp.zeros(1, np.int32)
        return _scratch[key]
