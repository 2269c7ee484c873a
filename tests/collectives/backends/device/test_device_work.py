"""A collective under way: the host waits for nothing, buffers are kept while they are used, graphs can capture it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import ArgumentError, CollectivesError
from collectives.backends.device.device_communicator import overlap
from tests.collectives.backends.device.conftest import MakeRig, Rig
from tests.collectives.backends.device.fake_nccl import FakeLibrary

USER, COMM, DOWN, UP = "user 0.", "comm 0.", "comm 0.1", "comm 0.2"


def log_of(ranks: Rig, fn: Callable[[Any, Any], Any]) -> list[Any]:
    """What rank 0 put on its streams in `fn`, after a first call that chose the transport."""
    begin = 0

    def rank(comm: Any, cupy: Any) -> None:
        nonlocal begin
        x = cupy.asarray(np.ones(4, np.float32))
        comm.all_reduce(x)
        comm.barrier()
        if comm.rank == 0:
            begin = len(ranks.machine.log)
        comm.barrier()
        fn(comm, cupy)
        comm.barrier()

    ranks.run(rank)
    return [entry for entry in ranks.machine.log[begin:] if entry[0] in (USER, COMM, DOWN, UP)]


def test_the_caller_goes_on_until_it_waits(rig: MakeRig) -> None:
    def calls(comm: Any, cupy: Any) -> None:
        x = cupy.empty(4, np.float32)
        work = comm.all_reduce(x, async_op=True)
        while not work.done():
            time.sleep(1e-4)
        cupy.multiply(x, 2)
        other = cupy.cuda.Stream(non_blocking=True, name=f"user {comm.rank}.")
        work.wait()
        with other:
            work.wait()

    ranks = rig(2, FakeLibrary())
    assert log_of(ranks, calls) == [
        (USER, "record"),
        (COMM, "wait"),
        (COMM, "nccl all_reduce"),
        (COMM, "record"),
        (USER, "multiply"),  # not ordered after the collective
        (USER, "wait"),
    ]
    assert ("user 0.1", "wait") in ranks.machine.log  # on whatever stream it is waited for


class Imported:
    """An array of another library, whose memory CuPy does not know by its own pool."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": None}


def test_a_result_does_not_arrive_in_memory_that_is_still_read(rig: MakeRig) -> None:
    def rank(comm: Any, cupy: Any) -> None:
        whole = cupy.arange(8)
        a, b, c = (cupy.asarray(Imported(part)) for part in (whole[:4], whole[2:6], whole[4:]))
        assert [overlap(a, b), overlap(b, c), overlap(a, c), overlap(a, b[:0])] == [True, True, False, False]
        assert overlap(whole[::-1], c)
        assert not cupy.may_share_memory(a, b)  # as CuPy says of two imports
        comm.all_reduce(Imported(whole[:4]), out=Imported(whole[2:6]))
        assert whole.get().tolist() == [0, 1, 0, comm.size, 2 * comm.size, 3 * comm.size, 6, 7]
        comm.all_gather(Imported(whole[1:2]), out=Imported(whole[:2]))
        comm.all_gather(Imported(whole[:2]), out=Imported(whole[4:]), lengths="equal")

    moves = [what for _, what in log_of(rig(2, FakeLibrary()), rank) if what.startswith(("nccl", "copyto"))]
    # The memory of the last is disjoint.
    assert moves == ["nccl all_reduce", "copyto", "nccl all_gather", "copyto", "nccl all_gather"]


@pytest.mark.parametrize("nccl", [None, FakeLibrary()], ids=["staged", "nccl"])
def test_buffers_live_until_the_event_has_passed_and_no_longer(rig: MakeRig, nccl: Any) -> None:
    ranks = rig(1, nccl)
    ranks.machine._step = lambda: False  # type: ignore[method-assign]  # the device does nothing for now

    def rank(comm: Any, cupy: Any) -> None:
        x = cupy.empty(4, np.float32)
        work = comm.all_reduce(x, async_op=True)
        memory = weakref.ref(x._memptr.mem)
        while not work.done():
            time.sleep(1e-4)
        del x, work
        gc.collect()
        time.sleep(0.02)
        assert memory() is not None
        del ranks.machine._step
        deadline = time.monotonic() + 10
        while memory() is not None:
            assert time.monotonic() < deadline, "its memory never came back"
            ranks.machine.settle()
            time.sleep(1e-3)

    ranks.run(rank)


def test_threads_of_ours_stay_on_the_device_of_their_rank(rig: MakeRig) -> None:
    """Else each rank would take memory of the first GPU, too."""
    ranks = rig(2)

    def rank(comm: Any, cupy: Any) -> None:
        work = comm.all_reduce(cupy.empty(4, np.float32), async_op=True)
        while not work.done() or comm._device_communicator.watchdog.in_flight():
            ranks.machine.settle()
            time.sleep(1e-3)

    ranks.run(rank)
    contexts = ranks.cupy.contexts
    for ours in ("collectives-world", "collectives-watchdog"):
        assert sorted(min(contexts[context]) for context in contexts if context.name.startswith(ours)) == [0, 1]
    assert {len(gpus) for thread, gpus in contexts.items() if thread.name.startswith("collectives-")} == {1}


def test_a_collective_in_a_capture_is_neither_watched_nor_let_go(rig: MakeRig) -> None:
    ranks = rig(1, FakeLibrary())
    asked: list[Any] = []

    def rank(comm: Any, cupy: Any) -> None:
        comm.registry.requested = "nccl"  # a world of one copies otherwise
        x = cupy.asarray(np.ones(4, np.float32))
        comm.all_reduce(x)
        ranks.machine.settle()
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        query = cupy.cuda.runtime.eventQuery
        cupy.cuda.runtime.eventQuery = lambda pointer: asked.append(pointer) or query(pointer)
        time.sleep(0.05)
        asked.clear()
        y = comm.all_reduce(x)
        time.sleep(0.05)
        stream.end_capture()
        assert asked == []
        assert comm._device_communicator.watchdog.in_flight() == []
        assert any(y is each for kept in comm._device_communicator.watchdog._kept_forever for each in kept)

    ranks.run(rank)


def test_what_needs_the_host_cannot_be_captured(rig: MakeRig) -> None:
    def rank(comm: Any, cupy: Any) -> None:
        x = cupy.asarray(np.ones(4, np.float32))
        comm.all_reduce(x)
        if comm.rank == 0:
            stream = cupy.cuda.get_current_stream()
            stream.begin_capture()
            with pytest.raises(ArgumentError, match="cannot be captured into a graph"):
                comm.all_reduce(x)
            stream.end_capture()
        assert comm.all_reduce(x).get().tolist() == [2.0] * 4

    rig(2).run(rank)


def test_a_first_call_in_a_capture_that_needs_the_host_breaks_the_communicator(rig: MakeRig) -> None:
    def rank(comm: Any, cupy: Any) -> None:
        x = cupy.asarray(np.ones(4, np.float32))
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        with pytest.raises(CollectivesError, match="cannot be captured into a graph"):
            comm.all_reduce(x)
        stream.end_capture()
        assert comm.queue.broken

    rig(2).run(rank)
