"""Every NCCL function that is called here, declared once, whatever loaded the library.

A binding that declares counts as 32-bit integers truncates them silently, and one that is older than the library has no
name for its newer functions, types and result codes. So the functions come from this table alone; a binding, if there
is one, only tells where the library is. Its own declarations are left as they are: each function is looked up anew.

Source: nccl.h of NCCL 2.32, and the versions in NVIDIA's release notes.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from collectives.errors import BackendError, DtypeError, NcclError
from collectives.nccl_config import Config
from collectives.reduction import ReduceOp

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


@dataclass(frozen=True)
class Function:
    """One function of libnccl. since: the version that brought it, (major, minor)"""

    name: str
    arguments: tuple[Any, ...]
    since: tuple[int, int]
    result: Any = c_int


_COMM = c_void_p
_STREAM = c_void_p
_BUFFER = c_void_p
_DTYPE = c_int
_OP = c_int
_REGISTERED = c_void_p

FUNCTIONS = {
    function.name: function
    for function in (
        Function("ncclGetVersion", (POINTER(c_int),), (2, 3)),
        Function("ncclGetUniqueId", (POINTER(UniqueId),), (2, 0)),
        Function("ncclGetErrorString", (c_int,), (2, 0), c_char_p),
        Function("ncclGetLastError", (_COMM,), (2, 13), c_char_p),
        Function("ncclCommInitRank", (POINTER(_COMM), c_int, UniqueId, c_int), (2, 0)),
        Function("ncclCommInitRankConfig", (POINTER(_COMM), c_int, UniqueId, c_int, POINTER(Config)), (2, 14)),
        Function("ncclCommSplit", (_COMM, c_int, c_int, POINTER(_COMM), POINTER(Config)), (2, 18)),
        Function("ncclCommFinalize", (_COMM,), (2, 14)),
        Function("ncclCommDestroy", (_COMM,), (2, 0)),
        Function("ncclCommAbort", (_COMM,), (2, 4)),
        Function("ncclCommGetAsyncError", (_COMM, POINTER(c_int)), (2, 4)),
        Function("ncclCommCount", (_COMM, POINTER(c_int)), (2, 0)),
        Function("ncclCommUserRank", (_COMM, POINTER(c_int)), (2, 0)),
        Function("ncclRedOpCreatePreMulSum", (POINTER(_OP), c_void_p, _DTYPE, c_int, _COMM), (2, 11)),
        Function("ncclRedOpDestroy", (_OP, _COMM), (2, 11)),
        Function("ncclAllReduce", (_BUFFER, _BUFFER, c_size_t, _DTYPE, _OP, _COMM, _STREAM), (2, 0)),
        Function("ncclReduce", (_BUFFER, _BUFFER, c_size_t, _DTYPE, _OP, c_int, _COMM, _STREAM), (2, 0)),
        Function("ncclBroadcast", (_BUFFER, _BUFFER, c_size_t, _DTYPE, c_int, _COMM, _STREAM), (2, 2)),
        Function("ncclAllGather", (_BUFFER, _BUFFER, c_size_t, _DTYPE, _COMM, _STREAM), (2, 0)),
        Function("ncclReduceScatter", (_BUFFER, _BUFFER, c_size_t, _DTYPE, _OP, _COMM, _STREAM), (2, 0)),
        Function("ncclSend", (_BUFFER, c_size_t, _DTYPE, c_int, _COMM, _STREAM), (2, 7)),
        Function("ncclRecv", (_BUFFER, c_size_t, _DTYPE, c_int, _COMM, _STREAM), (2, 7)),
        Function("ncclGroupStart", (), (2, 0)),
        Function("ncclGroupEnd", (), (2, 0)),
        Function("ncclMemAlloc", (POINTER(c_void_p), c_size_t), (2, 19)),
        Function("ncclMemFree", (c_void_p,), (2, 19)),
        Function("ncclCommRegister", (_COMM, _BUFFER, c_size_t, POINTER(_REGISTERED)), (2, 19)),
        Function("ncclCommDeregister", (_COMM, _REGISTERED), (2, 19)),
        Function("ncclCommWindowRegister", (_COMM, _BUFFER, c_size_t, POINTER(_REGISTERED), c_int), (2, 27)),
        Function("ncclCommWindowDeregister", (_COMM, _REGISTERED), (2, 27)),
    )
}

#: NCCL's number of a dtype, and the version that brought it.
DTYPES: dict[np.dtype[Any], tuple[int, tuple[int, int]]] = {
    np.dtype(np.int8): (0, (2, 0)),
    np.dtype(np.uint8): (1, (2, 0)),
    np.dtype(np.int32): (2, (2, 0)),
    np.dtype(np.uint32): (3, (2, 0)),
    np.dtype(np.int64): (4, (2, 0)),
    np.dtype(np.uint64): (5, (2, 0)),
    np.dtype(np.float16): (6, (2, 0)),
    np.dtype(np.float32): (7, (2, 0)),
    np.dtype(np.float64): (8, (2, 0)),
    np.dtype(ml_dtypes.bfloat16): (9, (2, 10)),
}

#: NCCL's number of a reduction, and the version that brought it. NCCL's mean of integers is their sum, divided.
OPS: dict[ReduceOp, tuple[int, tuple[int, int]]] = {
    ReduceOp.SUM: (0, (2, 0)),
    ReduceOp.PROD: (1, (2, 0)),
    ReduceOp.MAX: (2, (2, 0)),
    ReduceOp.MIN: (3, (2, 0)),
    ReduceOp.MEAN: (4, (2, 10)),
}


def parse_version(code: int) -> tuple[int, int, int]:
    """`ncclGetVersion`'s number taken apart: 2708 is (2, 7, 8), 22105 is (2, 21, 5)."""
    unit = 1000 if code < 10000 else 10000
    return code // unit, code % unit // 100, code % 100


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


