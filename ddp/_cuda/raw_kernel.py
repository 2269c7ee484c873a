"""CUDA C++ as text: compiled when a GPU first needs it, and by a test that has none.

Raw kernels, so that the very text can be given to NVRTC without CuPy, and to a C++ compiler that stands in for a GPU.
A kernel is right for any number of blocks and threads. All numbers come as `long long` and `double`: so there is no
doubt about what a Python number is passed as.

A kernel is compiled before it is first launched, which takes NVRTC a few tenths of a second; CuPy keeps the binary in
`~/.cupy/kernel_cache`, so that later processes load it in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddp._engine.leaves import AccumulateInto
from ddp.ops.arrays import BFLOAT16, Array

THREADS = 256  # of a block
BLOCKS = 1 << 16  # at most; every kernel strides over what is beyond them

# T is what memory holds, A what is computed in. A block is reduced within each warp first, from register to register,
# then over warps in shared memory; it may have any number of threads.
PRELUDE = """
typedef long long Index;

#define LOWEST log(A(0))  // -inf

#define FOR_EACH(i, n) \\
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (Index)gridDim.x * blockDim.x)
#define FOR_ROWS(row, rows) for (Index row = blockIdx.x; row < (rows); row += gridDim.x)

#ifndef WARP
#define WARP 32
#endif

// What the thread holds that is `distance` away in the warp, word by word.
template <class V> __device__ V shuffle(V value, unsigned distance) {
    static_assert(sizeof(V) % 4 == 0, "words");
    union Words {
        unsigned word[sizeof(V) / 4];
        V whole;
        __device__ Words() {}
    } mine, theirs;
    mine.whole = value;
    for (unsigned k = 0; k < sizeof(V) / 4; k++) theirs.word[k] = __shfl_xor_sync(~0u, mine.word[k], distance);
    return theirs.whole;
}

// Reductions over the threads of a block, with the same bits for all of them.
struct Block {
    template <class V, class Join> static __device__ V reduce(V value, Join join) {
        __shared__ V cells[32];
        for (unsigned distance = WARP / 2; distance; distance /= 2) {
            V other = shuffle(value, distance);
            if ((threadIdx.x ^ distance) < blockDim.x) value = join(value, other);  // the last warp may lack threads
        }
        if (threadIdx.x % WARP == 0) cells[threadIdx.x / WARP] = value;
        __syncthreads();
        V result = cells[0];
        for (unsigned warp = 1; warp * WARP < blockDim.x; warp++) result = join(result, cells[warp]);
        __syncthreads();  // before the cells are written to again
        return result;
    }
    static __device__ A sum(A value) { return reduce(value, [](A a, A b) { return a + b; }); }
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

KERNEL_SOURCES: dict[str, KernelSource] = {}  # every source by name: a test compiles them all


class KernelSource:
    """One family of kernels.

    name: None for a source that is made at run time, which `KERNEL_SOURCES` does not list
    dtypes: of T; options: of the compiler
    """

    def __init__(
        self, name: str | None, code: str, dtypes: tuple[str, ...] = FLOATING, options: tuple[str, ...] = ()
    ) -> None:
        assert name not in KERNEL_SOURCES, name
        self.code, self.dtypes = code, dtypes
        self.options = ("-std=c++17", *options)
        self._kernels: dict[Any, Any] = {}
        if name is not None:
            KERNEL_SOURCES[name] = self

    def text(self, dtype: Any) -> str:
        """What is compiled for T of this dtype."""
        return _TYPES[np.dtype(dtype).name] + PRELUDE + self.code

    def takes(self, dtype: Any) -> bool:
        """Whether there are kernels of this dtype."""
        return np.dtype(dtype).name in self.dtypes

