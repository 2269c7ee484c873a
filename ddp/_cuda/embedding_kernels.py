"""The gradient of an embedding: sums of rows in a fixed order, so that every run gives the same bits.

Each block owns some rows and columns of the table, and no other block writes there. The block scans all indices for
lookups of its rows, sorts these by row and position in shared memory, and sums the gradients of each row. It also
writes the zeros of rows that no index names. Every block reads all indices, mostly from the cache: for usual numbers of
indices that is faster than to sort all indices first. Sums of 16-bit gradients are computed in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._cuda.raw_kernel import REAL, KernelSource
from ddp._engine.grad_buffer import AccumulateInto
from ddp.ops import indexing
from ddp.ops.arrays import Array
from ddp.ops.op import Gradients, Needs, Saved

# The low bits of a row's number are its bucket. A block collects the lookups of one bucket. Before there are more than
# `room` of them, it sorts them, adds their sums to `out`, and collects anew. So each partial sum is rounded to T.
EMBEDDING = KernelSource(
    "looking",
    """
typedef unsigned long long Key;  // upper half: number of the row within its bucket; lower half: position of the index
#define ROOM 2048

// Sorts the first `count` keys (bitonic sort). Overwrites the keys behind them, up to the next power of two.
__device__ inline void sort(Key* keys, unsigned count) {
    unsigned size = 1;
    while (size < count) size *= 2;
    for (unsigned i = count + threadIdx.x; i < size; i += blockDim.x) keys[i] = ~0ull;
    __syncthreads();
    for (unsigned k = 2; k <= size; k *= 2) {
        for (unsigned j = k / 2; j; j /= 2) {
            for (unsigned i = threadIdx.x; i < size; i += blockDim.x) {
                if ((i ^ j) < i) continue;
                Key one = keys[i], two = keys[i ^ j];
                if ((one > two) == ((i & k) == 0)) {
                    keys[i] = two;
                    keys[i ^ j] = one;
                }
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void add_in_order(
    const T* g, const Index* indices, T* out, Index n, Index length, Index width, Index threads_per_row,
    Index tiles, Index shift, Index room, Index skipped, Index accumulate
) {
    __shared__ Key keys[ROOM];
    __shared__ unsigned count;
    if (threads_per_row > blockDim.x) threads_per_row = blockDim.x;
    int teams = blockDim.x / threads_per_row;  // each works on one row
    int member = threadIdx.x % threads_per_row, team = threadIdx.x / threads_per_row;
    Index buckets = 1ll << shift, span = blockDim.x * (room < 8 * blockDim.x ? 1 : 4);
    for (Index block = blockIdx.x; block < buckets * tiles; block += gridDim.x) {
        Index bucket = block & (buckets - 1), begin = (block >> shift) * threads_per_row + member;
        Index step = tiles * threads_per_row;
        if (!accumulate && team < teams) {
            for (Index row = bucket + team * buckets; row < length; row += teams * buckets) {
                for (Index k = begin; k < width; k += step) out[row * width + k] = T(A(0));
            }
        }
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        for (Index from = 0; from < n; from += span) {
            for (Index i = from + threadIdx.x; i < from + span && i < n; i += blockDim.x) {
                Index row = indices[i];
                if ((row & (buckets - 1)) == bucket && row != skipped) {
                    keys[atomicAdd(&count, 1u)] = (Key)(row >> shift) << 32 | (Key)i;
                }
            }
            __syncthreads();
            unsigned lookups = count;
            __syncthreads();
            if (lookups == 0 || (lookups + span <= room && from + span < n)) continue;
            sort(keys, lookups);  // atomicAdd gave them in any order
            for (unsigned e = team; e < lookups && team < teams; e += teams) {
                unsigned number = (unsigned)(keys[e] >> 32), stop = e + 1;
                if (e && (unsigned)(keys[e - 1] >> 32) == number) continue;
                while (stop < lookups && (unsigned)(keys[stop] >> 32) == number) stop++;
                Index row = ((Index)number << shift) + bucket;
                for (Index k = begin; k < width; k += step) {
                    A sum = 0;
#pragma unroll 4
                    for (unsigned i = e; i < stop; i++) sum += A(g[(Index)(unsigned)keys[i] * width + k]);
                    out[row * width + k] = T(A(out[row * width + k]) + sum);
                }
            }
            __syncthreads();
            if (threadIdx.x == 0) count = 0;
            __syncthreads();
        }
    }
}
""",
)

# Maximum number of lookups that a block sorts at once; the same as in the source above.
ROOM = 2048

# Maximum number of blocks of a launch. The limit is low because each block reads all indices.
_BLOCKS = 1024

# Maximum number of threads of a block that sum one row.
_THREADS_PER_ROW = 64

# Maximum number of columns that each of these threads sums. Wider tables are divided into tiles.
_COLUMNS_PER_THREAD = 8


def add_rows_in_order(
    xp: Any, indices: Array, g: Array, out: Array, accumulate: bool, skipped: int | None = None
) -> None:
    """Writes to each row i of `out` the sum of the rows of `g` whose index is i.

    indices: (N,); g: (N, D); out: (V, D), contiguous
    accumulate: adds the sums to the values of `out`; skipped: an index to ignore
    """
    n, width = g.shape
    length = len(out)
    indices = xp.ascontiguousarray(indices, "int64")
    threads_per_row = min(_THREADS_PER_ROW, 1 << max(0, width - 1).bit_length())
    tiles = max(1, -(-width // (_COLUMNS_PER_THREAD * threads_per_row)))
    shift = max(1, min(max(1, _BLOCKS // tiles), length)).bit_length() - 1
    numbers = (n, length, width, threads_per_row, tiles, shift, ROOM, -1 if skipped is None else skipped, accumulate)
    blocks = (1 << shift) * tiles if out.size else 0
    EMBEDDING.launch_rows(xp, "add_in_order", g.dtype, blocks, xp.ascontiguousarray(g), indices, out, *numbers)


# `add_rows` and `add_flat` use CuPy's atomic additions, so the order, and with it the last bits, varies between runs.


def _atomic_dtype(dtype: Any) -> Any:
    """The dtype to add in: float32, float64 or uint64, because CuPy's atomic additions take these.

    Sums of signed integers have the same bits in uint64.
    """
    if dtype.kind in "biu":
        return np.dtype("uint64")
    return dtype if dtype.name in REAL else np.dtype("float32")


def _sums(xp: Any, x: Array, indices: Array, g: Array) -> Array:
    """x[indices] += g, in place if x has the dtype to add in. Returns x, or a copy of x in that dtype."""
    dtype = _atomic_dtype(x.dtype)
    sums = x if x.dtype == dtype else x.astype(dtype)
    xp.add.at(sums, indices, g.astype(dtype, copy=False))
    return sums


def add_rows(xp: Any, indices: Array, g: Array, out: Array) -> None:
    """Adds each row g[i] to out[indices[i]]. g: (N, D), out: (M, D)"""
    sums = _sums(xp, out, indices, g)
    if sums is not out:
        out[...] = sums


def add_flat(xp: Any, x: Array, indices: Array, g: Array) -> Array:
    """x[indices] += g for a vector x, in place if possible; repeated indices add up. indices: of g's shape"""
    sums = _sums(xp, x, indices.reshape(-1), g.reshape(-1))
    return sums if sums is x else sums.astype(x.dtype)


def embedding(xp: Any, w: Array, index: Array, padding: int | None, by_frequency: bool) -> tuple[Array, Any]:
    return xp.take(w, index, axis=0), (w.shape, index, padding, by_frequency)


def embedding_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, grad_outs: Saved = (None,)
) -> Gradients:
    shape, index, padding, by_frequency = residual
    if by_frequency or not EMBEDDING.takes(g.dtype) or index.size >= 1 << 31:
        return indexing.embedding.backward(xp, g, needs, saved, residual)
    dw = grad_outs[0]
    accumulate = isinstance(dw, AccumulateInto)
    if accumulate:
        dw = dw.array
    if dw is None or dw.dtype != g.dtype or not dw.flags.c_contiguous:
        dw = xp.empty(shape, g.dtype)
        accumulate = False
    add_rows_in_order(xp, index.reshape(-1), g.reshape(index.size, shape[1]), dw, accumulate, padding)
    return (dw,)
