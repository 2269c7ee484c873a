"""libnccl: finds and loads it, and declares every function of it that is called here.

Installations differ in where the library is:

    "pynccl"  the binding pynccl finds and loads it (through numba, which must be installed with it)
    "cupy"    the library that `cupy.cuda.nccl` is linked to
    "path"    the file in the package nvidia-nccl-cu12 or -cu13, otherwise the system's

A binding that declares counts as 32-bit integers truncates them silently, and one that is older than the library lacks
its newer functions and result codes. So a binding only locates the library; `FUNCTIONS` declares the functions.

Source: nccl.h of NCCL 2.18 to 2.32.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collectives.errors import ArgumentError, BackendError, DtypeError, NcclError
from collectives.native import BFLOAT16
from collectives.reduction import ReduceOp

# NCCL_CONFIG_UNDEF_INT
_UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF
_MOST = 2**31 - 1
#: For each option: its field of `Config`, and the smallest and largest value that NCCL accepts. For an option that is a
#: text, None takes the place of the smallest value.
_OPTIONS: dict[str, tuple[str, int | None, int]] = {
    "min_ctas": ("minCTAs", 1, _MOST),
    "max_ctas": ("maxCTAs", 1, _MOST),
    "cga_cluster_size": ("cgaClusterSize", 0, 8),
    "net_name": ("netName", None, 0),
}


class Config(ctypes.Structure):
    """`ncclConfig_t` of NCCL 2.18. Newer libraries accept it, since it contains its size and version."""

    # Read by ctypes.
    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
    ]


@dataclass(frozen=True, kw_only=True)
class NcclConfig:
    """Options of NCCL's communicators, the same on every rank. None: NCCL and its environment variables decide.

    min_ctas, max_ctas: minimum and maximum number of thread blocks, or channels, that a collective uses; fewer leave
    more of the GPU to concurrent computations. cga_cluster_size: thread blocks per cluster, 0 to 8, on Hopper and
    newer. net_name: the network plugin, e.g. "IB" or "Socket".

    Raises: ArgumentError for values that NCCL would refuse, and for numbers that are not of type int.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    net_name: str | None = None

    def __post_init__(self) -> None:
        for name, (_, least, most) in _OPTIONS.items():
            value = getattr(self, name)
            is_text = isinstance(value, str) and value != ""
            valid = is_text if least is None else type(value) is int and least <= value <= most
            if value is not None and not valid:
                raise ArgumentError(f"NcclConfig: {name}={value!r} is nothing that NCCL takes")
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise ArgumentError(f"NcclConfig: min_ctas={self.min_ctas} is above max_ctas={self.max_ctas}")


def configuration(options: NcclConfig | None) -> Config:
    """The C structure with the options of a nonblocking communicator."""
    config = Config(size=ctypes.sizeof(Config), magic=_MAGIC, version=21800, blocking=0, splitShare=_UNDEFINED)
    for name, (field, least, _) in _OPTIONS.items():
        value = getattr(options, name, None)
        if least is not None:
            setattr(config, field, _UNDEFINED if value is None else value)
        elif value is not None:  # An undefined text is a null pointer.
            setattr(config, field, value.encode())
    return config


UNIQUE_ID_BYTES = 128

SUCCESS = 0
IN_PROGRESS = 7
TIMEOUT = 8

