"""cuBLASLt by ctypes: every matrix product on a GPU goes through this library, and CuPy has no binding of it.

CuPy's own products refuse to run while a CUDA graph is captured, widen stacks of float16, refuse those of bfloat16,
and copy what is transposed. cuBLASLt does none of this, and adds a bias and an activation while it is at it.

The library is the one beside CuPy's own libcublas, so that there is one in the process; the functions come from the
table here alone. Pointers go in as plain integers, so that a stand-in written in Python takes the same calls.

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

#: Every function that is called here: its arguments, and what it returns.
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
    # handle, description, A, B, C, D, preference, how many are asked for, the results, how many there are
    "cublasLtMatmulAlgoGetHeuristic": ((*(Pointer,) * 7, c_int, Pointer, Pointer), c_int),
    # handle, description, alpha, A, layout, B, layout, beta, C, layout, D, layout, algorithm, workspace, size, stream
    "cublasLtMatmul": ((*(Pointer,) * 14, c_size_t, Pointer), c_int),
}

# cublasStatus_t
SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 7, 15

# cudaDataType: CUDA_R_...
TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}

# cublasComputeType_t: CUBLAS_COMPUTE_...
COMPUTE_32F, COMPUTE_64F, COMPUTE_32F_FAST_TF32 = 68, 70, 77

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
REDUCTION_COMPUTE_TYPE, REDUCTION_MASK = 2, 7

# cublasLtEpilogue_t: CUBLASLT_EPILOGUE_..., those that are used here. The number of one is the sum of its parts'.
_PARTS = {"DEFAULT": 1, "RELU": 2, "BIAS": 4, "BGRAD": 16, "GELU": 32, "AUX": 128, "DRELU": 136, "DGELU": 192}
_PARTS["BGRADB"] = 512
_NAMES = (
    "DEFAULT BIAS BGRADB RELU RELU_AUX RELU_BIAS RELU_AUX_BIAS DRELU DRELU_BGRAD "
    "GELU GELU_AUX GELU_BIAS GELU_AUX_BIAS DGELU DGELU_BGRAD"
)
EPILOGUES = {name: sum(_PARTS[part] for part in name.split("_")) for name in _NAMES.split()}


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, which is its first member, and what it needs."""

    _fields_ = [  # ctypes reads it so
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class LtLibrary:
    """A loaded libcublasLt under the table. path: the file it was loaded from; version: 120903 is 12.9.3.

    Raises: DeviceError if the library lacks a function of the table.
    """

    def __init__(self, dll: Any, path: str = "libcublasLt") -> None:
        self.path = path
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, (arguments, result) in FUNCTIONS.items():
            try:
                function = dll[name]  # a new object: whoever loaded the library keeps his declarations
            except AttributeError:
                raise DeviceError(f"{path} is not the cuBLASLt of CUDA 12 or newer: it has no {name}") from None
            function.argtypes, function.restype = arguments, result
            self._functions[name] = function
        self.version = int(self._functions["cublasLtGetVersion"]())
        self.matmul = self._functions["cublasLtMatmul"]
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<cuBLASLt {self.version} of {self.path}>"

    def call(self, name: str, *arguments: Any) -> int:
        """The function's status, unchecked."""
        return int(self._functions[name](*arguments))

    def check(self, name: str, *arguments: Any) -> None:
        """Calls a function. Raises: DeviceError if it fails."""
        status = self.call(name, *arguments)
        if status != SUCCESS:
            raise DeviceError(f"{name}: {self.explain(status)}")

    def explain(self, status: int) -> str:
        """A status in words."""
        name = self._functions["cublasLtGetStatusString"](status)
        return f"{name.decode(errors='replace') if name else 'an unknown status'} ({status}) of {self!r}"

    def create(self, name: str, *arguments: Any) -> int:
        """A new object of the library, by the function of this name, as its address. Raises: DeviceError."""
        made = c_void_p()
        self.check(name, ctypes.addressof(made), *arguments)
        assert made.value is not None, name
        return made.value

    def set(self, name: str, target: int, attribute: tuple[int, Any], value: int) -> None:
        """Sets an attribute of the tables above. name: of the function. Raises: DeviceError."""
        number, kind = attribute
        held = kind(value)
        self.check(name, target, number, ctypes.addressof(held), ctypes.sizeof(held))

    def handle(self, device: int) -> int:
        """The handle of a device, which is the current one; made on first use, and kept as long as the process."""
        with self._lock:
            if device not in self._handles:
                self._handles[device] = self.create("cublasLtCreate")
            return self._handles[device]


def wheels() -> list[Path]:
    """The library's files in the packages nvidia-cublas-cu12, nvidia-cublas-cu13 and nvidia-cublas."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ModuleNotFoundError, ValueError):
        return []
    homes = (spec.submodule_search_locations or ()) if spec else ()
    return [found for home in homes for found in sorted(Path(home).glob("*/lib/libcublasLt.so.*"))]


def _found_as_by_cupy() -> str:
    """Loads the library from where CuPy finds its libcublas. Returns: its path; "" if CuPy's pathfinder finds none."""
    try:
        from cuda import pathfinder

        return pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path or ""
    except (ImportError, RuntimeError, OSError):
        return ""


def candidates(xp: Any) -> Iterator[str]:
    """File names to try: where CuPy finds its libcublas, then the dynamic linker's search path, then pip's wheels."""
    name = f"libcublasLt.so.{xp.cuda.runtime.runtimeGetVersion() // 1000}"
    found = _found_as_by_cupy()
    if name in found:
        yield found
    yield name
    yield from [str(path) for path in wheels() if path.name == name]


def load(xp: Any) -> LtLibrary:
    """The library under the table, for this CuPy. Raises: DeviceError, with everything that was tried."""
    tried = []
    for path in dict.fromkeys(candidates(xp)):
        try:
            return LtLibrary(ctypes.CDLL(path), path)
        except (OSError, DeviceError) as error:
            tried.append(f"{path}: {error}")
    major = xp.cuda.runtime.runtimeGetVersion() // 1000
    raise DeviceError(f"matrix products need cuBLASLt: {how_to_install(f'cuda{major}')}. Tried " + "; ".join(tried))


_found: list[LtLibrary | None] = []
_lock = threading.Lock()


def library(xp: Any) -> LtLibrary | None:
    """The library of this process, loaded when it is first asked for. None: the kernels of ours multiply instead.

    Raises: DeviceError if it is not to be found.
    """
    with _lock:
        if not _found:
            _found.append(load(xp))
        return _found[0]
