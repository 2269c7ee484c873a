"""Every NCCL function that is called here, declared once, whatever loaded the library.

A binding that declares counts as 32-bit integers truncates them silently, and one that is older than the library has no
name for its newer functions, types and result codes. So the functions come from this table alone; a binding, if there
is one, only tells where the library is. Its own declarations are left as they are: each function is looked up anew.

Source: nccl.h of NCCL 2.32, and the versions in NVIDIA's release notes.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np

from collectives.errors import BackendError, DtypeError, NcclError
from collectives.nccl_config import Config
from collectives.reduction import BFLOAT16, ReduceOp

UNIQUE_ID_BYTES = 128
NO_COLOR = -1  # of a rank that takes part in ncclCommSplit and is in none of the new communicators
SYMMETRIC = 1  # of a window at the same place in the same memory on every rank: NCCL_WIN_COLL_SYMMETRIC
HOST_IMMEDIATE = 1  # ncclRedOpCreatePreMulSum reads the factor before it returns

SUCCESS = 0
INVALID_USAGE = 5
IN_PROGRESS = 7
TIMEOUT = 8

#: What a result code means, and what to look at.
RESULTS = {
    SUCCESS: "ncclSuccess",
    1: "ncclUnhandledCudaError, a call of CUDA failed",
    2: "ncclSystemError, a call of the operating system failed (network, shared memory, limits)",
    3: "ncclInternalError, a bug in NCCL or damaged memory",
    4: "ncclInvalidArgument, an argument is wrong (a pointer that is not of this device, say)",
    INVALID_USAGE: "ncclInvalidUsage, a call in the wrong order or on the wrong device",
    6: "ncclRemoteError, another rank has gone or the network failed",
    IN_PROGRESS: "ncclInProgress, the call has not finished",
    TIMEOUT: "ncclTimeout, NCCL's own time limit passed",
}


class UniqueId(ctypes.Structure):
    """What ranks of one communicator must share before they can meet; passed by value."""

    _fields_ = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]  # ctypes reads it so


_COMM = c_void_p
_STREAM = c_void_p
_BUFFER = c_void_p
_DTYPE = c_int
_OP = c_int
_REGISTERED = c_void_p

#: The arguments of every function; all return a result code, but those of `_TEXTS`.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclGetErrorString": (c_int,),
    "ncclGetLastError": (_COMM,),
    "ncclCommInitRankConfig": (POINTER(_COMM), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommSplit": (_COMM, c_int, c_int, POINTER(_COMM), POINTER(Config)),
    "ncclCommFinalize": (_COMM,),
    "ncclCommDestroy": (_COMM,),
    "ncclCommAbort": (_COMM,),
    "ncclCommGetAsyncError": (_COMM, POINTER(c_int)),
    "ncclCommCount": (_COMM, POINTER(c_int)),
    "ncclCommUserRank": (_COMM, POINTER(c_int)),
    "ncclRedOpCreatePreMulSum": (POINTER(_OP), c_void_p, _DTYPE, c_int, _COMM),
    "ncclRedOpDestroy": (_OP, _COMM),
    "ncclAllReduce": (_BUFFER, _BUFFER, c_size_t, _DTYPE, _OP, _COMM, _STREAM),
    "ncclReduce": (_BUFFER, _BUFFER, c_size_t, _DTYPE, _OP, c_int, _COMM, _STREAM),
    "ncclBroadcast": (_BUFFER, _BUFFER, c_size_t, _DTYPE, c_int, _COMM, _STREAM),
    "ncclAllGather": (_BUFFER, _BUFFER, c_size_t, _DTYPE, _COMM, _STREAM),
    "ncclReduceScatter": (_BUFFER, _BUFFER, c_size_t, _DTYPE, _OP, _COMM, _STREAM),
    "ncclSend": (_BUFFER, c_size_t, _DTYPE, c_int, _COMM, _STREAM),
    "ncclRecv": (_BUFFER, c_size_t, _DTYPE, c_int, _COMM, _STREAM),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # From 2.19 on
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),
    "ncclMemFree": (c_void_p,),
    "ncclCommRegister": (_COMM, _BUFFER, c_size_t, POINTER(_REGISTERED)),
    "ncclCommDeregister": (_COMM, _REGISTERED),
    # From 2.27 on
    "ncclCommWindowRegister": (_COMM, _BUFFER, c_size_t, POINTER(_REGISTERED), c_int),
    "ncclCommWindowDeregister": (_COMM, _REGISTERED),
}
_TEXTS = ("ncclGetErrorString", "ncclGetLastError")
#: The oldest version that is used: it has nonblocking communicators and splits them.
OLDEST = (2, 18)

#: NCCL's number of a dtype.
DTYPES: dict[np.dtype[Any], int] = {
    np.dtype(kind): code
    for code, kind in enumerate(
        (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64, BFLOAT16)
    )
}

#: NCCL's number of a reduction. NCCL's mean of integers is their sum, divided.
OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.MEAN: 4}


def parse_version(code: int) -> tuple[int, int, int]:
    """`ncclGetVersion`'s number taken apart: 2708 is (2, 7, 8), 22105 is (2, 21, 5)."""
    unit = 1000 if code < 10000 else 10000
    return code // unit, code % unit // 100, code % 100


