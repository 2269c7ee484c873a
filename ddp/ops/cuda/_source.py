"""CUDA C++ as text: compiled when a GPU first needs it, and by a test that has none.

Raw kernels, so that the very text can be given to NVRTC without CuPy, and to a C++ compiler that stands in for a GPU.
A kernel is right for any number of blocks and threads. All numbers come as `long long` and `double`: so there is no
doubt about what a Python number is passed as.

A kernel is compiled before it is first launched, which takes NVRTC a few tenths of a second; CuPy keeps the binary in
`~/.cupy/kernel_cache`, so that later processes load it in milliseconds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ddp._device import capturing
from ddp._gpu import capture
from ddp.ops._op import BFLOAT16, Array

THREADS = 256  # of a block
BLOCKS = 1 << 16  # at most; every kernel strides over what is beyond them

# T is what memory holds, A what is computed in. The values of a block meet within each warp first, from register to
# register, and what the warps have come to meets in shared memory; a block may have any number of threads.
PRELUDE = """
typedef long long Index;

#define LOWEST log(A(0))  // -inf

#define FOR_EACH(i, n) \\
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (Index)gridDim.x * blockDim.x)
#define FOR_ROWS(row, rows) for (Index row = blockIdx.x; row < (rows); row += gridDim.x)

#ifndef WARP
#define WARP 32
#endif

// What the thread holds that is `apart` away in the warp, word by word.
template <class V> __device__ V across(V value, unsigned apart) {
    static_assert(sizeof(V) % 4 == 0, "words");
    union Words {
        unsigned word[sizeof(V) / 4];
        V whole;
        __device__ Words() {}
    } mine, theirs;
    mine.whole = value;
    for (unsigned k = 0; k < sizeof(V) / 4; k++) theirs.word[k] = __shfl_xor_sync(~0u, mine.word[k], apart);
    return theirs.whole;
}

// A row belongs to a block, whose threads meet in each sum.
struct Block {
    template <class V, class Join> static __device__ V meet(V value, Join join) {
        __shared__ V cells[32];
        for (unsigned apart = WARP / 2; apart; apart /= 2) {
            V other = across(value, apart);
            if ((threadIdx.x ^ apart) < blockDim.x) value = join(value, other);  // the last warp may lack threads
        }
        if (threadIdx.x % WARP == 0) cells[threadIdx.x / WARP] = value;
        __syncthreads();
        // In the same order everywhere: all threads go on with the same bits.
        V result = cells[0];
        for (unsigned warp = 1; warp * WARP < blockDim.x; warp++) result = join(result, cells[warp]);
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
    template <class V, class Join> static __device__ V meet(V value, Join) { return value; }
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
FLOATING = ("float16", "bfloat16", *REAL)
_TYPES = {
    "float16": "#include <cuda_fp16.h>\ntypedef __half T;\ntypedef float A;\n",
    "bfloat16": "#include <cuda_bf16.h>\ntypedef __nv_bfloat16 T;\ntypedef float A;\n",
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

    def rows(self, xp: Any, entry: str, dtype: Any, count: int, *arguments: Any, threads: int = THREADS) -> None:
        """Runs a kernel whose blocks, of `threads` each, share `count` rows."""
        self._launch(xp, entry, dtype, count, arguments, threads)

    def _launch(
        self, xp: Any, entry: str, dtype: Any, blocks: int, arguments: tuple[Any, ...], threads: int = THREADS
    ) -> None:
        if not blocks:
            return
        key = xp, entry, dtype
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = loaded(xp, self.text(dtype), entry, self.options), passes(xp)
        kernel, passing = found
        # An array passes as it is: it lies in one piece, as the emulator of the tests makes sure.
        wrap = passing.get
        passed = [each if (wrapped := wrap(type(each))) is None else wrapped(each) for each in arguments]
        if capturing.now is not None:
            loaded_here(kernel)
        kernel((min(blocks, BLOCKS),), (threads,), passed)


def loaded(xp: Any, text: str, entry: str, options: tuple[str, ...]) -> Any:
    """A new kernel, compiled and loaded on the current device."""
    kernel = xp.RawKernel(text, entry, options)
    # The first launch would load it, which breaks a capture under drivers before CUDA 12.3: here it is no part of one.
    with capture.relaxed():
        kernel.compile()
    return kernel


def loaded_here(*kernels: Any) -> None:
    """Before a launch in a capture: a kernel that was made on another device is loaded on the current one as well."""
    with capture.relaxed():
        for each in kernels:
            _ = each.kernel  # CuPy's of this device


Passing = dict[type, Callable[[Any], Any]]
_PASSING: dict[Any, Passing] = {}
_INTEGERS = [np.dtype(code).type for code in np.typecodes["AllInteger"] + "?"]
_DOUBLE, _BITS = struct.Struct("d"), struct.Struct("Q")


def passes(xp: Any) -> Passing:
    """How Python's and NumPy's numbers and None are passed to kernels, by their type.

    CuPy takes a NumPy scalar apart in half a microsecond, and its own cells as they are: those it wraps itself.
    """
    found = _PASSING.get(xp)
    if found is None:
        cells = getattr(getattr(xp, "cuda", None), "function", None)
        whole, bits = getattr(cells, "CIntptr", np.int64), getattr(cells, "CUIntMax", None)

        def double(x: float) -> Any:
            return np.float64(x) if bits is None else bits(_BITS.unpack(_DOUBLE.pack(x))[0])

        nowhere = whole(0)  # a null pointer
        found = {int: whole, bool: whole, float: double, type(None): lambda x: nowhere}
        # CuPy's CIntptr refuses NumPy's integers, and narrow numbers would be passed in fewer bytes than are read.
        found |= dict.fromkeys(_INTEGERS, lambda x: whole(int(x)))
        found |= dict.fromkeys((np.float16, np.float32, np.float64), double)
        _PASSING[xp] = found
    return found


def wide(dtype: Any) -> Any:
    """The dtype of A: what float16 and bfloat16 are computed in is float32."""
    return np.dtype("float32") if dtype == np.float16 or dtype == BFLOAT16 else dtype


def flat(xp: Any, x: Array | None, dtype: Any = None) -> Array | None:
    """`x` in one piece of memory, in `dtype`; None stays None."""
    return None if x is None else xp.ascontiguousarray(x, dtype)
