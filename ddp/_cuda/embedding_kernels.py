"""The gradient of a table: lookups added up in float32, in their order, with the same digits in every run.

The table's rows are dealt out to blocks, and its columns. A block looks through all the indices for those of its rows,
sorts these by row and place in shared memory, and adds up what belongs to each row: nobody else writes there. So the
table is written once, and where no index points, zeros: there is nothing to clear before. An index is read once for
every block, from a cache that holds all of them; few are worth a sort of them all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._cuda.raw_kernel import REAL, KernelSource
from ddp._engine.leaves import AccumulateInto
from ddp.ops import indexing
from ddp.ops.arrays import Array
from ddp.ops.op import Gradients, Needs, Saved

# Blocks have the rows whose last bits are theirs. room: how many lookups a block sorts at once; a sum of more than
# these is rounded in between, and goes on from there.
EMBEDDING = KernelSource(
    "looking",
    """
typedef unsigned long long Key;  // a row, of those of a block, and the place where it was looked up
#define ROOM 2048

// The first `count` keys in their order; behind them there is room up to a power of two.
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
    const T* g, const Index* where, T* out, Index n, Index length, Index width, Index lanes,
    Index tiles, Index shift, Index room, Index skipped, Index onto
) {
    __shared__ Key keys[ROOM];
    __shared__ unsigned count;
    if (lanes > blockDim.x) lanes = blockDim.x;
    int lines = blockDim.x / lanes, lane = threadIdx.x % lanes, line = threadIdx.x / lanes;
    Index buckets = 1ll << shift, span = blockDim.x * (room < 8 * blockDim.x ? 1 : 4);
    for (Index block = blockIdx.x; block < buckets * tiles; block += gridDim.x) {
        Index bucket = block & (buckets - 1), begin = (block >> shift) * lanes + lane;
        if (!onto && line < lines) {
            for (Index row = bucket + line * buckets; row < length; row += lines * buckets) {
                for (Index k = begin; k < width; k += tiles * lanes) out[row * width + k] = T(A(0));
            }
        }
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        for (Index from = 0; from < n; from += span) {
            for (Index i = from + threadIdx.x; i < from + span && i < n; i += blockDim.x) {
                Index row = where[i];
                if ((row & (buckets - 1)) == bucket && row != skipped) {
                    keys[atomicAdd(&count, 1u)] = (Key)(row >> shift) << 32 | (Key)i;
                }
            }
            __syncthreads();
            unsigned found = count;
            __syncthreads();
            if (found == 0 || (found + span <= room && from + span < n)) continue;
            sort(keys, found);  // so that the order of atomic additions does not matter
            for (unsigned e = line; e < found && line < lines; e += lines) {
                unsigned which = (unsigned)(keys[e] >> 32), stop = e + 1;
                if (e && (unsigned)(keys[e - 1] >> 32) == which) continue;
                while (stop < found && (unsigned)(keys[stop] >> 32) == which) stop++;
                Index row = ((Index)which << shift) + bucket;
                for (Index k = begin; k < width; k += tiles * lanes) {
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

ROOM = 2048  # as in the source
_BLOCKS = 1024  # at most: they look through all indices
_LANES = 64  # threads at most that add up a row together
_CYCLES = 8  # columns of a row for each of them


def add_rows_in_order(xp: Any, where: Array, g: Array, out: Array, onto: bool, skipped: int | None = None) -> None:
    """Writes to `out` (V, D) what rows of `g` (N, D) there are for each of its rows; adds it, with `onto`.

    out: in one piece; skipped: a row that gets nothing
    """
    (n, width), length, where = g.shape, len(out), xp.ascontiguousarray(where, "int64")
    lanes = min(_LANES, 1 << max(0, width - 1).bit_length())  # threads that share a row, and how often they take turns
    tiles = max(1, -(-width // (_CYCLES * lanes)))
    shift = max(1, min(max(1, _BLOCKS // tiles), length)).bit_length() - 1
    numbers = n, length, width, lanes, tiles, shift, ROOM, -1 if skipped is None else skipped, onto
    blocks = (1 << shift) * tiles if out.size else 0
    EMBEDDING.rows(xp, "add_in_order", g.dtype, blocks, xp.ascontiguousarray(g), where, out, *numbers)


# Rows added up where an index says, by CuPy's atomic additions: their order, and the last digits, vary by the run.


def _summed_in(dtype: Any) -> Any:
    """The dtype to add up in: CuPy adds to uint64, where sums wrap as they do with a sign, and to float32 and 64."""
    if dtype.kind in "biu":
        return np.dtype("uint64")
    return dtype if dtype.name in REAL else np.dtype("float32")


def _sums(xp: Any, x: Array, where: Array, g: Array) -> Array:
    """x with each of `g` added at where, in the dtype to add up in: x itself if that is its own."""
    kind = _summed_in(x.dtype)
    sums = x if x.dtype == kind else x.astype(kind)
    xp.add.at(sums, where, g.astype(kind, copy=False))
    return sums


def add_rows(xp: Any, where: Array, g: Array, out: Array) -> None:
    """Adds each row of `g` (N, D) to out[where[i]]. out: (M, D)"""
    sums = _sums(xp, out, where, g)
    if sums is not out:
        out[...] = sums


def add_flat(xp: Any, x: Array, where: Array, g: Array) -> Array:
    """`x`, a vector, with each of `g` added at where (of its shape): x itself if it could be added to in place."""
    sums = _sums(xp, x, where.reshape(-1), g.reshape(-1))
    return sums if sums is x else sums.astype(x.dtype)


def embedding(xp: Any, w: Array, index: Array, padding: int | None, by_frequency: bool) -> tuple[Array, Any]:
    return xp.take(w, index, axis=0), (w.shape, index, padding, by_frequency)


def embedding_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Saved = (None,)
) -> Gradients:
    shape, index, padding, by_frequency = residual
    if by_frequency or not EMBEDDING.takes(g.dtype) or index.size >= 1 << 31:
        return indexing.embedding.backward(xp, g, needs, saved, residual)
    dw, onto = outs[0], isinstance(outs[0], AccumulateInto)
    if onto:
        dw = dw.array
    if dw is None or dw.dtype != g.dtype or not dw.flags.c_contiguous:
        dw, onto = xp.empty(shape, g.dtype), False
    add_rows_in_order(xp, index.reshape(-1), g.reshape(index.size, shape[1]), dw, onto, padding)
    return (dw,)