    def over(self, xp: Any, entry: str, dtype: Any, count: int, *arguments: Any) -> None:
        """Runs a kernel whose threads share `count` elements."""
        self.rows(xp, entry, dtype, -(-count // THREADS), *arguments)

    def rows(self, xp: Any, entry: str, dtype: Any, count: int, *arguments: Any, threads: int = THREADS) -> None:
        """Runs a kernel whose blocks, of `threads` each, share `count` rows."""
        if not count:
            return
        key = xp, entry, dtype
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = loaded(xp, self.text(dtype), entry, self.options)
        kernel((min(count, BLOCKS),), (threads,), [_passed(each) for each in arguments])


def loaded(xp: Any, text: str, entry: str, options: tuple[str, ...]) -> Any:
    """A new kernel, compiled and loaded on the current device."""
    kernel = xp.RawKernel(text, entry, options)
    kernel.compile()
    return kernel


# How arguments are passed, by their type: numbers in eight bytes, None as a null pointer, arrays as they are.
_CONVERTERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda x: np.int64(0),
    **dict.fromkeys((int, bool, *(np.dtype(code).type for code in np.typecodes["AllInteger"] + "?")), np.int64),
    **dict.fromkeys((float, np.float16, np.float32), np.float64),
}


def _passed(x: Any) -> Any:
    convert = _CONVERTERS.get(type(x))
    return x if convert is None else convert(x)


def wide(dtype: Any) -> Any:
    """The dtype of A: what float16 and bfloat16 are computed in is float32."""
    return np.dtype("float32") if dtype == np.float16 or dtype == BFLOAT16 else dtype


def flat(xp: Any, x: Array | None, dtype: Any = None) -> Array | None:
    """`x` in one piece of memory, in `dtype`; None stays None."""
    return None if x is None else xp.ascontiguousarray(x, dtype)


# Parameters beside what is in T, and their gradients: in either dtype, for float32 parameters of a 16-bit net.
PARAMETERS = """
// A parameter in T or in A, or none.
struct Parameter {
    const T* narrow;
    const A* wide;

    __device__ bool exists() const { return narrow || wide; }
    __device__ A at(Index i) const { return narrow ? A(narrow[i]) : wide[i]; }
};

// Where a gradient is written, in T or in A: added to what is there already, if `adding`.
struct Slope {
    T* narrow;
    A* wide;
    Index adding;

    __device__ void put(Index i, A value) const {
        if (narrow) narrow[i] = T(adding ? A(narrow[i]) + value : value);
        else if (wide) wide[i] = adding ? wide[i] + value : value;
    }
};
"""


def either(xp: Any, x: Array | None, dtype: Any, kind: Any) -> tuple[Array | None, Array | None]:
    """x in one piece as the kernels take it: in `dtype`, or in `kind`, the dtype that they compute in."""
    if x is None:
        return None, None
    return (xp.ascontiguousarray(x), None) if x.dtype == dtype else (None, xp.ascontiguousarray(x, kind))


def slope(
    xp: Any, want: bool, shape: tuple[int, ...], to: Any, out: Any, dtype: Any, kind: Any
) -> tuple[Array | None, tuple[Array | None, Array | None, bool]]:
    """Where a gradient in dtype `to` is written: the array, and the three arguments of a `Slope`.

    out: as of an op that takes `into`: where it belongs, if that can be written to
    """
    if not want:
        return None, (None, None, False)
    adding = isinstance(out, AccumulateInto)
    array = out.array if isinstance(out, AccumulateInto) else out
    if array is None or array.dtype != to or not array.flags.c_contiguous:
        adding, array = False, xp.ndarray(shape, to)
    if to == dtype:
        return array, (array, None, adding)
    assert to == kind, f"a gradient of {to} beside {dtype}"
    return array, (None, array, adding)


# Random numbers that follow from a key and a counter: nothing of what was drawn needs to be kept for backward.

# key: two words in device memory, so that a replayed graph draws anew. Salmon et al. 2011.
PHILOX = """
// Philox4x32-10: four numbers of 32 bits for each counter.
struct Philox {
    unsigned word[4];

    __device__ Philox(const Index* key, Index counter) {
        unsigned long long offset = (unsigned long long)key[1];
        unsigned k0 = (unsigned)key[0], k1 = (unsigned)((unsigned long long)key[0] >> 32);
        word[0] = (unsigned)counter;
        word[1] = (unsigned)((unsigned long long)counter >> 32);
        word[2] = (unsigned)offset;
        word[3] = (unsigned)(offset >> 32);
#pragma unroll
        for (int round = 0; round < 10; round++) {
            unsigned long long one = 0xD2511F53ull * word[0], two = 0xCD9E8D57ull * word[2];
            unsigned next[4] = {
                (unsigned)(two >> 32) ^ word[1] ^ k0, (unsigned)two, (unsigned)(one >> 32) ^ word[3] ^ k1, (unsigned)one
            };
            for (int i = 0; i < 4; i++) word[i] = next[i];
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
    }

    // From [0, 1), of 24 bits.
    __device__ A uniform(int i) const { return A(word[i] >> 8) * A(1.0 / 16777216); }
};
"""
