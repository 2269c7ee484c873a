"""CUDA C++ as text: compiled when a GPU first needs it, and by a test that has none.

Raw kernels, so that the very text can be given to NVRTC without CuPy, and to a C++ compiler that stands in for a GPU.
A kernel is right for any number of blocks and threads. All numbers come as `long long` and `double`: so there is no
doubt about what a Python number is passed as.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp.ops._op import Array

THREADS = 256  # of a block
BLOCKS = 1 << 16  # at most; every kernel strides over what is beyond them

# T is what memory holds, A what is computed in. Of the values of a block, one half is joined to the other until one is
# left, whatever their number.
PRELUDE = """
typedef long long Index;

#define LOWEST log(A(0))  // -inf

#define FOR_EACH(i, n) \\
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (Index)gridDim.x * blockDim.x)
#define FOR_ROWS(row, rows) for (Index row = blockIdx.x; row < (rows); row += gridDim.x)

// A row belongs to a block, whose threads meet in each sum.
struct Block {
    template <class V, class Join> static __device__ V meet(V value, Join join) {
        __shared__ V cells[1024];
        cells[threadIdx.x] = value;
        __syncthreads();
        for (unsigned left = blockDim.x; left > 1;) {
            unsigned half = (left + 1) / 2;
            if (threadIdx.x < left / 2) cells[threadIdx.x] = join(cells[threadIdx.x], cells[threadIdx.x + half]);
            left = half;
            __syncthreads();
        }
        V result = cells[0];
        __syncthreads();  // before the cells are written to again
        return result;
    }
    static __device__ A sum(A value) { return meet(value, [](A a, A b) { return a + b; }); }
    // A nan stays, as it does in a sum.
    static __device__ A max(A value) { return meet(value, [](A a, A b) { return a > b || a != a ? a : b; }); }
    static __device__ Index first() { return blockIdx.x; }
    static __device__ Index rows() { return gridDim.x; }
    static __device__ Index start() { return threadIdx.x; }
    static __device__ Index step() { return blockDim.x; }
    static __device__ bool leads() { return threadIdx.x == 0; }
};

// A row belongs to a thread, which meets nobody: for rows that lie side by side in memory.
struct Thread {
    static __device__ A sum(A value) { return value; }
    static __device__ A max(A value) { return value; }
    static __device__ Index first() { return (Index)blockIdx.x * blockDim.x + threadIdx.x; }
    static __device__ Index rows() { return (Index)gridDim.x * blockDim.x; }
    static __device__ Index start() { return 0; }
    static __device__ Index step() { return 1; }
    static __device__ bool leads() { return true; }
};
"""

REAL = ("float32", "float64")
FLOATING = ("float16", *REAL)
_TYPES = {
    "float16": "#include <cuda_fp16.h>\ntypedef __half T;\ntypedef float A;\n",
    "float32": "typedef float T;\ntypedef float A;\n",
    "float64": "typedef double T;\ntypedef double A;\n",
    # Sums wrap alike, with a sign or without, and atomic ones are without.
    "int64": "typedef unsigned long long T;\ntypedef unsigned long long A;\n",
}

SOURCES: dict[str, Source] = {}  # every source by name: a test compiles them all


class Source:
    """One family of kernels.

    dtypes: of T; options: of the compiler
    """

    def __init__(self, name: str, code: str, dtypes: tuple[str, ...] = FLOATING, options: tuple[str, ...] = ()) -> None:
        assert name not in SOURCES, name
        self.name, self.code, self.dtypes = name, code, dtypes
        self.options = ("-std=c++17", *options)
        self._kernels: dict[Any, Any] = {}
        SOURCES[name] = self

    def text(self, dtype: Any) -> str:
        """What is compiled for T of this dtype."""
        return _TYPES[np.dtype(dtype).name] + PRELUDE + self.code

    def takes(self, dtype: Any) -> bool:
        """Whether there are kernels of this dtype."""
        return np.dtype(dtype).name in self.dtypes

    def over(self, xp: Any, entry: str, dtype: Any, count: int, *arguments: Any) -> None:
        """Runs a kernel whose threads share `count` elements."""
        self._launch(xp, entry, dtype, -(-count // THREADS), arguments)

    def rows(self, xp: Any, entry: str, dtype: Any, count: int, *arguments: Any) -> None:
        """Runs a kernel whose blocks share `count` rows."""
        self._launch(xp, entry, dtype, count, arguments)

    def _launch(self, xp: Any, entry: str, dtype: Any, blocks: int, arguments: tuple[Any, ...]) -> None:
        if not blocks:
            return
        key = xp, entry, dtype
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = xp.RawKernel(self.text(dtype), entry, self.options)
        kernel((min(blocks, BLOCKS),), (THREADS,), tuple([_passed(each) for each in arguments]))


_NOWHERE = np.int64(0)


def _passed(x: Any) -> Any:
    if x is None:
        return _NOWHERE  # a null pointer
    if isinstance(x, bool | int):
        return np.int64(x)
    if isinstance(x, float):
        return np.float64(x)
    assert x.flags.c_contiguous
    return x


def wide(dtype: Any) -> Any:
    """The dtype of A: what float16 is computed in is float32."""
    return np.dtype("float32") if dtype == np.float16 else dtype


def flat(xp: Any, x: Array | None, dtype: Any = None) -> Array | None:
    """`x` in one piece of memory, in `dtype`; None stays None."""
    return None if x is None else xp.ascontiguousarray(x, dtype)
