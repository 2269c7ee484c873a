"""CUDA IPC for the stand-in: memory of cudaMalloc in files without a name, which other processes really map.

between = Between(gpu, monkeypatch)
between.calls       what was asked of CUDA, in order
between.elsewhere() a context in which this is another process, as far as ours and CUDA can tell
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ddp._cuda import ipc

_HANDLE = struct.Struct("<qqq40x")  # process, descriptor, bytes: 64 in all, as CUDA's


class Between:
    """The functions of the runtime that processes share memory by, in the place of the stand-in's."""

    def __init__(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cupy = gpu.cupy
        self._patch = monkeypatch
        self.calls: list[Any] = []
        self.fails = ""
        self.files: dict[int, tuple[int, int]] = {}  # by address
        self.mapped: dict[int, Any] = {}
        self.pid = os.getpid()
        runtime = self.cupy.cuda.runtime
        members = {
            "malloc": self.malloc,
            "free": self.free,
            "ipcGetMemHandle": self.give,
            "ipcOpenMemHandle": self.open,
            "ipcCloseMemHandle": self.close,
        }
        for name, value in members.items():
            monkeypatch.setattr(runtime, name, value, raising=False)
        monkeypatch.setattr(ipc, "allocation_start", self.range)

    def note(self, what: str, given: Any) -> None:
        self.calls.append(what)
        if self.fails == what:
            raise self.cupy.cuda.runtime.CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument")

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            yield

    def malloc(self, nbytes: int) -> int:
        file = os.memfd_create("stand-in", os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
        raw = np.frombuffer(mmap.mmap(file, nbytes), np.uint8)
        address = int(raw.ctypes.data)
        self.cupy.record.mallocs += 1
        self.cupy.blocks[address] = raw
        self.cupy.places[address] = self.cupy.local.device
        self.cupy.held[self.cupy.local.device] += nbytes
        self.files[address] = file, nbytes
        return address

    def free(self, address: int) -> None:
        self.cupy.record.frees += 1
        self.cupy.held[self.cupy.places.pop(address)] -= self.cupy.blocks.pop(address).size
        os.close(self.files.pop(address)[0])

    def range(self, address: int) -> int:
        for start, (_, nbytes) in self.files.items():
            if start <= address < start + nbytes:
                return start
        return address

    def give(self, base: int) -> bytes:
        self.note("get", base)
        if base not in self.files:
            raise self.cupy.cuda.runtime.CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument")
        return _HANDLE.pack(self.pid, *self.files[base])

    def open(self, handle: bytes) -> int:
        self.note("open", handle)
        pid, file, nbytes = _HANDLE.unpack(handle)
        assert pid != os.getpid(), "CUDA opens no handle where it was made"
        with open(f"/proc/{pid}/fd/{file}", "r+b") as behind:
            raw = np.frombuffer(mmap.mmap(behind.fileno(), nbytes), np.uint8)
        self.mapped[int(raw.ctypes.data)] = raw
        return int(raw.ctypes.data)

    def close(self, address: int) -> None:
        self.note("close", address)
        self.mapped.pop(address)
