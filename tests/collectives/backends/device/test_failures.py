"""What goes wrong on a GPU breaks the communicator, and every call says so, the host's too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import (
    ArgumentError,
    BackendError,
    CollectivesError,
    CollectiveTimeout,
    DtypeError,
    NcclError,
    run_threads,
)
from collectives.backends.device import cuda
from collectives.backends.device.nccl_transport import NcclTransport
from collectives.flight.reader import FlightReader
from tests.collectives.backends.device.conftest import MakeRig, Rig
from tests.collectives.backends.device.fake_nccl import FakeLibrary, FakeNccl
from tests.conftest import wait_until


def broken(comm: Any) -> None:
    wait_until(lambda: comm.queue.broken, 5)


def end_of(ranks: Rig, rank: int) -> FakeNccl:
    """A rank's end, which the ranks make in any order."""
    return next(end for end in ranks.ends if end.rank == rank)


def state_of(work: Any) -> str:
    """What the flight record says of a call."""
    calls = FlightReader(work._call.recorder.peek).record().calls
    return next(call.state for call in calls if call.order == work._call.record)


def test_a_rank_that_never_comes_is_a_timeout(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = rig(2, FakeLibrary())

    def rank(comm: Any, cupy: Any) -> None:
        x = cupy.asarray(np.ones(4))
        first = comm.all_reduce(x, async_op=True)
        first.wait().get()
        transport = comm._device_communicator._device_transport
        comm.barrier()
        end_of(ranks, comm.rank).timeout = 0.5
        if comm.rank == 0:
            # The headers met, and then rank 1 never launches its part.
            monkeypatch.setattr(type(transport), "_issue", lambda self, job: launch(self, job))
        comm.barrier()
        work = comm.all_reduce(x, async_op=True)
        while not work.done():
            time.sleep(1e-4)
        assert state_of(first) == state_of(work) == "done"  # on their streams
        broken(comm)
        assert (state_of(first), state_of(work)) == ("done", "failed")
        with pytest.raises(CollectiveTimeout, match=r"all_reduce #\d+ .* was not complete on the device"):
            work.wait()

    issue = NcclTransport._issue

    def launch(transport: Any, job: Callable[[], None]) -> Any:
        return iter(()) if transport._nccl.rank == 1 else issue(transport, job)

    ranks.run(rank)


def test_an_error_of_the_launch_itself_breaks_the_call(rig: MakeRig) -> None:
    ranks = rig(2, FakeLibrary())

    def rank(comm: Any, cupy: Any) -> None:
        x = cupy.asarray(np.ones(4))
        comm.all_reduce(x)
        end_of(ranks, comm.rank).aborted = True
        work = comm.all_reduce(x, async_op=True)
        for call in (work.wait, lambda: comm.barrier()):
            with pytest.raises(NcclError, match="aborted"):
                call()

    ranks.run(rank)


@pytest.mark.parametrize(("size", "nccl"), [(2, None), (1, FakeLibrary())], ids=["staged", "nccl"])
def test_a_failed_kernel_is_an_error_and_not_an_endless_wait(rig: MakeRig, size: int, nccl: Any) -> None:
    ranks = rig(size, nccl)

    def rank(comm: Any, cupy: Any) -> None:
        comm.registry.requested = None if nccl is None else "nccl"
        x = cupy.asarray(np.ones(4))
        comm.all_reduce(x)
        comm.barrier()
        cupy.cuda.runtime.eventQuery = lambda pointer: 700

        def calls() -> None:
            comm.all_reduce(x)  # over NCCL it is only put on its stream
            broken(comm)
            comm.all_reduce(x)

        with pytest.raises(CollectivesError, match="CUDA error 700"):
            calls()

    ranks.run(rank)


def fail() -> float:
    raise ArgumentError("no samples")


@pytest.mark.parametrize("nccl", [None, FakeLibrary()], ids=["staged", "nccl"])
@pytest.mark.parametrize(
    ("call", "result", "words"),
    [
        (lambda comm, x: comm.all_gather(x), [1.0] * 8, "the result's shape has to be exchanged first"),
        (lambda comm, x: comm.all_reduce(x, scale=lambda: 0.5 if comm.rank else x), [1.0] * 4, "its shape is"),
        (lambda comm, x: comm.all_reduce(x, scale=lambda: 0.5 if comm.rank else fail()), [1.0] * 4, "no samples"),
    ],
    ids=["default stream", "scale of a shape", "failed scale"],
)
def test_a_mistake_of_one_rank_leaves_the_order_of_calls(
    rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    nccl: Any,
    call: Callable[[Any, Any], Any],
    result: list[float],
    words: str,
) -> None:
    monkeypatch.setattr(cuda.Cuda, "is_per_thread", lambda self, stream: self.index == 0)

    def rank(comm: Any, cupy: Any) -> None:
        x = cupy.asarray(np.ones(4))
        if comm.rank == 0:
            with pytest.raises(ArgumentError, match=words):
                call(comm, x)
        else:
            assert call(comm, x).get().tolist() == result
        assert comm.all_reduce(x).get().tolist() == [2.0] * 4

    rig(2, nccl).run(rank)


def test_an_array_of_another_gpu_is_refused(rig: MakeRig) -> None:
    def rank(comm: Any, cupy: Any) -> None:
        comm.all_reduce(cupy.asarray(np.ones(4)))
        other = (comm.rank + 1) % comm.size
        with cupy.cuda.Device(other):
            there = cupy.asarray(np.ones(4))
        with pytest.raises(DtypeError, match=f"x is on GPU {other}, and this communicator's .* {comm.rank}"):
            comm.all_reduce(there)

    rig(2).run(rank)


def test_a_process_without_cupy_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        __cuda_array_interface__ = None

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    monkeypatch.setattr(cuda, "why_absent", lambda: "CuPy is not installed")

    def rank(comm: Any) -> None:
        with pytest.raises(BackendError, match="Foreign x is on a GPU, but CuPy is not installed"):
            comm.all_reduce(Foreign())

    run_threads(rank, 2)


def test_an_error_of_nccl_after_the_launch_ends_the_wait_in_a_host_call_and_is_raised_by_the_next(rig: MakeRig) -> None:
    ranks = rig(2, FakeLibrary())
    heard = threading.Event()

    def rank(comm: Any, cupy: Any) -> None:
        x = cupy.asarray(np.ones(4))
        work = comm.all_reduce(x, async_op=True)
        while not work.done():
            time.sleep(1e-4)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.2)  # rank 0 is in its call by then
            for end in ranks.ends:
                end.trouble = NcclError("the network is down")
            broken(comm)
        begun = time.monotonic()
        for call in (lambda: comm.all_reduce(np.ones(4)), work.wait, lambda: comm.all_reduce(x), comm.barrier):
            with pytest.raises(NcclError, match="the network is down"):
                call()
        assert time.monotonic() - begun < 5
        assert comm._device_communicator.watchdog._received.is_set()
        # Rank 0's own watchdog may be the later one, and a rank that leaves ends the other's wait, too.
        heard.set() if comm.rank == 0 else heard.wait(5)

    ranks.run(rank)
    assert all(end.aborted for end in ranks.ends)
