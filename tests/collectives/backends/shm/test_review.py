"""Regressions over shared memory: arguments that change from call to call, and calls that end where none should."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import collectives
from collectives import Communicator, CommunicatorClosed
from collectives.backends.shm import call_cache
from collectives.errors import ArgumentError, CollectiveInterrupted, CollectivesError, DtypeError, MismatchError
from collectives.flight.recorder import DONE, FAILED, Recorder
from collectives.ops import reductions
from collectives.reduction import finish
from collectives.time_limit import TimeLimit
from tests.collectives.backends.shm.ranks import run_sharing

PAIR = [0, 0]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_lengths_may_be_any_sequence(kind: Callable[[list[int]], Any]) -> None:
    def body(comm: Communicator) -> None:
        mine = np.full(comm.rank + 1, comm.rank)
        lengths = kind([1, 2]) if comm.rank else [1, 2]  # the same ones, as another type
        for _ in range(2):
            assert_array_equal(comm.all_gather(mine, lengths=lengths), [0, 1, 1])
            whole = comm.gather(mine, lengths=lengths)
            assert comm.rank or whole.tolist() == [0, 1, 1]

    run_sharing(body, PAIR)


def test_an_op_that_cannot_be_hashed_is_an_error_of_arguments() -> None:
    def body(comm: Communicator) -> None:
        op: Any = ["sum"]
        with pytest.raises(ArgumentError, match="op should be one of"):
            comm.all_reduce(np.ones(3), op)

    run_sharing(body, PAIR)


def test_the_second_call_has_the_byte_order_of_the_first() -> None:
    def body(comm: Communicator) -> None:
        x = np.arange(4.0, dtype=">f4")
        for _ in range(3):
            for y in (comm.all_gather(x), comm.gather(x), comm.all_to_all(x), comm.scatter(x), comm.reduce_scatter(x)):
                assert y is None or y.dtype == x.dtype

    run_sharing(body, PAIR)


def test_a_scale_for_whole_numbers_is_an_error_whichever_way_a_call_takes() -> None:
    def body(comm: Communicator) -> None:
        x = np.arange(3)
        for scale in (None, None, 0.5):
            if scale is None:
                comm.barrier()
            elif comm.rank == 1:
                time.sleep(0.02)  # so that rank 0 would leave a cached call half-way
            if scale is None:
                _reduce(comm, x, scale)
            else:
                with pytest.raises(DtypeError, match="scale"):
                    _reduce(comm, x, scale)
        assert_array_equal(comm.broadcast(np.full(3, comm.rank), 1), [1, 1, 1])

    run_sharing(body, PAIR)


def _reduce(comm: Communicator, x: Any, scale: float | None) -> Any:
    return comm.all_reduce(x, scale=scale)


def test_a_function_that_gives_no_scale_breaks_the_communicator() -> None:
    def body(comm: Communicator) -> None:
        bad: Any = lambda: "half"  # noqa: E731
        with pytest.raises(CollectivesError, match="scale"):
            comm.all_reduce(np.ones(100_000), scale=bad)
        assert comm.queue.broken

    run_sharing(body, PAIR)


@pytest.mark.parametrize("run", [run_sharing, lambda fn, nodes: collectives.run_threads(fn, len(nodes), timeout=20)])
def test_a_duplicate_is_the_same_one_on_all_ranks_after_a_mismatch(run: Callable[..., list[str]]) -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(MismatchError):
            comm.duplicate() if comm.rank else comm.barrier()
        with pytest.raises(MismatchError):
            comm.split(0) if comm.rank else comm.barrier()
        twin, part = comm.duplicate(), comm.split(comm.rank == 5)
        assert part is not None
        twin.barrier()
        part.barrier()
        return f"{twin.key} {part.key}"

    assert len(set(run(body, PAIR))) == 1


def _for_ever(fn: Callable[[], object]) -> None:
    while True:
        fn()


class Stop(Exception):
    """What the signal raises."""


@contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def free(lock: Any) -> bool:
    """True if another thread can take the lock."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(timeout=5))
        lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return taken[0]


def test_a_signal_never_leaves_the_lock_of_a_prepared_call_held() -> None:
    kept: list[Communicator] = []

    def body(comm: Communicator) -> None:
        for _ in range(2):
            comm.barrier()
        kept.append(comm)

    run_sharing(body, PAIR)
    comm = kept[0]
    assert comm._call_cache is not None
    prepared = next(iter(comm._call_cache._cached.values()))
    comm.queue._busy = True  # so that it takes the lock, looks, and goes
    for attempt in range(200):
        with pytest.raises(Stop), alarm_after(20e-6 + attempt * 1e-6):
            _for_ever(lambda: prepared.run(None, None, None))
        assert free(comm.queue.lock)


