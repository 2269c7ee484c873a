"""Tables of arrays in device memory, so that one launch of a kernel works on any number of arrays.

A row holds the addresses of a parameter, its gradient and its states, or of a gradient alone, and their length. Arrays
are divided into chunks, and a block works on one chunk at a time. A second array holds the number of each chunk's row.
Tables are cached. A new one is made when an array is replaced or another stream is used, so a usual training step
copies no table to the device.
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

# The arrays of one row: a parameter, its gradient, its states.
RowArrays = tuple[Array | None, Array, Sequence[Array | None]]

# Elements of a chunk; a multiple of 4.
CHUNK = 8192

# A thread loads this many elements at once, if all addresses in the row are aligned to the size of such a load.
_VECTOR = 4

# Maximum number of tables in a `TableCache`.
_MAX_CACHED = 16

# The columns of a row: the addresses of parameter, gradient and up to three states, then the number of elements, the
# index of the row's first chunk, whether threads can load `_VECTOR` elements at once, and the row's index into the
# array of step counts. `_ROW` is the number of columns.
_PARAM = 0
_GRAD = 1
_STATE = 2
_SIZE = 5
_FIRST = 6
_VECTORS = 7
_STEP = 8
_ROW = 9

TABLE_SOURCE = """
enum { PARAM, GRAD, STATE, SIZE = 5, FIRST, VECTORS, STEP, ROW };  // columns of a row, and their number
struct alignas(4 * sizeof(T)) Four { T x[4]; };

// The elements of a row that belong to chunk c: from begin to end, and up to whole in vectors of four.
struct Part {
    Index begin, end, whole;
    __device__ Part(const Index* row, Index c, Index chunk) {
        begin = (c - row[FIRST]) * chunk;
        end = begin + chunk < row[SIZE] ? begin + chunk : row[SIZE];
        whole = row[VECTORS] ? begin + (end - begin) / 4 * 4 : begin;
    }
};

// Calls visit(x) for each element of the gradient.
template <class Visit> static __device__ void for_each(const Index* row, Part part, Visit visit) {
    const T* grad = (const T*)row[GRAD];
    for (Index i = part.begin + 4 * threadIdx.x; i < part.whole; i += 4 * blockDim.x) {
        Four four = *(const Four*)(grad + i);
        for (int k = 0; k < 4; k++) visit(A(four.x[k]));
    }
    for (Index i = part.whole + threadIdx.x; i < part.end; i += blockDim.x) visit(A(grad[i]));
}

// Replaces each element x of the gradient by compute(x).
template <class Compute> static __device__ void replace(const Index* row, Part part, Compute compute) {
    T* grad = (T*)row[GRAD];
    for (Index i = part.begin + 4 * threadIdx.x; i < part.whole; i += 4 * blockDim.x) {
        Four four = *(const Four*)(grad + i);
        for (int k = 0; k < 4; k++) four.x[k] = T(compute(A(four.x[k])));
        *(Four*)(grad + i) = four;
    }
    for (Index i = part.whole + threadIdx.x; i < part.end; i += blockDim.x) grad[i] = T(compute(A(grad[i])));
}
"""


class ArrayTable:
    """A table of arrays: `rows`, (length, 9), and `chunks`, (count,): int64 arrays on the device.

    Both are uninitialized until `fill` is called.

    dtype: the dtype of all arrays, which is T in the kernels
    arrays: the arrays of each row, without gaps in memory; None in place of a missing parameter or state
    steps: for each row, its index into the array of step counts
    """

    __slots__ = ("_chunks_on_host", "_rows_on_host", "chunk", "chunks", "count", "length", "rows")

    def __init__(self, xp: Any, dtype: Any, arrays: Sequence[RowArrays], steps: Any = None) -> None:
        rows = np.zeros((len(arrays), _ROW), np.int64)
        counts = []
        first = 0
        for row, (param, grad, states) in zip(rows, arrays, strict=True):
            addresses = [0 if array is None else address(array) for array in (param, grad, *states)]
            row[_PARAM : _PARAM + len(addresses)] = addresses
            row[_SIZE] = grad.size
            row[_FIRST] = first
            row[_VECTORS] = not any(start % (_VECTOR * dtype.itemsize) for start in addresses)
            counts.append(-(-grad.size // CHUNK))
            first += counts[-1]
        if steps is not None:
            rows[:, _STEP] = steps
        self._rows_on_host = rows
        self._chunks_on_host = np.repeat(np.arange(len(arrays)), counts)
        self.chunk = CHUNK
        self.count = first
        self.length = len(arrays)
        self.rows = xp.empty(rows.shape, np.int64)
        self.chunks = xp.empty(first, np.int64)

    def fill(self, xp: Any) -> None:
        """Copies the table to the device on the current stream; the host does not wait."""
        self.rows[...] = xp.asarray(self._rows_on_host)
        self.chunks[...] = xp.asarray(self._chunks_on_host)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The first arguments of every kernel over a table: rows, chunks, count, chunk."""
        return self.rows, self.chunks, self.count, self.chunk


