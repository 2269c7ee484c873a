"""DLPack: what a producer describes is what is read, and its memory is given back once, and not before."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from collectives.arrays import as_array, read_dlpack


class Exporter:
    """A NumPy array that shows nothing of itself but DLPack. old: it knows no version."""

    def __init__(self, array: Any, old: bool) -> None:
        self.array = array
        self.old = old

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError(f"__dlpack__() got an unexpected keyword argument {next(iter(options))!r}")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("old", [False, True])
def test_what_numpy_gives_away_is_read_as_it_is(old: bool) -> None:
    for name in ("bool", "i1", "u8", "f2", "f8", "c16"):
        whole = np.arange(24).astype(name).reshape(4, 6)
        for x in (whole, whole[::2, ::-3], whole.T, np.array(whole[1, 1]), whole[:0, 3]):
            y = read_dlpack(Exporter(x, old))
            assert (y.dtype, y.shape, y.flags.writeable) == (x.dtype, x.shape, True)
            assert_array_equal(y, x)
            assert not x.size or np.shares_memory(x, y)


# Structs of our own, apart from those under test: the layout of DLPack 1.0 and 0.8 on 64-bit machines.
TENSOR = [
    ("data", ctypes.c_void_p),
    ("device", ctypes.c_int32 * 2),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.c_void_p),
    ("strides", ctypes.c_void_p),
    ("offset", ctypes.c_uint64),
]


class Old(ctypes.Structure):
    _fields_ = [*TENSOR, ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class New(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        *TENSOR,
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.argtypes, _new.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object


class Producer:
    """Gives capsules away and counts what becomes of them.

    memory: (n,) uint8, what it owns; returned: how often it came back; dropped: capsules that died, consumed or not
    """

    def __init__(self, struct: type[Any] = New, **described: Any) -> None:
        self.memory = np.zeros(64, np.uint8)
        self.returned: list[int] = []
        self.dropped = 0
        self.name = b"dltensor" if struct is Old else b"dltensor_versioned"
        values: dict[str, Any] = {
            "data": self.memory.ctypes.data,
            "device": (1, 0),
            "code": 2,
            "bits": 32,
            "lanes": 1,
            "shape": (4,),
            **({} if struct is Old else {"version": (1, 0)}),
            **described,
        }
        self.managed = struct()
        for name, value in values.items():
            if name in ("shape", "strides"):
                value = (ctypes.c_int64 * len(value))(*value)
                setattr(self, name, value)  # keeps it
                value = ctypes.addressof(value)
            elif isinstance(value, tuple):
                value = (type(getattr(self.managed, name)))(*value)
            setattr(self.managed, name, value)
        self.managed.ndim = len(values["shape"])
        self._deleter = DELETER(self.returned.append)
        if "deleter" not in described:
            self.managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        self._destructor = DESTRUCTOR(self._drop)

    def _drop(self, capsule: int) -> None:
        self.dropped += 1

    @property
    def address(self) -> int:
        return ctypes.addressof(self.managed)

    def capsule(self) -> Any:
        return _new(self.address, self.name, ctypes.cast(self._destructor, ctypes.c_void_p))

    def __dlpack__(self, max_version: tuple[int, int] | None = None) -> Any:
        return self.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.managed.device[0], 0


@pytest.mark.parametrize("struct", [Old, New])
def test_the_memory_is_given_back_once_when_the_last_view_dies(struct: type[Any]) -> None:
    producer = Producer(struct)
    x = read_dlpack(producer)
    assert producer.dropped == 1  # the capsule went, and the memory is ours
    part, bits = x[1:3], x.view(np.uint32)
    del x
    gc.collect()
    part[:] = 1.5
    assert producer.memory.view(np.float32)[:4].tolist() == [0, 1.5, 1.5, 0]
    del part
    gc.collect()
    assert producer.returned == []
    del bits
    gc.collect()
    assert producer.returned == [producer.address]


def test_bfloat16_with_strides_and_an_offset() -> None:
    held = np.arange(32).astype(ml_dtypes.bfloat16)
    producer = Producer(code=4, bits=16, shape=(2, 3), strides=(8, -2), data=held.ctypes.data, offset=2 * 5)
    x = read_dlpack(producer)
    assert x.dtype == ml_dtypes.bfloat16
    assert x.astype(int).tolist() == [[5, 3, 1], [13, 11, 9]]
    x[1, 2] = -1
    assert held[9] == -1
    assert read_dlpack(Producer(code=4, bits=16, shape=())).shape == ()


def test_flags_say_what_may_be_written() -> None:
    assert read_dlpack(Producer(flags=0)).flags.writeable
    assert as_array(Producer(Old, device=(3, 0))).flags.writeable  # pinned memory; such a capsule has no flags
    assert not read_dlpack(Producer(flags=1)).flags.writeable  # read-only
    assert not read_dlpack(Producer(flags=1, code=4, bits=16)).flags.writeable
    assert not read_dlpack(Producer(flags=2)).flags.writeable  # a copy: what is written there, the producer never sees