@pytest.mark.parametrize("end", ["call", "another collective", "drain", "close"])
def test_a_call_interrupted_on_its_way_from_the_cache_to_the_general_path_breaks_the_communicator(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    left = threading.Event()

    def interrupted(_: object) -> bool:
        raise KeyboardInterrupt

    def body(comm: Communicator) -> None:
        x = np.ones(3)
        for last in (False, False, True):
            comm.barrier()
            if last and comm.rank == 1:
                assert left.wait(10)  # so that rank 0 leaves its cached call half-way
                return
            if last:
                monkeypatch.setattr("collectives.ops.reductions.is_device_array", interrupted)
            try:
                comm.all_reduce(x)
                assert not last
            except KeyboardInterrupt:
                assert last
        monkeypatch.undo()
        left.set()
        if end == "drain":
            assert comm.queue.drain(TimeLimit(1))
        elif end == "close":
            comm.close()
            assert comm.queue.drain(TimeLimit(1))
        for _ in range(2):
            with pytest.raises(CollectiveInterrupted):
                comm.all_reduce(x) if end == "call" else comm.all_gather_object(x)
        assert comm.queue.broken

    run_sharing(body, PAIR)


def test_an_error_while_a_result_is_made_ends_the_call_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[int] = []
    end = Recorder.end

    def noted(self: Recorder, index: int, state: int = DONE) -> None:
        states.append(state)
        end(self, index, state)

    monkeypatch.setattr(Recorder, "end", noted)

    broken = threading.Event()

    def finish_or_fail(*args: Any) -> None:
        if broken.is_set():
            raise ZeroDivisionError("no finish")
        finish(*args)

    for module in (call_cache, reductions):
        monkeypatch.setattr(module, "finish", finish_or_fail)

    def body(comm: Communicator) -> None:
        x = np.ones(3, np.float32)
        for _ in range(2):
            _reduce(comm, x, 2.0)
        comm.barrier()
        broken.set()
        # A call that is prepared raises what happened; one that had to wait long goes the general path, which wraps it.
        with pytest.raises((ZeroDivisionError, CollectivesError), match="no finish"):
            _reduce(comm, x, 2.0)

    run_sharing(body, PAIR)
    assert states.count(FAILED) == 2


@pytest.mark.parametrize("nodes", [PAIR, [0, 0, 1]])
def test_numpys_error_state_does_not_reach_into_long_reductions(nodes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        huge = np.full(40_000, 3e38, np.float32)
        with np.errstate(all="raise" if comm.rank == 0 else "warn"):  # pytest makes warnings errors
            for _ in range(2):
                assert np.isinf(_reduce(comm, huge, 2.0)).all()

    run_sharing(body, nodes)


def test_arrays_of_two_communicators_made_by_two_threads_are_told_apart() -> None:
    def body(comm: Communicator) -> None:
        twin = comm.duplicate()
        made: dict[Communicator, Any] = {}

        def make(one: Communicator) -> None:
            made[one] = one.empty(20_000, np.float64)

        threads = [threading.Thread(target=make, args=[one]) for one in (comm, twin)]
        for thread in threads[:: 1 if comm.rank else -1]:
            thread.start()
        for thread in threads:
            thread.join()
        made[comm][:], made[twin][:] = 1, 100
        assert comm.all_reduce(made[comm])[0] == 2
        assert twin.all_reduce(made[twin])[0] == 200

    for _ in range(10):
        run_sharing(body, PAIR)


def test_a_signal_handler_in_the_middle_of_a_call_may_close_but_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    handler: dict[int, Callable[[], None]] = {}
    agree = call_cache._CachedCall._all_agree

    def interrupted(self: Any, sequence: int) -> bool:  # where a signal's handler would run
        handler.pop(self._control.me, lambda: None)()
        return agree(self, sequence)

    monkeypatch.setattr(call_cache._CachedCall, "_all_agree", interrupted)

    def body(comm: Communicator) -> None:
        def close() -> None:
            with pytest.raises(CollectivesError, match=r"barrier .* in the middle of another call"):
                comm.barrier()
            comm.close()

        def call() -> None:
            for _ in range(2):  # from one place, where the call is prepared
                with pytest.raises(CollectivesError, match=r"all_reduce .* in the middle of another call"):
                    total()

        def total() -> Any:
            return comm.all_reduce(np.ones(1))

        for turn in range(4):
            if turn == 3:
                handler[comm.rank] = call
            assert total() == comm.size
        for turn in range(4):
            if turn == 3:
                handler[comm.rank] = close
            assert comm.all_reduce(np.ones(1)) == comm.size  # the call itself is finished
        with pytest.raises(CommunicatorClosed):
            comm.barrier()

    run_sharing(body, PAIR)
