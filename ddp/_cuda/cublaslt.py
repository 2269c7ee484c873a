"""A ctypes binding of cuBLASLt, for matrix products on a GPU. CuPy does not bind this library.

CuPy's own products cannot be captured in a CUDA graph. For stacks of matrices, they convert float16 to float32, do not
support bfloat16, and copy transposed matrices. cuBLASLt has none of these limits, and fuses a bias and an activation.

The library is loaded from where CuPy finds its libcublas, so that a process has one version. Pointers are passed as
integers, so that a fake in Python can replace the library.

Source: cublasLt.h and cublas_api.h of CUDA 12.9; what is used here is the same from CUDA 12.0 to 13.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Callable, Iterator
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from ddp.errors import DeviceError, how_to_install

Pointer = c_void_p

# By name of a function: the types of its arguments, and the type of its result.
FUNCTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "cublasLtCreate": ((Pointer,), c_int),
    "cublasLtDestroy": ((Pointer,), c_int),
    "cublasLtGetVersion": ((), c_size_t),
    "cublasLtGetStatusString": ((c_int,), c_char_p),
    "cublasLtMatmulDescCreate": ((Pointer, c_int, c_int), c_int),
    "cublasLtMatmulDescDestroy": ((Pointer,), c_int),
    "cublasLtMatmulDescSetAttribute": ((Pointer, c_int, Pointer, c_size_t), c_int),
    "cublasLtMatrixLayoutCreate": ((Pointer, c_int, c_uint64, c_uint64, c_int64), c_int),
    "cublasLtMatrixLayoutDestroy": ((Pointer,), c_int),
    "cublasLtMatrixLayoutSetAttribute": ((Pointer, c_int, Pointer, c_size_t), c_int),
    "cublasLtMatmulPreferenceCreate": ((Pointer,), c_int),
    "cublasLtMatmulPreferenceDestroy": ((Pointer,), c_int),
    "cublasLtMatmulPreferenceSetAttribute": ((Pointer, c_int, Pointer, c_size_t), c_int),
    # handle, descriptor, A, B, C, D, preference, number of results wanted, results, number of results
    "cublasLtMatmulAlgoGetHeuristic": ((*(Pointer,) * 7, c_int, Pointer, Pointer), c_int),
    # handle, descriptor, alpha, A, layout, B, layout, beta, C, layout, D, layout, algorithm, workspace, size, stream
    "cublasLtMatmul": ((*(Pointer,) * 14, c_size_t, Pointer), c_int),
}

# cublasStatus_t: CUBLAS_STATUS_...
SUCCESS = 0
INVALID_VALUE = 7
NOT_SUPPORTED = 15

# cudaDataType: CUDA_R_...
TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}

# cublasComputeType_t: CUBLAS_COMPUTE_...
COMPUTE_32F = 68
COMPUTE_64F = 70
COMPUTE_32F_FAST_TF32 = 77

# cublasLtMatmulDescAttributes_t: CUBLASLT_MATMUL_DESC_..., and the type of each value
DESC = {
    "TRANSA": (3, c_int32),
    "TRANSB": (4, c_int32),
    "EPILOGUE": (7, c_uint32),
    "BIAS_POINTER": (8, c_uint64),
    "EPILOGUE_AUX_POINTER": (11, c_uint64),
    "EPILOGUE_AUX_LD": (12, c_int64),
}
# cublasLtMatrixLayoutAttribute_t: CUBLASLT_MATRIX_LAYOUT_...
LAYOUT = {"BATCH_COUNT": (5, c_int32), "STRIDED_BATCH_OFFSET": (6, c_int64)}
# cublasLtMatmulPreferenceAttributes_t: CUBLASLT_MATMUL_PREF_...
PREFERENCE = {
    "MAX_WORKSPACE_BYTES": (1, c_uint64),
    "REDUCTION_SCHEME_MASK": (3, c_uint32),
    "MIN_ALIGNMENT_A_BYTES": (5, c_uint32),
    "MIN_ALIGNMENT_B_BYTES": (6, c_uint32),
    "MIN_ALIGNMENT_C_BYTES": (7, c_uint32),
    "MIN_ALIGNMENT_D_BYTES": (8, c_uint32),
}
# cublasLtReductionScheme_t: CUBLASLT_REDUCTION_SCHEME_...
REDUCTION_COMPUTE_TYPE = 2
REDUCTION_MASK = 7

# cublasLtEpilogue_t: CUBLASLT_EPILOGUE_..., those that are used here. Bits: 2 RELU, 4 BIAS, 8 DRELU, 16 BGRAD, 32 GELU,
# 64 DGELU, 128 AUX, 512 BGRADB.
EPILOGUES = {
    "DEFAULT": 1,
    "BIAS": 4,
    "BGRADB": 512,
    "RELU": 2,
    "RELU_AUX": 130,
    "RELU_BIAS": 6,
    "RELU_AUX_BIAS": 134,
    "DRELU": 136,
    "DRELU_BGRAD": 152,
    "GELU": 32,
    "GELU_AUX": 160,
    "GELU_BIAS": 36,
    "GELU_AUX_BIAS": 164,
    "DGELU": 192,
    "DGELU_BGRAD": 208,
}


class Algorithm(ctypes.Structure):
    """The struct cublasLtMatmulHeuristicResult_t: an algorithm (its first member), and the workspace for it."""

    _fields_ = [  # a list, as ctypes requires
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class LtLibrary:
    """A loaded libcublasLt. path: of the file; version: 120903 for 12.9.3; matmul: the function cublasLtMatmul

    Raises: DeviceError if the library lacks a function of `FUNCTIONS`.
    """

    def __init__(self, dll: Any, path: str = "libcublasLt") -> None:
        self.path = path
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, (arguments, result) in FUNCTIONS.items():
            try:
                function = dll[name]  # a new object: other users of the library may declare other types
            except AttributeError:
                raise DeviceError(f"{path} is not the cuBLASLt of CUDA 12 or newer: it has no {name}") from None
            function.argtypes = arguments
            function.restype = result
            self._functions[name] = function
        self.version = int(self._functions["cublasLtGetVersion"]())
        self.matmul = self._functions["cublasLtMatmul"]
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<cuBLASLt {self.version} of {self.path}>"

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function. Returns: its status."""
        return int(self._functions[name](*arguments))

    def check(self, name: str, *arguments: Any) -> None:
        """Calls a function. Raises: DeviceError if it fails."""
        status = self.call(name, *arguments)
        if status != SUCCESS:
            raise DeviceError(f"{name}: {self.explain(status)}")

    def explain(self, status: int) -> str:
        """A text for a status."""
        name = self._functions["cublasLtGetStatusString"](status)
        return f"{name.decode(errors='replace') if name else 'an unknown status'} ({status}) of {self!r}"

    def create(self, name: str, *arguments: Any) -> int:
        """Creates an object by the function `name`. Returns: its address. Raises: DeviceError."""
        pointer = c_void_p()
        self.check(name, ctypes.addressof(pointer), *arguments)
        assert pointer.value is not None, name
        return pointer.value

    def set(self, name: str, target: int, attribute: tuple[int, Any], value: int) -> None:
        """Sets an attribute by the function `name`. attribute: an entry of the tables above. Raises: DeviceError."""
        number, c_type = attribute
        data = c_type(value)
        self.check(name, target, number, ctypes.addressof(data), ctypes.sizeof(data))

    def handle(self, device: int) -> int:
        """The library's handle of a device, which is created at the first call and never destroyed.

        device: must be the current device
        """
        with self._lock:
            if device not in self._handles:
                self._handles[device] = self.create("cublasLtCreate")
            return self._handles[device]


