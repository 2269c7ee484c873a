"""What the ranks of the stub's tests do: `python bodies.py LIBRARY CASES` runs these functions on ranks of their own.

CASES, in JSON: for each, how many ranks, the function's name, and what its environment says.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

from collectives.backends.nccl.library import Nccl, NcclConfig
from collectives.backends.nccl.nccl_communicator import NcclCommunicator, unique_id
from collectives.backends.nccl.watchdog import Watchdog
from collectives.errors import CollectivesError, CollectiveTimeout, CommunicatorClosed, DtypeError, NcclError
from collectives.reduction import ReduceOp
from tests.collectives.backends.nccl.stub.build import Stub

Array = np.ndarray[Any, Any]
STREAM = 7  # any number
SOON = 20.0  # s; within the limits tried here, and far from the job's own on a machine that has much to do


class Rank:
    """One rank: its library, its communicator, and arrays in place of pointers."""

    def __init__(self, nccl: Nccl, stub: Stub, id: bytes, rank: int, size: int) -> None:
        self.nccl = nccl
        self.stub = stub
        self.id = id
        self.rank = rank
        self.size = size

    def connect(self, timeout: float = 20.0, **options: Any) -> NcclCommunicator:
        return NcclCommunicator.connect(self.nccl, self.id, self.rank, self.size, timeout=timeout, **options)

    def wait(self) -> None:
        self.stub.record(STREAM).wait()

    def close(self, comm: NcclCommunicator) -> None:
        assert comm.close()
        assert comm.close(), "closing may be repeated"
        assert self.stub.live() == 0, "a communicator was left"


def at(array: Array) -> int:
    return array.ctypes.data


def sum_in_place(comm: NcclCommunicator, x: Array) -> None:
    comm.all_reduce(at(x), at(x), len(x), x.dtype, ReduceOp.SUM, STREAM)


def huge_count(r: Rank) -> None:
    """With NCCL_STUB_DRY, which touches no memory."""
    comm = r.connect()
    for count in (2**31 + 5, 2**33 + 1):
        comm.all_reduce(0, 0, count, np.dtype(np.uint8), ReduceOp.SUM, STREAM)
        r.wait()
        assert r.stub.last_count() == count
        comm.send(0, count, np.dtype(np.float32), 0, STREAM)
        assert r.stub.last_count() == count
    r.close(comm)


def wrong_arguments(r: Rank) -> None:
    comm = r.connect(config=NcclConfig(max_ctas=3))
    assert r.stub.most_ctas() == 3, "a configuration reaches NCCL"
    x = np.ones(2, np.float32)
    with raises(DtypeError, "complex64"):
        comm.all_reduce(at(x), at(x), 2, np.dtype(np.complex64), ReduceOp.SUM, STREAM)
    with raises(NcclError, rf"rank {r.rank} of {r.size}: ncclBroadcast returned 4 .*NCCL says: ncclBroadcast: no such"):
        comm.broadcast(at(x), at(x), 2, x.dtype, 17, STREAM)
    with raises(NcclError, "ncclReduce returned 4"), comm.group():
        comm.reduce(at(x), at(x), 2, x.dtype, ReduceOp.SUM, 17, STREAM)
    with raises(ZeroDivisionError, ""), comm.group():
        _ = 1 / 0
    with raises(ZeroDivisionError, ""), comm.group():
        sum_in_place(comm, x)
        _ = 1 / 0
    sum_in_place(comm, x)  # the groups were ended: this is done at once
    r.wait()
    assert x[0] == r.size**2
    r.close(comm)
    with raises(CommunicatorClosed, "closed"):
        sum_in_place(comm, x)
    with raises(CommunicatorClosed, "closed"), comm.group():
        raise AssertionError("unreachable")


def told_to_fail(r: Rank) -> None:
    """NCCL_STUB_FAIL makes a call of this function fail; WORDS are NCCL's for its code."""
    function, _, code = os.environ["NCCL_STUB_FAIL"].split(":")
    words = rf"returned {code} \({os.environ['WORDS']}.*NCCL says: {function} fails as the stub was told"
    with raises(CollectivesError, rf"rank \d of 2: {function} {words}"):
        comm = r.connect(timeout=5.0)
        x = np.ones(4, np.float32)
        try:
            sum_in_place(comm, x)
            with comm.group():
                comm.broadcast(at(x), at(x), 4, x.dtype, 0, STREAM)
            r.wait()
        except CollectivesError as error:
            comm.abort(error)
            raise
        r.close(comm)
    assert r.stub.live() == 0


def never_comes(r: Rank) -> None:
    """Rank 1 stays away: the others' meeting ends at its deadline."""
    if r.rank != 1:
        begun = time.monotonic()
        with raises(CollectiveTimeout, "one has not arrived"):
            r.connect(timeout=0.5)
        assert time.monotonic() - begun < SOON
        assert r.stub.live() == 0


def hangs_in_a_call(r: Rank) -> None:
    """NCCL_STUB_HANG makes all_reduce never finish: a nonblocking call ends at its limit."""
    comm = r.connect(timeout=0.7)
    x = np.ones(1)
    with raises(CollectiveTimeout, "ncclAllReduce was not complete after 0.7 s"):
        sum_in_place(comm, x)
    assert comm.async_error() is None
    assert comm.abort()
    assert r.stub.live() == 0