#: The meaning of each result code, and what to check.
RESULTS = {
    SUCCESS: "ncclSuccess",
    1: "ncclUnhandledCudaError, a call of CUDA failed",
    2: "ncclSystemError, a call of the operating system failed (network, shared memory, limits)",
    3: "ncclInternalError, a bug in NCCL or damaged memory",
    4: "ncclInvalidArgument, an argument is wrong (a pointer that is not of this device, say)",
    5: "ncclInvalidUsage, a call in the wrong order or on the wrong device",
    6: "ncclRemoteError, another rank has gone or the network failed",
    IN_PROGRESS: "ncclInProgress, the call has not finished",
    TIMEOUT: "ncclTimeout, NCCL's own time limit passed",
}


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which all ranks of a new communicator need to connect; passed by value."""

    # Read by ctypes.
    _fields_ = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]


_COMM = c_void_p
_STREAM = c_void_p
_BUFFER = c_void_p
_DTYPE = c_int
_OP = c_int

#: The argument types of every function. All return a result code, except those in `_TEXTS`.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclGetErrorString": (c_int,),
    "ncclGetLastError": (_COMM,),
    "ncclCommInitRankConfig": (POINTER(_COMM), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommFinalize": (_COMM,),
    "ncclCommDestroy": (_COMM,),
    "ncclCommAbort": (_COMM,),
    "ncclCommGetAsyncError": (_COMM, POINTER(c_int)),
    "ncclAllReduce": (_BUFFER, _BUFFER, c_size_t, _DTYPE, _OP, _COMM, _STREAM),
    "ncclReduce": (_BUFFER, _BUFFER, c_size_t, _DTYPE, _OP, c_int, _COMM, _STREAM),
    "ncclBroadcast": (_BUFFER, _BUFFER, c_size_t, _DTYPE, c_int, _COMM, _STREAM),
    "ncclAllGather": (_BUFFER, _BUFFER, c_size_t, _DTYPE, _COMM, _STREAM),
    "ncclReduceScatter": (_BUFFER, _BUFFER, c_size_t, _DTYPE, _OP, _COMM, _STREAM),
    "ncclSend": (_BUFFER, c_size_t, _DTYPE, c_int, _COMM, _STREAM),
    "ncclRecv": (_BUFFER, c_size_t, _DTYPE, c_int, _COMM, _STREAM),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}
_TEXTS = ("ncclGetErrorString", "ncclGetLastError")
#: The oldest supported version: older ones lack parts of nonblocking communicators.
OLDEST = (2, 18)

#: NCCL's code of each dtype.
DTYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.int8): 0,
    np.dtype(np.uint8): 1,
    np.dtype(np.int32): 2,
    np.dtype(np.uint32): 3,
    np.dtype(np.int64): 4,
    np.dtype(np.uint64): 5,
    np.dtype(np.float16): 6,
    np.dtype(np.float32): 7,
    np.dtype(np.float64): 8,
    BFLOAT16: 9,
}

#: NCCL's code of each reduction.
OPS = {
    ReduceOp.SUM: 0,
    ReduceOp.PROD: 1,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
    ReduceOp.MEAN: 4,
}


class Nccl:
    """A loaded libnccl, whose functions are called by name.

    path: the file from which it was loaded; version: (major, minor, patch)
    Raises: BackendError if the library is not NCCL, does not tell its version, or is older than 2.18.
    """

    def __init__(self, dll: ctypes.CDLL, path: str = "libnccl") -> None:
        self.path = path
        self._functions: dict[str, Any] = {}
        for name, arguments in FUNCTIONS.items():
            if hasattr(dll, name):
                function = dll[name]  # A new object: other users of the library keep their declarations.
                function.argtypes = arguments
                function.restype = c_char_p if name in _TEXTS else c_int
                self._functions[name] = function
        if "ncclGetVersion" not in self._functions:
            raise BackendError(f"{path} is not NCCL, and not linked to it: it has no ncclGetVersion")
        code = c_int()
        result = self.call("ncclGetVersion", ctypes.byref(code))
        if result != SUCCESS:
            raise BackendError(f"{path}: ncclGetVersion returned {RESULTS.get(result, result)}")
        self.version = code.value // 10000, code.value % 10000 // 100, code.value % 100  # 22105 is 2.21.5
        if self.version[:2] < OLDEST:
            raise BackendError(f"{self!r} is too old: NCCL {'.'.join(map(str, OLDEST))} or newer is needed")

    def __repr__(self) -> str:
        return f"<NCCL {'.'.join(map(str, self.version))} of {self.path}>"

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the function and returns its result, unchecked. Raises: BackendError if the library lacks it."""
        if name not in self._functions:
            raise BackendError(f"{self!r} has no {name}: it is too old, or incomplete")
        return self._functions[name](*arguments)

    def checked(self, name: str, *arguments: Any) -> None:
        """Calls a function that takes no communicator. Raises: NcclError if it fails; what `call` raises."""
        result = self.call(name, *arguments)
        if result != SUCCESS:
            raise NcclError(f"{name} returned {self.explain(result)}")

    def dtype_code(self, dtype: np.dtype[Any]) -> int:
        """NCCL's code of a dtype. Raises: DtypeError if NCCL has none."""
        if dtype not in DTYPES:
            raise DtypeError(f"NCCL has no {dtype}; it has {', '.join(map(str, DTYPES))}: move it as bytes (uint8)")
        return DTYPES[dtype]

    def explain(self, result: int) -> str:
        """A result code as text, with NCCL's own text about the last error of this process."""
        meaning = RESULTS.get(result)
        if meaning is None:
            meaning = _text(self.call("ncclGetErrorString", result)) or "which this version of NCCL does not explain"
        last_error = _text(self.call("ncclGetLastError", None))
        return f"{result} ({meaning})" + (f"; NCCL says: {last_error}" if last_error else "")


