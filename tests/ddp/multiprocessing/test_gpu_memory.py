"""CUDA IPC on the stand-in, between real processes and in one: calls, order, and when memory is let go of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ddp
import ddp.multiprocessing as mp
from ddp._cuda import ipc, memory_pool
from ddp.errors import SharingError
from tests.conftest import wait_until
from tests.ddp.multiprocessing import gpu_children
from tests.gpu import simulated
from tests.gpu.between import Between


def nobody_looks() -> bool:
    ddp.cuda.ipc_collect()
    return len(ipc.exported) == 0


@pytest.fixture
def between(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Between]:
    memory_pool._installed.clear()
    result = Between(gpu, monkeypatch)
    yield result
    wait_until(nobody_looks)
    memory_pool._installed.clear()
    ipc._uuid.cache_clear()


class TestProcesses:
    @pytest.fixture
    def start(self, between: Between) -> Iterator[Callable[[Any], Any]]:
        started = []
        context = mp.get_context("forkserver")

        def run(target: Any) -> Any:
            requests, results = context.SimpleQueue(), context.SimpleQueue()
            child = context.Process(target=target, args=(requests, results))
            child.start()
            started.append(child)
            return requests, results, child

        yield run
        for child in started:
            child.kill()
            child.join(20)

    def test_both_see_each_others_writes(self, start: Any, gpu: Any) -> None:
        requests, results, _ = start(gpu_children.answer)
        x = ddp.arange(12.0, device="cuda").reshape(3, 4)
        requests.put(x.T[2:])
        assert results.get() == ("cuda:0", (1, 4), False, [[2.0, 6.0, 10.0], [3.0, 7.0, 11.0]])
        assert x.T.tolist() == [[0.0, 4.0, 8.0], [1.0, 5.0, 9.0], [3.0, 7.0, 11.0], [4.0, 8.0, 12.0]]
        requests.put(ddp.nn.Parameter(ddp.ones(2, device="cuda")))
        assert results.get() == ("cuda:0", (1,), True, [1.0, 1.0])
        y = ddp.zeros(2, device="cuda:1")
        requests.put(y)
        assert results.get() == ("cuda:1", (1,), False, [0.0, 0.0])
        assert y.tolist() == [1.0, 1.0]
        requests.put(None)

    def test_memory_is_kept_while_others_look_and_no_longer(self, start: Any, gpu: Any) -> None:
        requests, results, child = start(gpu_children.keep)
        x = ddp.ones(1000, device="cuda")
        requests.put(x)
        assert results.get() == 1000
        del x
        ddp.cuda.ipc_collect()
        assert ddp.cuda.memory_allocated() == 4096, "the child looks at it"
        child.kill()
        child.join(20)
        wait_until(nobody_looks)
        assert ddp.cuda.memory_allocated() == 0, "the kernel has closed what the child held"

    def test_sent_on(self, start: Any, gpu: Any) -> None:
        """Unlike PyTorch's: who has got memory may send it on; the process that it belongs to keeps it for all."""
        requests, results, _ = start(gpu_children.give_back)
        others, answers, _ = start(gpu_children.hear)
        reader, writer = mp.Pipe(duplex=False)
        others.put(reader)
        x = ddp.arange(3, 7.0, device="cuda")
        requests.put(x)
        for _ in range(2):
            results.get()
        requests.put(writer)
        assert answers.get() == [4.0, 5.0]
        assert x.tolist() == [3.0, 5.0, 6.0, 6.0]


class TestOrder:
    """In one process that takes itself for two."""

    @pytest.mark.parametrize("gpu", simulated(3), indirect=True)
    def test_their_stream_goes_on_after_ours(self, between: Between, gpu: Any) -> None:
        xp = gpu.cupy
        mine, other = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
        with mine:
            array = xp.arange(1000, dtype="f4")
            array += 1
            given = ipc.export_array(array, ddp.device("cuda:0"))
        with between.elsewhere(), other:
            got = ipc.import_array(given)
            assert (got * 2).get().tolist() == [2.0 * (i + 1) for i in range(1000)]
            assert got.data.ptr != array.data.ptr
        del got, given

    @pytest.mark.parametrize("gpu", simulated(3), indirect=True)
    def test_the_sender_keeps_it_until_their_kernels_are_done(self, between: Between, gpu: Any) -> None:
        xp = gpu.cupy
        other = xp.cuda.Stream(non_blocking=True)
        x = ddp.arange(1000.0, device="cuda")
        given = ipc.export_array(x.array, x.device)
        del x
        with between.elsewhere(), other:
            got = ipc.import_array(given)
            del given
            doubled = got * 2
            del got
        wait_until(nobody_looks)
        ddp.empty(1000, device="cuda").fill_(-1)  # takes the memory
        with other:
            assert doubled.get().tolist() == [2.0 * i for i in range(1000)]


class TestCalls:
    def offer(self, x: Any) -> Any:
        return ipc.export_array(x.array, x.device)

    def test_what_is_never_read_lets_go(self, between: Between) -> None:
        reader, writer = mp.Pipe(duplex=False)
        for n in (1, 2):
            writer.send(ddp.zeros(n, device="cuda"))
        assert ipc.exported.collect() == 2
        first = reader.recv()
        writer.close()
        reader.close()
        assert ipc.exported.collect() == 0, "the second was never read, and the first is at home"
        assert first.numel() == 1

    def test_a_device_by_another_number(self, between: Between, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        given = self.offer(ddp.zeros(3, device="cuda:1"))
        properties = gpu.cupy.cuda.runtime.getDeviceProperties
        with between.elsewhere():
            ipc._uuid.cache_clear()
            monkeypatch.setattr(gpu.cupy.cuda.runtime, "getDeviceProperties", lambda n: properties(1 - n))
            got = ipc.import_array(given)
            assert got.device.id == 0, "CUDA_VISIBLE_DEVICES has another order there"
            del got
            ipc._uuid.cache_clear()
            monkeypatch.setattr(gpu.cupy.cuda.runtime, "getDeviceProperties", lambda n: {"uuid": b"?" * 16})
            with pytest.raises(SharingError, match=r"a tensor on cuda:1 of process \d+ cannot come here"):
                ipc.import_array(given)
        del given

    def test_memory_that_cuda_cannot_share(self, between: Between) -> None:
        x = ddp.ones(3, device="cuda")
        between.fails = "get"
        with pytest.raises(
            SharingError, match=r"cannot share .*cudaErrorInvalidValue.*cudaMallocAsync.*use\('async'\)"
        ):
            self.offer(x)

    def test_memory_that_cannot_be_opened(self, between: Between) -> None:
        given = self.offer(ddp.ones(3, device="cuda"))
        between.fails = "open"
        pid = os.getpid()
        with between.elsewhere(), pytest.raises(SharingError, match=f"process {pid} cannot be opened here"):
            ipc.import_array(given)
        del given