def abort_frees_a_stuck_call(r: Rank) -> None:
    """NCCL_STUB_HANG: a call that blocks in the library itself, or is polled, ends when another thread aborts."""
    comm = r.connect()
    x = np.ones(1)
    reason = CollectiveTimeout("the reason")
    timer = threading.Timer(0.3, comm.abort, (reason,))
    timer.start()
    begun = time.monotonic()
    with raises(CollectiveTimeout, "the reason"):
        sum_in_place(comm, x)
    assert time.monotonic() - begun < SOON
    timer.join()
    with raises(CollectiveTimeout, "the reason"):
        sum_in_place(comm, x)
    assert r.stub.live() == 0


def abort_in_a_group(r: Rank) -> None:
    """An abort from another thread waits for the group to end, so that no call uses what it freed."""
    comm = r.connect()
    x = np.ones(1)
    opened, aborting = threading.Event(), threading.Event()

    def abort() -> None:
        opened.wait()
        aborting.set()
        comm.abort(NcclError("the reason"))

    thread = threading.Thread(target=abort)
    thread.start()
    with raises(NcclError, "the reason"), comm.group():
        sum_in_place(comm, x)
        opened.set()
        aborting.wait()
        time.sleep(0.2)
        sum_in_place(comm, x)
    thread.join()
    assert r.stub.live() == 0


def lonely_close(r: Rank) -> None:
    """Rank 1 never closes: the others' close ends at its limit, by an abort."""
    comm = r.connect()
    if r.rank != 1:
        begun = time.monotonic()
        assert not comm.close(timeout=0.5)
        assert time.monotonic() - begun < SOON
        assert r.stub.live() == 0


def threads_enter_their_device(r: Rank) -> None:
    names: list[str] = []
    comm = r.connect(enter=lambda: names.append(threading.current_thread().name))
    r.close(comm)
    assert names == [f"nccl-connect-{r.rank}", "ncclCommFinalize", "ncclCommDestroy"]


def abort_hangs(r: Rank) -> None:
    """NCCL_STUB_HANG=ncclCommAbort."""
    comm = r.connect()
    begun = time.monotonic()
    assert not comm.abort(timeout=0.3)
    assert time.monotonic() - begun < SOON
    assert comm.abort(), "there is nothing left to abort"


def close_fails(r: Rank) -> None:
    """NCCL_STUB_FAIL makes a call of the close fail: the communicator is gone all the same."""
    comm = r.connect()
    assert not comm.close()
    with raises(CommunicatorClosed, "closed"):
        comm.broadcast(0, 0, 0, np.dtype(np.uint8), 0, STREAM)
    assert r.stub.live() == 0


def hear(dog: Watchdog) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        dog.check()
        time.sleep(0.01)


def watchdog_ends_a_lonely_rank(r: Rank) -> None:
    """Rank 1 leaves out a call. The event would never complete; the abort completes it, and the program hears of it."""
    comm = r.connect()
    x = np.ones(3)
    sum_in_place(comm, x)
    r.wait()
    if r.rank == 1:
        time.sleep(2.0)  # alive, and elsewhere
        comm.abort()
        return
    seen: list[str] = []
    dog = Watchdog(r.rank, lambda event: event.done, lambda error, calls: seen.append(f"{error} {calls}"))
    dog.guard(comm)
    sum_in_place(comm, x)
    event = r.stub.record(STREAM)
    dog.watch(event, x, "all_reduce #1 (train.py:7)", 0.4)
    assert not event.done
    with raises(CollectiveTimeout, r"rank \d: all_reduce #1 \(train.py:7\) was not complete on the device after 0\.\d"):
        hear(dog)
    event.wait()  # by the abort
    with raises(CollectiveTimeout, "all_reduce #1"):  # the communicator says the same
        sum_in_place(comm, x)
    assert "all_reduce #1" in seen[0]
    dog.close()
    limit = time.monotonic() + 5
    while r.stub.live() and time.monotonic() < limit:  # the abort ends what it has stopped, and then itself
        time.sleep(0.01)
    assert r.stub.live() == 0


@contextlib.contextmanager
def raises(kind: type[BaseException], pattern: str) -> Iterator[None]:
    """As pytest's, which ranks do without."""
    try:
        yield
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
    assert re.search(pattern, message, re.DOTALL), f"{pattern} is not in: {message}"


def fork_ranks(path: str, size: int, name: str, environment: dict[str, str]) -> int:
    """Runs one case on ranks that have done nothing before. Returns: the worst of their exit codes."""
    nccl = Nccl(ctypes.CDLL(path), path)
    id = unique_id(nccl)
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            status = 1
            try:
                os.environ.update(environment)
                globals()[name](Rank(nccl, Stub(path), id, rank, size))
                status = 0
            except BaseException:
                sys.stderr.write(f"{name} {environment} rank {rank}:\n{traceback.format_exc()}")
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255 for child in children)


if __name__ == "__main__":
    sys.exit(max(fork_ranks(sys.argv[1], *case) for case in json.loads(sys.argv[2])))
