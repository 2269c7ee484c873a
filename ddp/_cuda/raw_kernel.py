"""CUDA kernels written as C++ text, and their compilation and launch.

The kernels are CuPy `RawKernel`s, because tests compile the same text without CuPy: by NVRTC, and by a C++ compiler
with an emulation of a GPU. A kernel gives the right result with any number of blocks and threads. Python numbers are
always passed as `long long` and `double`.

A kernel is compiled before its first launch, which takes NVRTC some tenths of a second. CuPy stores the binary in
`~/.cupy/kernel_cache`, from which later processes load it in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddp._engine.grad_buffer import AccumulateInto
from ddp.ops.arrays import Array

# Threads of a block, unless the launch passes another number.
THREADS = 256

# Maximum number of blocks of a launch. For more elements or rows, each thread or block computes several, in a loop.
BLOCKS = 1 << 16

# C++ at the beginning of every source. T is the type of arrays in memory, A the type to compute in.
PRELUDE = """
typedef long long Index;

#define LOWEST log(A(0))  // -inf

#define FOR_EACH(i, n) \\
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (Index)gridDim.x * blockDim.x)
#define FOR_ROWS(row, rows) for (Index row = blockIdx.x; row < (rows); row += gridDim.x)

#ifndef WARP
#define WARP 32
#endif

// The value of another thread in the warp, whose number is this one's XOR `distance`.
template <class V> __device__ V shuffle(V value, unsigned distance) {
    static_assert(sizeof(V) % 4 == 0, "words");
    union Words {
        unsigned word[sizeof(V) / 4];
        V value;
        __device__ Words() {}
    } source, result;
    source.value = value;
    for (unsigned k = 0; k < sizeof(V) / 4; k++) result.word[k] = __shfl_xor_sync(~0u, source.word[k], distance);
    return result.value;
}

// Reductions over the threads of a block, of any size: within warps by registers, then over warps in shared memory.
// All threads get the same bits.
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
        __syncthreads();  // all threads have read the cells before the next reduction writes to them
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
    # Unsigned, because CUDA has no signed atomicAdd of 64 bits. Sums wrap to the same bits.
    "int64": "typedef unsigned long long T;\ntypedef unsigned long long A;\n",
}

# Every source that has a name, by name. A test compiles all of them.
KERNEL_SOURCES: dict[str, KernelSource] = {}


