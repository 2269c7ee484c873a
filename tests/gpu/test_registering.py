"""Batches that are copied to the GPU out of their workers' memory: when it is registered, used again, and let go."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._cuda import copies, stream_order
from ddp._device import device
from ddp._tensor.base import wrap
from ddp.data import DataLoader
from ddp.data.device_prefetcher import DevicePrefetcher
from ddp.data.shared_batches import BatchReader, BatchWriter
from ddp.errors import WorkerError
from tests.ddp.data.samples import Squares
from tests.gpu.installing import Gpu, forget

SIZE = 300


class Worker:
    """Batches as a worker's, made in this process: it writes to a block as soon as it has that back."""

    def __init__(self, length: int) -> None:
        self.at, self.length = 0, length
        self.out, self.incoming = BatchWriter(), BatchReader()

    def __next__(self) -> Any:
        if self.at == self.length:
            raise StopIteration
        self.out.give_back(self.incoming.returned())
        self.out.begin()
        batch = []
        for dtype in (np.float32, np.int64):
            array = self.out.empty((SIZE,), np.dtype(dtype))
            array[...] = self.at
            batch.append(wrap(array, ddp.device("cpu")))
        self.at += 1
        packed = self.out.pack(batch)
        del batch, array
        fd = os.dup(self.out.new.fileno()) if packed.new and self.out.new is not None else -1
        if packed.new and self.out.new is not None:
            self.out.new.close()
        return self.incoming.unpack(packed, fd)

    def ready(self) -> bool:
        return True


def carried(length: int) -> list[Any]:
    """Sums of what a pass hands out, fetched behind the steps."""
    found = []
    for x, y in DevicePrefetcher(Worker(length), device("cuda")):
        found.append((ddp.cuda.fetch(x + 1), ddp.cuda.fetch(y + 1)))
    return [(a.value(), b.value()) for a, b in found]


def simulate(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gpu = Gpu(patch, seed, devices=1)
        try:
            got = carried(14)
            gpu.machine.settle()
            stream_order.sweep()
            gc.collect()
            assert not gpu.cupy.pinned.registered, "something is registered still"
        finally:
            forget()
    right = got == [([k + 1.0] * SIZE, [k + 1] * SIZE) for k in range(14)]
    assert right, f"seed {seed}"  # two lists would be compared line by line, for minutes where $CI is set


def test_every_order_that_cuda_allows_gives_the_same_batches(count: Callable[[int, int], int]) -> None:
    for seed in range(count(3, 25)):
        simulate(seed)


def test_nothing_is_copied_on_the_host_waited_for_or_allocated(gpu: Any) -> None:
    prefetcher = DevicePrefetcher(Worker(40), device("cuda"))
    for k in range(10):
        assert next(prefetcher)[0][0].item() == k
    blocks = len(gpu.cupy.pinned.registered)
    assert blocks >= 1
    for buffer in prefetcher._buffers:
        buffer.room = None  # type: ignore[method-assign, assignment]  # raises, if anything is staged
    gpu.reset()
    for k in range(10, 40):
        assert next(prefetcher)[0][0].item() == k
    assert gpu.mallocs == gpu.frees == 0
    assert set(gpu.synchronizations) <= {"item"}
    assert not any("_pinning" in where for _, where in gpu.waits)
    assert len(gpu.cupy.pinned.registered) == blocks


def test_what_cuda_cannot_pin_goes_the_other_way(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise gpu.cupy.cuda.runtime.CUDARuntimeError(801, "cudaErrorNotSupported: operation not supported")

    monkeypatch.setattr(copies, "_refused", False)
    monkeypatch.setattr(gpu.cupy.cuda.runtime, "hostRegister", refuse)
    with pytest.warns(UserWarning, match="cannot pin the memory of workers") as said:
        got = carried(10)
    assert len(said) == 1
    assert got == [([k + 1.0] * SIZE, [k + 1] * SIZE) for k in range(10)]
    assert not gpu.cupy.pinned.registered


class Deadly(Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_is_killed_leaves_nothing_registered(gpu: Any) -> None:
    loader = DataLoader(Deadly(64), batch_size=2, num_workers=1, pin_memory=True)
    got, most = 0, 0

    def run() -> None:
        nonlocal got, most
        for _ in loader:
            got += 1
            most = max(most, len(gpu.cupy.pinned.registered))

    with pytest.raises(WorkerError, match="SIGKILL"):
        run()
    assert got == 25
    assert most > 0
    stream_order.sweep()
    gc.collect()
    assert not gpu.cupy.pinned.registered
