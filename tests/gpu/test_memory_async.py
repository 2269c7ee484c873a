"""cudaMallocAsync as the source of memory: CUDA's pool, its counts, and what cannot be done with it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

import ddp
from ddp._cuda import memory_pool as sources
from ddp.cuda import memory
from ddp.errors import DeviceError, OutOfMemoryError

MIB = 1 << 20
POOL = 0xB001


class Driver:
    """What CUDA's own pools do: give memory in the order of streams, and count."""

    def __init__(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cupy = gpu.cupy
        self.calls: list[Any] = []
        self.used = self.high = self.trimmed = 0
        self.room = 64 * MIB
        runtime = self.cupy.cuda.runtime
        names = ("UsedMemCurrent", "UsedMemHigh", "ReservedMemCurrent", "ReservedMemHigh", "ReleaseThreshold")
        for number, name in enumerate(names):
            monkeypatch.setattr(runtime, f"cudaMemPoolAttr{name}", number, raising=False)
        monkeypatch.setattr(runtime, "cudaDevAttrMemoryPoolsSupported", 115, raising=False)
        monkeypatch.setattr(runtime, "deviceGetAttribute", lambda attribute, device: attribute == 115)
        monkeypatch.setattr(runtime, "deviceGetMemPool", lambda device: POOL + device, raising=False)
        monkeypatch.setattr(runtime, "memPoolGetAttribute", self.get, raising=False)
        monkeypatch.setattr(runtime, "memPoolSetAttribute", self.set, raising=False)
        monkeypatch.setattr(runtime, "memPoolTrimTo", self.trim, raising=False)
        monkeypatch.setattr(self.cupy.cuda, "malloc_async", self.malloc, raising=False)

    def malloc(self, size: int) -> Any:
        self.calls.append(("malloc", size))
        if self.used + size > self.room:
            raise self.cupy.cuda.runtime.CUDARuntimeError(2, "cudaErrorMemoryAllocation")
        pointer = self.cupy.cuda.MemoryPointer(self.cupy.cuda.Memory(size), 0)
        self.used += size
        self.high = max(self.high, self.used)
        weakref.finalize(pointer.mem, self.free, size).atexit = False
        return pointer

    def free(self, size: int) -> None:
        self.used -= size

    def get(self, pool: int, attribute: int) -> int:
        assert pool in (POOL, POOL + 1)
        return [self.used, self.high, self.used + MIB, self.high + MIB][attribute]

    def set(self, pool: int, attribute: int, value: int) -> None:
        self.calls.append(("set", pool, attribute, value))
        if attribute == 1:
            self.high = self.used

    def trim(self, pool: int, keep: int) -> None:
        self.calls.append(("trim", pool, keep))


@pytest.fixture
def driver(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    sources._source.clear()
    yield Driver(gpu, monkeypatch)
    sources._source.clear()


def test_cuda_gives_and_counts(gpu: Any, driver: Driver) -> None:
    memory.use("async")
    assert not driver.calls, "no device is touched before its first array"
    x = ddp.empty(1000, device="cuda")
    assert driver.calls == [("set", POOL, 4, 2**64 - 1), ("malloc", 4096)], "what is freed stays in the pool"
    assert ddp.cuda.memory_allocated() == 4096
    assert ddp.cuda.memory_reserved() == 4096 + MIB
    stats = ddp.cuda.memory_stats()
    assert "num_device_alloc" not in stats, "CUDA does not say"
    assert stats["allocated_bytes.all.peak"] == 4096
    del x
    assert ddp.cuda.max_memory_allocated() == 4096
    ddp.cuda.reset_peak_memory_stats()
    assert ddp.cuda.max_memory_allocated() == 0
    assert ddp.cuda.max_memory_reserved() == MIB
    assert ddp.cuda.memory_allocated(1) == 0
    memory.use("async")
    with pytest.raises(DeviceError, match="by 'async'"):
        memory.use("pool")


def test_full(gpu: Any, driver: Driver) -> None:
    memory.use("async")
    x = ddp.empty(MIB, device="cuda")
    driver.calls.clear()
    with pytest.raises(OutOfMemoryError, match=r"no memory for another 80\.00 MiB"):
        ddp.empty(20 * MIB, device="cuda")
    attempts = ("malloc", 80 * MIB)
    assert driver.calls == [attempts, ("trim", POOL, 0), attempts, ("trim", POOL, 0), attempts]
    assert ddp.cuda.memory_stats()["num_ooms"] == 1
    assert x.numel()


def test_a_limit(gpu: Any, driver: Driver) -> None:
    memory.use("async")
    ddp.cuda.set_per_process_memory_limit(MIB)
    with pytest.raises(OutOfMemoryError, match=r"limited to 1\.00 MiB"):
        ddp.empty(MIB, device="cuda")
    assert ddp.empty(100, device="cuda").numel()


def test_a_device_without_it(gpu: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.cupy.cuda.runtime, "deviceGetAttribute", lambda attribute, device: 0)
    with pytest.raises(DeviceError, match=r"cuda:0 has no cudaMallocAsync"):
        memory.use("async")
    assert sources.source(gpu.cupy).name == "pool"
