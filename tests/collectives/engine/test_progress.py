"""Waits that end: time limits, ranks that left, interruptions, and what a communicator is worth afterwards."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from collectives import (
    CollectiveInterrupted,
    CollectivesError,
    CollectiveTimeout,
    Communicator,
    CommunicatorClosed,
    MismatchError,
    PeerLeft,
    run_threads,
)
from collectives.backends.single import SingleTransport
from collectives.engine import queue
from collectives.engine.call import CollectiveOp, Plan, Work
from collectives.errors import ranks_with_verb
from collectives.flight.reader import read
from collectives.transport import ExitNotice, Test, describe_exits, left_before
from collectives.world import STOPPED
from tests.conftest import wait_until


def test_a_finished_work_lets_its_arrays_go() -> None:
    def check(comm: Communicator) -> None:
        for call in (comm.all_reduce, comm.reduce, comm.reduce_scatter, comm.all_gather, comm.all_to_all):
            x = np.ones(1000)
            work = call(x, async_op=True)
            alive = weakref.ref(x)
            work.wait()
            del x
            gc.collect()
            assert alive() is None, f"{work} keeps its array"

    run_threads(check, 2, timeout=20)


class NeverTransport(SingleTransport):
    """A world whose other rank never comes."""

    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.left: dict[int, ExitNotice] = {}

    def all_reduce(self, x: object, out: object, op: object, epilogue: object = None) -> Test:
        self.calls.append("all_reduce")
        return lambda: False

    def barrier(self) -> Test:
        self.calls.append("barrier")
        return lambda: True

    def exit_notices(self) -> dict[int, ExitNotice]:
        return self.left


def test_a_collective_past_its_limit_breaks_the_communicator_for_good_and_what_is_queued_behind_it() -> None:
    transport = NeverTransport()
    comm = Communicator(transport, timeout=0.2)
    works = [comm.all_reduce(np.ones(3), async_op=True), comm.barrier(async_op=True)]
    first_error = r"all_reduce #0 \(test_progress.py:\d+\) sum float64 \(3,\)"
    for call in (*(work.wait for work in works), comm.barrier, lambda: comm.barrier(async_op=True)):
        with pytest.raises(CollectiveTimeout, match=first_error):
            call()
    assert transport.calls == ["all_reduce"]


class WireTransport(NeverTransport):
    """Carries two collectives at once. posted: their sizes, in the order in which they were started"""

    in_flight = 2

    def __init__(self) -> None:
        super().__init__()
        self.key = "wire"
        self.posted: list[int] = []
        self.complete: set[int] = set()

    def all_reduce(self, x: np.ndarray, out: object, op: object, epilogue: object = None) -> Test:
        self.posted.append(len(x))
        return lambda: len(x) in self.complete


def test_collectives_run_beside_those_before_them_and_end_in_order() -> None:
    transport = WireTransport()
    comm = Communicator(transport, timeout=20)
    works = [comm.all_reduce(np.ones(n), async_op=True) for n in (1, 2, 3)]
    # What its scale depends on must be complete.
    works.append(comm.all_reduce(np.ones(4), scale=lambda: 1.0, async_op=True))
    works.append(comm.all_reduce(np.ones(5), async_op=True))

    def after(number: int) -> tuple[list[int], list[bool], list[str]]:
        """What has been started, what has ended, and what the flight record calls under way."""
        with pytest.raises(CollectiveTimeout):
            works[number].wait(0.01)
        calls = read(os.getpid()).calls
        return (
            transport.posted,
            [work.done() for work in works],
            [call.shape for call in calls if call.communicator == "wire" and call.state == "started"],
        )

    assert after(0) == ([1, 2], [False] * 5, ["(1,)", "(2,)"])
    transport.complete = {2}
    assert after(0) == ([1, 2], [False] * 5, ["(1,)", "(2,)"])
    transport.complete = {1, 2}
    assert after(2) == ([1, 2, 3], [True, True, False, False, False], ["(3,)"])
    transport.complete = {1, 2, 3}
    assert after(3) == ([1, 2, 3, 4, 5], [True, True, True, False, False], ["(4,)", "(5,)"])
    comm.queue.abort(CollectivesError("lost"), lambda: None)
    for work in works[3:]:
        with pytest.raises(CollectivesError, match="lost"):
            work.wait()


@pytest.mark.parametrize("state", ["queued", "started"])
def test_an_abort_is_known_once_the_program_gets_its_error(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(queue.CallQueue, "_start_helper", lambda self: None)
    comm = Communicator(NeverTransport(), timeout=20)
    # A call whose scale is a function is only queued; a small one is started.
    work = comm.all_reduce(np.ones(3), scale=(lambda: 1.0) if state == "queued" else None, async_op=True)
    assert work._call.state == (queue.QUEUED if state == "queued" else queue.STARTED)
    notified: list[str] = []
    comm.queue.abort(CollectivesError("lost"), lambda: notified.append(state))
    comm.queue._take(comm.queue._advance_all, True)  # as the helper thread does
    assert work._call.done
    assert notified == []
    with pytest.raises(CollectivesError, match="lost"):
        work.wait()
    assert notified == [state]


def test_an_abort_of_a_broken_communicator_ends_calls_in_progress_and_is_known() -> None:
    class Broken(WireTransport):
        def all_reduce(self, x: np.ndarray, out: object, op: object, epilogue: object = None) -> Test:
            assert len(x) != 2, "broken"
            return super().all_reduce(x, out, op, epilogue)

    comm = Communicator(Broken(), timeout=20)
    works = [comm.all_reduce(np.ones(n), async_op=True) for n in (1, 2)]
    with pytest.raises(CollectivesError, match="broken"):
        works[1].wait()
    notified: list[str] = []
    comm.queue.abort(CollectivesError("lost"), lambda: notified.append("lost"))
    for call in (works[0].wait, comm.barrier):
        with pytest.raises(CollectivesError, match="broken"):
            call()
    assert notified == ["lost", "lost"]


def test_a_failure_before_its_turn_leaves_the_time_limit_of_those_before_it() -> None:
    class Mismatched(WireTransport):
        def all_reduce(self, x: np.ndarray, out: object, op: object, epilogue: object = None) -> Test:
            if len(x) == 2:
                raise MismatchError("other lengths")
            return super().all_reduce(x, out, op, epilogue)

    comm = Communicator(Mismatched(), timeout=0.2)
    works = [comm.all_reduce(np.ones(n), async_op=True) for n in (1, 2)]
    with pytest.raises(CollectiveTimeout, match="#0"):
        works[0].wait()
    with pytest.raises(MismatchError, match="other lengths"):
        works[1].wait()


def test_collectives_on_the_same_memory_do_not_run_beside_each_other() -> None:
    transport = WireTransport()
    comm = Communicator(transport, timeout=20)
    x = np.ones(20_000)
    works = [comm.all_reduce(part, out=part, async_op=True) for part in (x, x[:10_000])]
    for complete, posted in ((set(), [20_000]), ({20_000}, [20_000, 10_000])):
        transport.complete = complete
        with pytest.raises(CollectiveTimeout):
            works[1].wait(0.01)
        assert transport.posted == posted
    transport.complete = {10_000}
    works[1].wait()


def test_what_a_broken_call_may_still_write_to_is_kept() -> None:
    class Request:
        def test(self) -> bool:
            return False

    requests: list[weakref.ref[Request]] = []

    class Requesting(NeverTransport):
        def all_gather(self, x: object, out: object, counts: object) -> Test:
            request = Request()
            requests.append(weakref.ref(request))
            return request.test

        def send(self, x: object, dst: int, tag: int) -> Test:
            return self.all_gather(x, None, None)

    comm = Communicator(Requesting(), timeout=0.1)
    works = [comm.send(np.ones(2), 1, async_op=True) for _ in range(2)]
    works.append(comm.all_gather(np.ones((4, 4))[::2], lengths=[2, 2], async_op=True))
    for work in works:
        with pytest.raises(CollectiveTimeout):
            work.wait()
    del work, works
    gc.collect()
    assert len(requests) == 3
    assert all(request() is not None for request in requests)


def test_a_limit_given_to_wait_leaves_the_communicator_usable() -> None:
    def check(comm: Communicator) -> float:
        if comm.rank == 1:
            time.sleep(0.3)
        work: Work[np.ndarray] = comm.all_reduce(np.ones(1), async_op=True)
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"after waiting 0.05 s; it goes on"):
                work.wait(timeout=0.05)
            assert not work.done()
        return float(work.wait()[0])

    assert run_threads(check, size=2) == [2.0, 2.0]


def test_ctrl_c_reaches_a_waiting_rank_at_once() -> None:
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])

    class Interrupted(NeverTransport):
        def all_reduce(self, x: object, out: object, op: object, epilogue: object = None) -> Test:
            timer.start()  # not before: an interrupt outside of the call would end the tests
            return super().all_reduce(x, out, op, epilogue)

    comm = Communicator(Interrupted(), timeout=30)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        comm.all_reduce(np.ones(1))
    assert time.monotonic() - start < 10
    with pytest.raises(CollectiveInterrupted, match=r"all_reduce #0 .* was interrupted"):
        comm.barrier()


def test_the_helper_thread_takes_a_call_that_nobody_waits_for_after_calls_that_are_waited_for() -> None:
    def check(comm: Communicator) -> None:
        x = np.ones(1)
        for _ in range(10):
            time.sleep(20 * queue.LONG_PAUSE)  # long enough for the helper thread to fall asleep
            comm.all_reduce(x, async_op=True).wait()
        completed = threading.Event()
        comm.all_reduce(x, async_op=True)._call.add_done_callback(completed.set)  # without a look at the queue
        assert completed.wait(20)

    run_threads(check, 2, timeout=60)


def test_calls_may_be_submitted_while_the_helper_thread_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_CHECK_INTERVAL", 0.0)
    interval = sys.getswitchinterval()
    threshold = gc.get_threshold()
    comm = Communicator(NeverTransport(), timeout=30)
    over = threading.Event()

    def let_another_thread_run(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    def look() -> None:
        while not over.is_set():
            comm.queue._check_waits()

    with ThreadPoolExecutor(1) as helper:
        sys.setswitchinterval(1e-6)
        gc.set_threshold(10, 1000, 1000)
        gc.callbacks.append(let_another_thread_run)  # as a finalizer would
        try:
            looking = helper.submit(look)
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                comm.all_reduce(np.ones(1), async_op=True)
        finally:
            over.set()
            gc.callbacks.remove(let_another_thread_run)
            gc.set_threshold(*threshold)
            sys.setswitchinterval(interval)
        assert looking.result() is None  # nothing was raised


def test_a_rank_that_left_before_the_call_is_named() -> None:
    transport = NeverTransport()
    comm = Communicator(transport, timeout=30)
    transport.left = {1: ExitNotice(status=0, calls={"world": 0})}
    with pytest.raises(PeerLeft, match=r"rank 1 has left \(exit status 0\) while rank 0 waits in all_reduce #0"):
        comm.all_reduce(np.ones(1))


def test_never_coming_is_a_table() -> None:
    left = {2: ExitNotice(status=0, calls={"world": 3}), 1: ExitNotice(status=3, calls={"world": 9})}
    assert left_before(left, "world", 2) == [1]
    assert left_before(left, "world", 3) == [1, 2]
    assert left_before({2: left[2]}, "other", 0) == [2]
    assert describe_exits(left, [1, 2]) == "rank 1 has failed (exit status 3) and rank 2 has left (exit status 0)"
    stopped = {1: ExitNotice(status=STOPPED, calls={"world": 3})}  # in order: it took part in what it called
    assert left_before(stopped, "world", 2) == []
    assert describe_exits(stopped, [1]) == "rank 1 has stopped as asked (exit status 75)"
    assert describe_exits(dict.fromkeys((1, 2), left[2]), [1, 2]) == "ranks 1-2 have left (exit status 0)"
    assert ranks_with_verb([3], "has", "have") == "rank 3 has"


def test_thousands_of_closed_communicators_make_a_short_exit_notice() -> None:
    comm = Communicator(SingleTransport(), timeout=30)
    for _ in range(50):
        twin = comm.duplicate()
        part = twin.split(3)
        part.barrier()
        part.close()
        twin.close()
    comm.create_group([0]).close()
    calls = dict(comm.registry.calls())
    assert (calls["world.7"], calls["world.7.0:3"]) == (1, 1)
    many = {f"world.{number}{more}": 2 for number in range(3200) for more in ("", ":5", " 0>1 sent")}
    many |= {"world": 9, "world.17": 3, "world.-1": 4, "a.007": 1}
    for notice in (ExitNotice(status=0, calls=calls), ExitNotice(status=3, calls=many)):
        assert ExitNotice.decode(notice.encode()) == notice
    assert len(notice.encode()) < 500


def test_a_simulated_rank_that_does_not_end_is_named() -> None:
    release = threading.Event()

    def check(comm: Communicator) -> None:
        if comm.rank == 1:
            release.wait(10)

    with pytest.raises(CollectiveTimeout, match=r"rank 1 of 2 still ran after 0\.2 s"):
        run_threads(check, size=2, timeout=0.2)
    release.set()


def test_closing_ends_the_helper_thread() -> None:
    comm = Communicator(SingleTransport("closing"), timeout=5)
    comm.all_reduce(np.ones(100_000), async_op=True)
    comm.close()
    wait_until(lambda: all(thread.name != "collectives-closing" for thread in threading.enumerate()), 5)
    with pytest.raises(CommunicatorClosed, match="on a closed communicator"):
        comm.barrier()


def test_a_signal_handler_in_the_middle_of_a_call_starts_calls_and_waits_for_none() -> None:
    transport = NeverTransport()
    comm = Communicator(transport, timeout=30)
    results: list[object] = []
    started = threading.Event()

    def all_reduce(*_: object) -> Test:
        signal.raise_signal(signal.SIGUSR1)  # this rank is in a step
        return lambda: started.is_set()

    def handler(*_: object) -> None:
        try:
            comm.barrier()
        except CollectivesError as error:
            results.append(str(error))
        results.append(comm.barrier(async_op=True))
        started.set()

    transport.all_reduce = all_reduce  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        comm.all_reduce(np.ones(1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    refused, work = results
    assert "barrier" in str(refused)
    assert "is waited for in a done callback, a signal handler or a finalizer" in str(refused)
    assert isinstance(work, Work)
    assert work.wait(timeout=20) is None
    assert comm.queue.started == 2


def test_a_call_starts_while_a_done_callback_waits_for_a_lock_of_its_caller() -> None:
    comm = Communicator(SingleTransport("locks"), timeout=30)
    lock = threading.Lock()
    entered = threading.Event()

    def callback(_: object) -> None:
        entered.set()
        with lock:
            pass

    with lock:
        comm.recv(0, async_op=True).add_done_callback(callback)
        comm.send(np.ones(1), 0, async_op=True)
        assert entered.wait(20)  # in the helper thread
        works = [comm.send(np.full(1, number), 0, tag=1, async_op=True) for number in range(3)]
        works.append(comm.barrier(async_op=True))
        assert not any(work.done() for work in works)
    assert [int(comm.recv(0, tag=1)[0]) for _ in works[1:]] == [0, 1, 2]
    comm.close()


def test_a_call_is_submitted_at_once_while_another_thread_begins_to_take_steps() -> None:
    comm = Communicator(SingleTransport("steps"), timeout=30)
    taken, over = threading.Event(), threading.Event()

    def begin_steps() -> None:  # it has the lock, and has not said so yet
        with comm.queue._stepping:
            taken.set()
            assert over.wait(20)

    with ThreadPoolExecutor(2) as threads:
        stepping = threads.submit(begin_steps)
        assert taken.wait(20)
        try:
            for call in (lambda: comm.barrier(async_op=True), lambda: comm.send(np.ones(1), 0, async_op=True)):
                assert not threads.submit(call).result(10).done()
            with pytest.raises(CollectiveTimeout, match=r"after waiting 0.1 s"):
                threads.submit(lambda: comm.all_reduce(np.ones(1), async_op=True).wait(timeout=0.1)).result(10)
        finally:
            over.set()
        stepping.result(10)
    assert comm.recv(0) == 1
    comm.close()


def test_callbacks_that_threads_add_at_once_are_all_called() -> None:
    interval = sys.getswitchinterval()
    called: list[int] = []

    def add(number: int, work: Work[None], start: threading.Barrier) -> None:
        start.wait(10)
        work.add_done_callback(lambda _: called.append(number))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            for turn in range(200):
                call: CollectiveOp[None] = CollectiveOp(Plan("barrier"), 1.0)
                start = threading.Barrier(2)
                list(threads.map(add, (2 * turn, 2 * turn + 1), [Work(call)] * 2, [start] * 2))
                call.set_outcome(None, None)
    finally:
        sys.setswitchinterval(interval)
    assert sorted(called) == list(range(400))


def test_what_a_callback_says_of_numpys_errors_ends_with_it() -> None:
    comm = Communicator(SingleTransport("errors"), timeout=30)
    heard = []
    huge = np.full(2, 3e38, np.float32)
    for _ in range(2):
        work = comm.all_reduce(huge, scale=2.0, async_op=True)
        work.add_done_callback(lambda _: heard.append(np.seterr(all="raise")["over"]))
        assert np.isinf(comm.all_reduce(huge, scale=2.0)).all()
    assert len(heard) == 2
    assert "raise" not in heard
    comm.close()


def test_a_plan_remembers_a_bounded_number_of_call_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_MAX_SITES", 3)
    comm = Communicator(SingleTransport(), timeout=30)
    for _ in range(10):  # compiled anew each time, as cells of a notebook are
        exec(compile("comm.all_reduce(np.ones(1))", "cell.py", "exec"), {"comm": comm, "np": np})
    (plan,) = comm._plans.values()
    assert 1 <= len(plan.recorded) <= 3
