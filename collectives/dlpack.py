"""DLPack: NumPy's own reader, and bfloat16, which it refuses.

A capsule describes memory by a C struct. A bfloat16 array is read as integers of 16 bits, whose kind is written into
the struct before NumPy sees it, and viewed as bfloat16 afterwards.

Source: DLPack 1.0 (dlpack.h), and 0.8 for the capsule without version and flags; the Python side is "DLPack in Python"
of the array API standard 2023.12.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from collectives.errors import DtypeError
from collectives.reduction import BFLOAT16, Array

CPU, CUDA = 1, 2  # kinds of device
#: Those whose memory the CPU reads: its own, and what is pinned for CUDA or ROCm.
HOST = frozenset({CPU, 3, 11})
#: Those that a GPU array library can take: CUDA, ROCm, and CUDA's managed memory.
GPU = frozenset({CUDA, 10, 13})
_UINT, _BFLOAT = 1, 4  # DLDataTypeCode


class _Tensor(ctypes.Structure):
    """The head of DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
    )


_TENSOR_AT = {b"dltensor": 0, b"dltensor_versioned": 32}  # where a capsule's struct holds its DLTensor
_FLAGS_AT, _IS_COPIED = 24, 2  # the flags of a versioned struct
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


class _Capsule:
    """Hands a capsule to `numpy.from_dlpack`."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule


class _Writable:
    """The memory of an array that NumPy takes for read-only, since its producer cannot say otherwise."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def read(x: Any, flagged: bool = False) -> Array:
    """The memory of `x`, which has `__dlpack__`, as an array; read-only if its producer says so, or made a copy.

    A producer without flags (before DLPack 1.0) cannot say so, and its memory is taken as writable.
    flagged: only from a producer that says what may be written
    Raises: DtypeError if it does not; what `x.__dlpack__` and NumPy raise.
    """
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before version 1.0 knows no such argument
        capsule = x.__dlpack__()
    name = next((name for name in _TENSOR_AT if _is_valid(capsule, name)), None)
    if name is None:
        raise DtypeError(f"__dlpack__ returned no unused DLPack capsule, but {capsule!r:.80}")
    if flagged and name == b"dltensor":
        raise DtypeError("its DLPack does not say what may be written")
    address = _pointer(capsule, name)
    tensor = _Tensor.from_address(address + _TENSOR_AT[name])
    is_bfloat16 = (tensor.code, tensor.bits) == (_BFLOAT, 16)
    if is_bfloat16:
        tensor.code = _UINT
    copied = name != b"dltensor" and ctypes.c_uint64.from_address(address + _FLAGS_AT).value & _IS_COPIED
    array = np.from_dlpack(_Capsule(capsule))
    if name == b"dltensor":  # memory of no elements may have no address, which `_Writable` needs
        array = np.asarray(_Writable(array)) if array.size else np.empty_like(array)
    if copied:  # what is written there is lost
        array.flags.writeable = False
    return array.view(BFLOAT16) if is_bfloat16 else array