class Nccl:
    """A loaded libnccl under the table.

    path: the file it was loaded from; version: (major, minor, patch)

    Raises: BackendError if the library has no ncclGetVersion, and so is not NCCL.
    """

    def __init__(self, dll: ctypes.CDLL, path: str = "libnccl") -> None:
        self.path = path
        self._functions: dict[str, Any] = {}
        for function in FUNCTIONS.values():
            if hasattr(dll, function.name):
                found = dll[function.name]  # a new object: other users of the library keep their declarations
                found.argtypes = function.arguments
                found.restype = function.result
                self._functions[function.name] = found
        if "ncclGetVersion" not in self._functions:
            raise BackendError(f"{path} is not NCCL: it has no ncclGetVersion")
        code = c_int()
        result = self._functions["ncclGetVersion"](ctypes.byref(code))
        if result != SUCCESS:
            raise BackendError(f"{path} cannot tell its version: ncclGetVersion returned {RESULTS.get(result, result)}")
        self.version = parse_version(code.value)

    def __repr__(self) -> str:
        return f"<NCCL {_dotted(self.version)} of {self.path}>"

    def has(self, name: str) -> bool:
        """True if the library has this function of the table."""
        assert name in FUNCTIONS, name
        return name in self._functions

    def call(self, name: str, *arguments: Any) -> Any:
        """The function's result, unchecked. Raises: BackendError naming the version that has it, if this has not."""
        try:
            function = self._functions[name]
        except KeyError:
            raise BackendError(self._lack(name)) from None
        return function(*arguments)

    def checked(self, name: str, *arguments: Any) -> None:
        """Makes a call that belongs to no communicator. Raises: NcclError if it fails; BackendError as `call`."""
        result = self.call(name, *arguments)
        if result != SUCCESS:
            raise NcclError(f"{name} returned {self.explain(result)}")

    def has_op(self, op: ReduceOp) -> bool:
        """True if the library is new enough for this reduction."""
        return self.version[:2] >= OPS[op][1]

    def op_code(self, op: ReduceOp) -> int:
        """NCCL's number of a reduction. Raises: BackendError if the library is too old for it."""
        code, since = OPS[op]
        if self.version[:2] < since:
            raise BackendError(f"a {op.value} by NCCL needs version {_dotted(since)}, and this is {self!r}")
        return code

    def dtype_code(self, dtype: np.dtype[Any]) -> int:
        """NCCL's number of a dtype. Raises: DtypeError if NCCL has none; BackendError if the library is too old."""
        if dtype not in DTYPES:
            raise DtypeError(f"NCCL has no {dtype}; it has {', '.join(map(str, DTYPES))}: move it as bytes (uint8)")
        code, since = DTYPES[dtype]
        if self.version[:2] < since:
            raise BackendError(f"{dtype} by NCCL needs version {_dotted(since)}, and this is {self!r}")
        return code

    def last_error(self) -> str:
        """NCCL's own words about the last error of this process; "" if it has none, or is older than 2.13."""
        if not self.has("ncclGetLastError"):
            return ""
        text = self.call("ncclGetLastError", None)
        return text.decode(errors="replace").strip() if text else ""

    def explain(self, result: int) -> str:
        """A result code in words, with NCCL's last error."""
        meaning = RESULTS.get(result)
        if meaning is None:
            text = self.call("ncclGetErrorString", result)
            meaning = text.decode(errors="replace") if text else "which this version of NCCL does not explain"
        words = self.last_error()
        return f"{result} ({meaning})" + (f"; NCCL says: {words}" if words else "")

    def _lack(self, name: str) -> str:
        since = FUNCTIONS[name].since
        if self.version[:2] < since:
            return f"{name} needs NCCL {_dotted(since)} or newer, and this is {self!r}"
        return f"{self!r} has no {name}, though NCCL has it since {_dotted(since)}: the library is incomplete"