class KernelSource:
    """The text of some kernels, which are compiled separately for each dtype.

    name: its key in `KERNEL_SOURCES`; None for a text that is generated at run time
    dtypes: the dtypes that T can be; options: more options for the compiler
    """

    def __init__(
        self, name: str | None, code: str, dtypes: tuple[str, ...] = FLOATING, options: tuple[str, ...] = ()
    ) -> None:
        assert name not in KERNEL_SOURCES, name
        self.code = code
        self.dtypes = dtypes
        self.options = ("-std=c++17", *options)
        self._kernels: dict[Any, Any] = {}
        if name is not None:
            KERNEL_SOURCES[name] = self

    def text(self, dtype: Any) -> str:
        """The text to compile for T of this dtype."""
        return _TYPES[np.dtype(dtype).name] + PRELUDE + self.code

    def takes(self, dtype: Any) -> bool:
        """Whether there are kernels of this dtype."""
        return np.dtype(dtype).name in self.dtypes

    def launch(self, xp: Any, entry: str, dtype: Any, count: int, *arguments: Any) -> None:
        """Launches the kernel named `entry` with a thread for each of `count` elements, up to the limit of blocks."""
        self.launch_rows(xp, entry, dtype, -(-count // THREADS), *arguments)

    def launch_rows(self, xp: Any, entry: str, dtype: Any, count: int, *arguments: Any, threads: int = THREADS) -> None:
        """Launches the kernel named `entry` with a block for each of `count` rows, up to the limit of blocks."""
        if not count:
            return
        key = (xp, entry, dtype)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = compile_kernel(xp, self.text(dtype), entry, self.options)
            self._kernels[key] = kernel
        kernel((min(count, BLOCKS),), (threads,), [_kernel_argument(value) for value in arguments])


def compile_kernel(xp: Any, text: str, entry: str, options: tuple[str, ...]) -> Any:
    """Compiles a kernel, and loads it on the current device."""
    kernel = xp.RawKernel(text, entry, options)
    kernel.compile()
    return kernel


# Converters of kernel arguments, by type: numbers become eight bytes, None a null pointer. Other values, such as
# arrays, stay unchanged.
_CONVERTERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda x: np.int64(0),
    **dict.fromkeys((int, bool, *(np.dtype(code).type for code in np.typecodes["AllInteger"] + "?")), np.int64),
    **dict.fromkeys((float, np.float16, np.float32), np.float64),
}


def _kernel_argument(value: Any) -> Any:
    convert = _CONVERTERS.get(type(value))
    return value if convert is None else convert(value)


def contiguous(xp: Any, x: Array | None, dtype: Any = None) -> Array | None:
    """`x` in C order and in `dtype`, copied if necessary; None stays None."""
    return None if x is None else xp.ascontiguousarray(x, dtype)


# C++ for parameters and their gradients. Their dtype may differ from T: float32 parameters with 16-bit activations.
PARAMETERS = """
// A parameter as a pointer in T, or in A, or neither.
struct Parameter {
    const T* narrow;
    const A* wide;

    __device__ bool exists() const { return narrow || wide; }
    __device__ A at(Index i) const { return narrow ? A(narrow[i]) : wide[i]; }
};

// Memory for a gradient in T, or in A, or neither. accumulate: adds to the values that are there
struct GradOut {
    T* narrow;
    A* wide;
    Index accumulate;

    __device__ void put(Index i, A value) const {
        if (narrow) narrow[i] = T(accumulate ? A(narrow[i]) + value : value);
        else if (wide) wide[i] = accumulate ? wide[i] + value : value;
    }
};
"""


def parameter_arguments(xp: Any, x: Array | None, dtype: Any, compute: Any) -> tuple[Array | None, Array | None]:
    """The two pointers of a C++ `Parameter`: (x, None) if x has dtype T, else (None, x in dtype A).

    If x is None, both are None. dtype, compute: the dtypes of T and A
    """
    if x is None:
        return None, None
    return (xp.ascontiguousarray(x), None) if x.dtype == dtype else (None, xp.ascontiguousarray(x, compute))


def gradient_arguments(
    xp: Any, needed: bool, shape: tuple[int, ...], grad_dtype: Any, grad_out: Any, dtype: Any, compute: Any
) -> tuple[Array | None, tuple[Array | None, Array | None, bool]]:
    """The array for a gradient in `grad_dtype` (None unless needed), and the three arguments of a C++ `GradOut`.

    grad_out: memory for the gradient, as in `grad_outs` of ops. If it is None, or has another dtype or is not in C
        order, a new array is made
    dtype, compute: the dtypes of T and A
    """
    if not needed:
        return None, (None, None, False)
    accumulate = isinstance(grad_out, AccumulateInto)
    array = grad_out.array if isinstance(grad_out, AccumulateInto) else grad_out
    if array is None or array.dtype != grad_dtype or not array.flags.c_contiguous:
        accumulate = False
        array = xp.ndarray(shape, grad_dtype)
    if grad_dtype == dtype:
        return array, (array, None, accumulate)
    assert grad_dtype == compute, f"a gradient of {grad_dtype} beside {dtype}"
    return array, (None, array, accumulate)


# C++ for random numbers that are a function of a key and a counter, so that backward can compute them again.
# Source: Salmon et al. 2011.
PHILOX = """
// Philox4x32-10: four numbers of 32 bits for each counter. key: two words of device memory, which a launch of a CUDA
// graph reads anew
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

    // The i-th number as one of 2^24 values in [0, 1).
    __device__ A uniform(int i) const { return A(word[i] >> 8) * A(1.0 / 16777216); }
};
"""
