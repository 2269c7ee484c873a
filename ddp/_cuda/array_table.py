"""Tables of arrays in device memory: by one launch, a kernel works on any number of arrays, wherever they lie.

A row holds the addresses and the length of one array, or of arrays that go together. Blocks take chunks; a list of
chunks says which row each one belongs to. Tables are made where arrays change, and kept: a training step sends none.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np

from ddp._device import capturing
from ddp.ops.arrays import Array

Together = tuple[Array | None, Array, Sequence[Array | None]]  # a parameter, its gradient, its states

CHUNK = 8192  # elements that a block takes at once; a multiple of 4
_VECTOR = 4  # elements that a thread takes at once, where all arrays of a row begin at a multiple of them
_KEPT = 16  # tables

# Addresses, elements, the row's first chunk, whether four elements can be taken at once, and a count of steps' index.
_PARAM, _GRAD, _STATE, _SIZE, _FIRST, _VECTORS, _STEP, _ROW = 0, 1, 2, 5, 6, 7, 8, 9

TABLE_SOURCE = """
enum { PARAM, GRAD, STATE, SIZE = 5, FIRST, VECTORS, STEP, ROW };  // of a row; there are three states
struct alignas(4 * sizeof(T)) Four { T x[4]; };

// A row's elements that belong to chunk c of the table: begin to end.
struct Part {
    Index begin, end, whole;  // whole: up to there four at once
    __device__ Part(const Index* row, Index c, Index chunk) {
        begin = (c - row[FIRST]) * chunk;
        end = begin + chunk < row[SIZE] ? begin + chunk : row[SIZE];
        whole = row[VECTORS] ? begin + (end - begin) / 4 * 4 : begin;
    }
};

// Calls take(x) for each of the gradient's elements.
template <class Take> static __device__ void each(const Index* row, Part part, Take take) {
    const T* own = (const T*)row[GRAD];
    for (Index i = part.begin + 4 * threadIdx.x; i < part.whole; i += 4 * blockDim.x) {
        Four four = *(const Four*)(own + i);
        for (int k = 0; k < 4; k++) take(A(four.x[k]));
    }
    for (Index i = part.whole + threadIdx.x; i < part.end; i += blockDim.x) take(A(own[i]));
}

// Replaces each of the gradient's elements by turn(x).
template <class Turn> static __device__ void replace(const Index* row, Part part, Turn turn) {
    T* own = (T*)row[GRAD];
    for (Index i = part.begin + 4 * threadIdx.x; i < part.whole; i += 4 * blockDim.x) {
        Four four = *(const Four*)(own + i);
        for (int k = 0; k < 4; k++) four.x[k] = T(turn(A(four.x[k])));
        *(Four*)(own + i) = four;
    }
    for (Index i = part.whole + threadIdx.x; i < part.end; i += blockDim.x) own[i] = T(turn(A(own[i])));
}
"""


class ArrayTable:
    """rows: (length, 9) and chunks: (count,) int64 on the device; both are written by `fill`.

    dtype: T of the kernels, and of all arrays; arrays: of each row, without gaps, None for what there is not
    steps: of each row, the index of its count of steps
    """

    __slots__ = ("_host", "_host_chunks", "chunk", "chunks", "count", "length", "rows")

    def __init__(self, xp: Any, dtype: Any, arrays: Sequence[Together], steps: Any = None) -> None:
        host = np.zeros((len(arrays), _ROW), np.int64)
        counts = []
        first = 0
        for row, (param, grad, states) in zip(host, arrays, strict=True):
            found = [0 if each is None else address(each) for each in (param, grad, *states)]
            row[_PARAM : _PARAM + len(found)] = found
            row[_SIZE], row[_FIRST] = grad.size, first
            row[_VECTORS] = not any(each % (_VECTOR * dtype.itemsize) for each in found)
            counts.append(-(-grad.size // CHUNK))
            first += counts[-1]
        if steps is not None:
            host[:, _STEP] = steps
        self._host, self._host_chunks = host, np.repeat(np.arange(len(arrays)), counts)
        self.chunk, self.count, self.length = CHUNK, first, len(arrays)
        self.rows, self.chunks = xp.empty(host.shape, np.int64), xp.empty(first, np.int64)

    def fill(self, xp: Any) -> None:
        """Sends it to the device, in the order of the current stream; the host does not wait."""
        self.rows[...] = xp.asarray(self._host)
        self.chunks[...] = xp.asarray(self._host_chunks)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What every kernel that walks tables begins with: rows, chunks, count, chunk."""
        return self.rows, self.chunks, self.count, self.chunk


class SeenArrays:
    """Arrays as they were seen, none of them kept alive: asking whether they are the same takes no look at each."""

    def __init__(self, arrays: Sequence[Array | None]) -> None:
        self._refs = [_nothing if array is None else weakref.ref(array) for array in arrays]

    def are(self, arrays: Sequence[Array | None]) -> bool:
        """Whether it is these objects that were seen."""
        return len(arrays) == len(self._refs) and all(map(is_, [ref() for ref in self._refs], arrays))


def _nothing() -> None:
    return None


class TableCache:
    """The last tables that were asked for, by the addresses in them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, ArrayTable] = OrderedDict()
        self._lock = threading.Lock()  # ranks may be threads of one process

    def of(self, xp: Any, dtype: Any, gradients: Sequence[Array]) -> ArrayTable:
        """The table of gradients without gaps, for kernels whose T is `dtype`."""
        graph = capturing.now
        if graph is not None:
            # What is sent within a capture would arrive with the first replay, and again with each.
            with graph.lasting(xp):
                table = ArrayTable(xp, dtype, [(None, g, ()) for g in gradients])
            graph.before(functools.lru_cache(1)(lambda: table.fill(xp)))
            graph.keep(table, gradients)
            return table
        key = stream_key(xp), dtype.char, *[(address(g), g.size) for g in gradients]
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        found = ArrayTable(xp, dtype, [(None, g, ()) for g in gradients])
        found.fill(xp)
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found


def stream_key(xp: Any) -> Any:
    """What names the current device and stream. What was sent on one is not known to be there on another."""
    return xp, xp.cuda.runtime.getDevice(), xp.cuda.get_current_stream().ptr


def address(array: Array) -> int:
    """Where the first element lies."""
    return int(array.data.ptr)


def dense_order(array: Array) -> tuple[int, ...] | None:
    """The axes from the widest stride to the narrowest if the elements fill their memory without gaps; else None."""
    if array.flags.c_contiguous:
        return tuple(range(array.ndim))
    axes = tuple(sorted(range(array.ndim), key=lambda axis: (-array.strides[axis], array.shape[axis])))
    expected = array.itemsize
    for axis in reversed(axes):
        if array.shape[axis] != 1 and array.strides[axis] != expected:
            return None
        expected *= array.shape[axis]
    return axes