def _text(text: bytes | None) -> str:
    return text.decode(errors="replace").strip() if text else ""


# Where the library comes from ----------------------------------------------------------------------------------------

_SONAME = "libnccl.so.2"
# The variable by which pynccl finds the library; if it is not set, pynccl looks in sys.prefix/lib only.
_PYNCCL_PATH = "NUMBA_NCCLLIB"


def load(source: str = "auto") -> Nccl:
    """Loads the library.

    source: "pynccl", "cupy", "path", or "auto": the first of these that works, in this order
    Raises: ArgumentError for another source; BackendError if none works, listing every attempt and why it failed.
    """
    if source not in ("auto", *_LOADERS):
        raise ArgumentError(f"source should be auto, {', '.join(_LOADERS)}, is {source!r}")
    tried = []
    for name in _LOADERS if source == "auto" else (source,):
        try:
            dll = _LOADERS[name]()
            return Nccl(dll, dll._name)
        except Exception as error:  # pynccl, numba and CuPy may raise anything.
            tried.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
    raise BackendError(f"NCCL cannot be used: {_SONAME} could not be loaded. Tried " + "; ".join(tried))


def wheel() -> Path | None:
    """The library's file in the package nvidia-nccl-cu12 or -cu13; None if neither is installed."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((path for folder in folders for path in sorted(Path(folder).glob(f"*/lib/{_SONAME}"))), None)


def _from_pynccl() -> ctypes.CDLL:
    path = None if _PYNCCL_PATH in os.environ else wheel()  # The user's own choice takes precedence.
    if path is not None:
        os.environ[_PYNCCL_PATH] = str(path.parent)
    try:
        from pynccl import binding

        # pynccl's other classes need a numba context, and declare counts as 32-bit integers.
        return binding.libnccl().dll
    finally:
        if path is not None:
            del os.environ[_PYNCCL_PATH]


def _from_cupy() -> ctypes.CDLL:
    from cupy.cuda import nccl

    if not nccl.available:
        raise BackendError("this CuPy has no NCCL: its own loader found no library, or it was built without")
    extension = sys.modules[nccl.NcclCommunicator.__module__].__file__
    return ctypes.CDLL(extension)  # Symbols are also looked up in the libraries that it is linked to.


def _from_path() -> ctypes.CDLL:
    return ctypes.CDLL(str(wheel() or _SONAME))


_LOADERS: dict[str, Callable[[], ctypes.CDLL]] = {
    "pynccl": _from_pynccl,
    "cupy": _from_cupy,
    "path": _from_path,
}
