"""DLPack read by our own hand: NumPy's reader refuses bfloat16, and before NumPy 2.1 all that is writable.

A producer's capsule holds a C struct that describes memory, and a function that gives the memory back. Who consumes a
capsule renames it and owes that call, once, when nobody looks at the memory any more.

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

_MAJOR = 1  # the version of the flagged struct that this module reads
_READ_ONLY, _COPIED = 1, 2  # flags
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_BFLOAT = 4


class _Tensor(ctypes.Structure):
    """DLTensor: strides are in elements, and NULL for C-contiguous."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned: what stands before the tensor never changes its place."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# A capsule keeps the pointer to its name, so these must live as long as the process.
_OLD, _NEW = b"dltensor", b"dltensor_versioned"
_USED = {_OLD: b"used_dltensor", _NEW: b"used_dltensor_versioned"}

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes, _rename.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int

# Called with the interpreter lock held, as every other consumer in Python does.
_DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Memory:
    """A producer's memory, which NumPy arrays keep alive as their base; given back when the last of them dies."""

    __slots__ = ("__array_interface__", "_address", "_deleter")

    def __init__(self, interface: dict[str, Any], address: int, deleter: int | None) -> None:
        self.__array_interface__ = interface
        self._address = address
        self._deleter = _DELETER(deleter) if deleter else None

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._address)


def read(x: Any) -> Array:
    """The memory of `x`, which has `__dlpack__`, as an array; read-only if its producer says so, or made a copy.

    A producer without flags (before DLPack 1.0) cannot say so, and its memory is taken as writable.
    Raises: DtypeError if NumPy has no such dtype, or the memory is not the CPU's; and what `x.__dlpack__` raises.
    """
    return consume(_capsule(x))


def read_flagged(x: Any) -> Array:
    """As `read`. Raises: DtypeError too if the producer does not say what may be written."""
    capsule = _capsule(x)
    if not _is_valid(capsule, _NEW):
        raise DtypeError("its DLPack does not say what may be written")
    return consume(capsule)


def _capsule(x: Any) -> Any:
    try:
        return x.__dlpack__(max_version=(_MAJOR, 0))
    except TypeError:  # a producer from before version 1.0 knows no such argument
        return x.__dlpack__()


def consume(capsule: Any) -> Array:
    """The array that a capsule describes. What cannot be read is left to the capsule, which gives it back itself.

    Raises: DtypeError as `read`, and if the capsule is no DLPack capsule or was consumed before.
    """
    name = next((name for name in (_NEW, _OLD) if _is_valid(capsule, name)), None)
    if name is None:
        raise DtypeError(f"expected a DLPack capsule that nobody has consumed, got {capsule!r:.80}")
    address = _pointer(capsule, name)
    flags = 0
    if name is _NEW:
        managed: Any = _Versioned.from_address(address)
        if managed.major != _MAJOR:
            raise DtypeError(f"its memory is described by DLPack {managed.major}.{managed.minor}, known is {_MAJOR}.x")
        flags = managed.flags
    else:
        managed = _Managed.from_address(address)
    tensor = managed.tensor
    if tensor.device_type not in HOST:
        raise DtypeError(f"its memory is on DLPack's device {tensor.device_type}, not the CPU's: copy it there first")
    dtype = _dtype(tensor.code, tensor.bits, tensor.lanes)
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = (
        tuple(n * dtype.itemsize for n in tensor.strides[: tensor.ndim]) if tensor.ndim and tensor.strides else None
    )
    at = (tensor.data or 0) + tensor.byte_offset
    _rename(capsule, _USED[name])
    # NumPy knows no name for bfloat16 here.
    plain = np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
    interface = {"shape": shape, "typestr": plain.str, "strides": strides, "version": 3}
    interface["data"] = (at, bool(flags & (_READ_ONLY | _COPIED)))
    memory = _Memory(interface, address, managed.deleter)
    # Memory of no elements may lie at address 0, which NumPy would take for none given.
    array = np.asarray(memory) if 0 not in shape else np.empty(shape, plain)
    return array.view(dtype)


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    if lanes == 1 and (code, bits) == (_BFLOAT, 16):
        return BFLOAT16
    try:
        if lanes == 1 and bits % 8 == 0:
            return np.dtype(f"{_KINDS[code]}{bits // 8}")
    except (KeyError, TypeError):  # a dtype that NumPy lacks
        pass
    raise DtypeError(f"its dtype, {bits} bits of DLPack's kind {code} in {lanes} lane(s), is none of NumPy's")