class Nccl:
    """A loaded libnccl under the table.

    path: the file it was loaded from; version: (major, minor, patch)
    Raises: BackendError if the library is not NCCL, or older than 2.18.
    """

    def __init__(self, dll: ctypes.CDLL, path: str = "libnccl") -> None:
        self.path = path
        self._functions: dict[str, Any] = {}
        for name, arguments in FUNCTIONS.items():
            if hasattr(dll, name):
                found = dll[name]  # a new object: other users of the library keep their declarations
                found.argtypes, found.restype = arguments, c_char_p if name in _TEXTS else c_int
                self._functions[name] = found
        if not self.has("ncclGetVersion"):
            raise BackendError(f"{path} is not NCCL, and not linked to it: it has no ncclGetVersion")
        code = c_int()
        result = self.call("ncclGetVersion", ctypes.byref(code))
        if result != SUCCESS:
            raise BackendError(f"{path} cannot tell its version: ncclGetVersion returned {RESULTS.get(result, result)}")
        self.version = parse_version(code.value)
        if self.version[:2] < OLDEST:
            raise BackendError(f"{self!r} is too old: NCCL {'.'.join(map(str, OLDEST))} or newer is needed")

    def __repr__(self) -> str:
        return f"<NCCL {'.'.join(map(str, self.version))} of {self.path}>"

    def has(self, name: str) -> bool:
        """True if the library has this function of the table."""
        return name in self._functions

    def call(self, name: str, *arguments: Any) -> Any:
        """The function's result, unchecked. Raises: BackendError if the library has no such function."""
        if name not in self._functions:
            raise BackendError(f"{self!r} has no {name}: it is too old, or incomplete")
        return self._functions[name](*arguments)

    def checked(self, name: str, *arguments: Any) -> None:
        """Makes a call that belongs to no communicator. Raises: NcclError if it fails; BackendError as `call`."""
        result = self.call(name, *arguments)
        if result != SUCCESS:
            raise NcclError(f"{name} returned {self.explain(result)}")

    def dtype_code(self, dtype: np.dtype[Any]) -> int:
        """NCCL's number of a dtype. Raises: DtypeError if NCCL has none."""
        if dtype not in DTYPES:
            raise DtypeError(f"NCCL has no {dtype}; it has {', '.join(map(str, DTYPES))}: move it as bytes (uint8)")
        return DTYPES[dtype]

    def explain(self, result: int) -> str:
        """A result code in words, with NCCL's own words about the last error of this process."""
        meaning = RESULTS.get(result)
        if meaning is None:
            meaning = _text(self.call("ncclGetErrorString", result)) or "which this version of NCCL does not explain"
        words = _text(self.call("ncclGetLastError", None))
        return f"{result} ({meaning})" + (f"; NCCL says: {words}" if words else "")


def _text(text: bytes | None) -> str:
    return text.decode(errors="replace").strip() if text else ""