def wheels() -> list[Path]:
    """The paths of libcublasLt in the packages nvidia-cublas-cu12 (CUDA 12) and nvidia-cublas (CUDA 13)."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ModuleNotFoundError, ValueError):
        return []
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return [path for folder in folders for path in sorted(Path(folder).glob("*/lib/libcublasLt.so.*"))]


def _pathfinder_path() -> str:
    """Loads the library by NVIDIA's pathfinder, as CuPy does with libcublas. Returns: its path; "" if there is none."""
    try:
        from cuda import pathfinder

        return pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path or ""
    except (ImportError, RuntimeError, OSError):
        return ""


def candidates(xp: Any) -> Iterator[str]:
    """Names of the library, in the order to try: from NVIDIA's pathfinder, for the dynamic linker, from wheels."""
    name = f"libcublasLt.so.{xp.cuda.runtime.runtimeGetVersion() // 1000}"
    path = _pathfinder_path()
    if name in path:
        yield path
    yield name
    yield from [str(wheel) for wheel in wheels() if wheel.name == name]


def load(xp: Any) -> LtLibrary:
    """Loads the library for CuPy's version of CUDA. Raises: DeviceError, which lists every name that was tried."""
    tried = []
    for path in dict.fromkeys(candidates(xp)):
        try:
            return LtLibrary(ctypes.CDLL(path), path)
        except (OSError, DeviceError) as error:
            tried.append(f"{path}: {error}")
    major = xp.cuda.runtime.runtimeGetVersion() // 1000
    raise DeviceError(f"matrix products need cuBLASLt: {how_to_install(f'cuda{major}')}. Tried " + "; ".join(tried))


# The library once it is loaded. A test puts None here to use our own kernels.
_loaded: list[LtLibrary | None] = []
_lock = threading.Lock()


def library(xp: Any) -> LtLibrary | None:
    """The library, loaded at the first call. None if a test has switched it off: then our own kernels multiply.

    Raises: DeviceError if there is no library.
    """
    with _lock:
        if not _loaded:
            _loaded.append(load(xp))
        return _loaded[0]