class SeenArrays:
    """Remembers a list of arrays by weak references, to compare another list by identity."""

    def __init__(self, arrays: Sequence[Array | None]) -> None:
        self._refs = [_no_array if array is None else weakref.ref(array) for array in arrays]

    def are(self, arrays: Sequence[Array | None]) -> bool:
        """Whether `arrays` are the same objects, in the same order."""
        return len(arrays) == len(self._refs) and all(map(is_, [ref() for ref in self._refs], arrays))


def _no_array() -> None:
    return None


class TableCache:
    """Caches the most recently used tables, by stream, dtype, and the address and size of each gradient.

    A table that is made while a CUDA graph is captured belongs to that graph, and is not cached.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[Any, ArrayTable] = OrderedDict()
        self._lock = threading.Lock()  # ranks may be threads of one process

    def of(self, xp: Any, dtype: Any, gradients: Sequence[Array]) -> ArrayTable:
        """Returns the table of `gradients`: arrays of `dtype` without gaps in memory."""
        graph = capturing.now
        if graph is not None:
            # The table is filled once, before the first launch. Every launch would repeat a copy within the capture.
            with graph.persistent(xp):
                table = ArrayTable(xp, dtype, [(None, g, ()) for g in gradients])
            graph.before(functools.lru_cache(1)(lambda: table.fill(xp)))
            graph.keep_alive(table, gradients)
            return table
        key = (stream_key(xp), dtype.char, *[(address(g), g.size) for g in gradients])
        with self._lock:
            cached = self._tables.get(key)
            if cached is not None:
                self._tables.move_to_end(key)
                return cached
        table = ArrayTable(xp, dtype, [(None, g, ()) for g in gradients])
        table.fill(xp)
        with self._lock:
            self._tables[key] = table
            while len(self._tables) > _MAX_CACHED:
                self._tables.popitem(last=False)
        return table


def stream_key(xp: Any) -> Any:
    """A key of the current device and stream. Another stream must not use a table whose copy may not be done yet."""
    return xp, xp.cuda.runtime.getDevice(), xp.cuda.get_current_stream().ptr


def address(array: Array) -> int:
    """The address of the first element."""
    return int(array.data.ptr)


def dense_order(array: Array) -> tuple[int, ...] | None:
    """The axes by decreasing stride, if the elements fill their memory without gaps; else None."""
    if array.flags.c_contiguous:
        return tuple(range(array.ndim))
    axes = tuple(sorted(range(array.ndim), key=lambda axis: (-array.strides[axis], array.shape[axis])))
    expected = array.itemsize
    for axis in reversed(axes):
        if array.shape[axis] != 1 and array.strides[axis] != expected:
            return None
        expected *= array.shape[axis]
    return axes
