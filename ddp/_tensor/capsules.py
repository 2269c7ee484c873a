"""DLPack, and bfloat16 through it: NumPy knows no such dtype there, but a capsule can be told what its bits are.

A capsule names its dtype by a code in a struct that it owns. So NumPy hands over, or takes, 16-bit integers, and the
code is changed on the way. So does a CuPy that knows bfloat16 no better.

Source: dlpack.h 1.0, DLManagedTensor and DLManagedTensorVersioned.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from ddp._device import CPU, device, on
from ddp._tensor.dtypes import bfloat16, parse
from ddp.errors import DdpError, DeviceError, DtypeError

_UINT, _BFLOAT = 1, 4  # DLDataTypeCode


# `collectives.dlpack` reads the same structs: a standard's layout is cheaper twice than a door between the packages, as
# tensors know nothing of collectives.
class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@functools.cache
def _pointers() -> tuple[Any, Any]:
    """PyCapsule_IsValid and PyCapsule_GetPointer."""
    kinds = ctypes.py_object, ctypes.c_char_p
    valid = ctypes.PYFUNCTYPE(ctypes.c_int, *kinds)(("PyCapsule_IsValid", ctypes.pythonapi))
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, *kinds)(("PyCapsule_GetPointer", ctypes.pythonapi))
    return valid, pointer


def _tensor(capsule: Any) -> _Tensor:
    valid, pointer = _pointers()
    if valid(capsule, b"dltensor_versioned"):
        whole: _Versioned = ctypes.cast(pointer(capsule, b"dltensor_versioned"), ctypes.POINTER(_Versioned)).contents
        return whole.tensor
    return ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents


def give(array: Any, options: dict[str, Any]) -> Any:
    """The capsule of a bfloat16 array."""
    try:
        return array.__dlpack__(**options)
    except (BufferError, RuntimeError):
        capsule = array.view(np.uint16).__dlpack__(**options)
    _tensor(capsule).code = _BFLOAT
    return capsule


class _Bits:
    """What NumPy or CuPy asks for an array, and gets a capsule of integers."""

    def __init__(self, capsule: Any, where: tuple[int, int]) -> None:
        self._capsule, self._where = capsule, where

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._where

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule


_CPU, _CUDA = (1,), (2, 13)  # kDLCPU; kDLCUDA, kDLCUDAManaged


def home(theirs: Any) -> device:
    """Where the memory of an array of another library is. Raises: DtypeError for no such array; DeviceError."""
    if not hasattr(theirs, "__dlpack__"):
        raise DtypeError(f"from_dlpack: expected an array with __dlpack__(), got {type(theirs).__name__}")
    kind, index = theirs.__dlpack_device__()
    if kind in _CPU:
        return CPU
    if kind in _CUDA:
        return device("cuda", index)
    raise DeviceError(f"from_dlpack: memory of DLPack's kind {int(kind)} is neither the CPU's nor CUDA's")


def shared(theirs: Any, where: device) -> Any:
    """An array over the memory of another library's, which is there. Raises: DtypeError for one of another dtype."""
    try:
        with on(where):
            array = _take(theirs, where.xp) if is_bfloat16(theirs) else where.xp.from_dlpack(theirs)
        parse(array.dtype)
    except (BufferError, RuntimeError) as error:
        if isinstance(error, DdpError):
            raise
        dtype = getattr(theirs, "dtype", "unknown dtype")
        raise DtypeError(f"from_dlpack: {where.xp.__name__} does not take an array of {dtype}: {error}") from error
    return array


def _take(theirs: Any, xp: Any) -> Any:
    """The bfloat16 array of another library's, over the same memory, on the current device and stream.

    Raises: BufferError if it is none.
    """
    if isinstance(theirs, xp.ndarray):
        return theirs
    try:
        array = xp.from_dlpack(theirs)
    except (BufferError, RuntimeError):
        options = {} if xp is np else {"stream": xp.cuda.get_current_stream().ptr or 1}
        try:
            capsule = theirs.__dlpack__(max_version=(1, 0), **options)
        except TypeError:  # of a library from before the versions
            capsule = theirs.__dlpack__(**options)
        told = _tensor(capsule)
        if (told.code, told.bits, told.lanes) != (_BFLOAT, 16, 1):
            raise BufferError(f"no bfloat16, but DLPack's dtype {told.code} of {told.bits} bits") from None
        told.code = _UINT
        array = xp.from_dlpack(_Bits(capsule, theirs.__dlpack_device__())).view(bfloat16)
    return array


def is_bfloat16(theirs: Any) -> bool:
    """Whether an array of any library says that it is of bfloat16."""
    return str(getattr(theirs, "dtype", "")).endswith("bfloat16")
