"""The calls of a communicator in progress: collectives in their fixed order, sends and receives independently.

A thread that waits for one call of the communicator takes the steps of all its calls, as in MPI. So a call that a
thread waits for needs no other thread. A helper thread takes steps while no thread waits.

Nothing here blocks inside a backend: a test is repeated until it is True, the time limit passes, Ctrl-C is pressed, a
rank turns out to have left, or the communicator is aborted.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from collectives.engine.call import CollectiveOp, Plan
from collectives.engine.waiting import LONG_PAUSE, PAUSE, check_wait, spin
from collectives.errors import (
    ArgumentError,
    CollectiveInterrupted,
    CollectivesError,
    CommunicatorClosed,
    MismatchError,
    TooManyCommunicators,
    WorldError,
    copy_error,
    no_rank,
)
from collectives.flight.recorder import QUEUED, STARTED, process_recorder
from collectives.time_limit import Deadline
from collectives.transport import Steps, Transport

T = TypeVar("T")

# Errors that a step raises only after the last operation of its call, or on all ranks together. So ranks still agree on
# the next call.
RECOVERABLE = (ArgumentError, MismatchError, TooManyCommunicators)
# Interval at which a waiting rank checks for exits and time limits (s).
_CHECK_INTERVAL = 0.05
_UNRECORDED = (0, None)
# A plan keeps the texts of at most this many call sites. Without a limit, code that is compiled anew for each call
# would add a site each time.
_MAX_SITES = 256
# After this many rounds without work the helper thread sleeps until it is woken, or for `_LEFT`. Not sooner, because
# waking it takes as long as a small call.
_IDLE_ROUNDS = 10
# If the helper thread is woken for a call, and another thread already waits for that call, the helper thread sleeps
# for this long (s): the next calls are probably waited for, too, and looking for work would delay each of them.
_WAITED_FOR = 2e-3
# Where ranks share cores: how long the helper thread leaves the calls to a thread that has called `expect_wait` (s).
# Then the helper thread takes over, since the other thread may have raised an exception, and may never wait.
_LEFT = 1.0

# MPI cannot cancel a collective: the buffers of a failed call must live until the process ends.
_never_freed: list[Any] = []


class CallQueue:
    """The calls of one communicator on one rank.

    started: number of collectives added; p2p_counts: returns the counts of sends and receives for the exit notice
    lock: guards the order of calls
    enter_helper: called in the helper thread before it takes steps
    """

    def __init__(self, transport: Transport, on_closed: Callable[[], None] = lambda: None) -> None:
        self._transport = transport
        self._on_closed = on_closed  # Called once, when the queue is closed and all its calls are finished.
        self._closed = False
        self._closing = False
        self._released = False
        # The error of the first call that failed before its end, or of `abort`; in a forked child, the
        # error that `no_rank` returns. All later calls raise it.
        self._error: BaseException | None = None
        # From `abort`. Called whenever the program gets the error of a call, just before it is raised.
        self.notify: Callable[[], None] = lambda: None
        self._aborted = False
        on_one_node = transport.shares_memory and transport.local_size == transport.size
        # Whether all ranks are on this node and share memory, and the node has fewer than two cores for each rank. Then
        # helper threads delay the threads that compute.
        self._shares_cores = on_one_node and (os.cpu_count() or 1) < 2 * transport.local_size
        self.enter_helper: Callable[[], object] = lambda: None
        self.recorder = process_recorder()
        self.started = 0
        self.p2p_counts: Callable[[], dict[str, int]] = dict
        self._unordered_numbers: Counter[str] = Counter()
        self._reset()
        _queues.add(self)

    def _reset(self) -> None:
        """Sets up a queue without calls."""
        self.lock = threading.RLock()  # Reentrant: a signal handler may interrupt its holder.
        self._ordered: deque[CollectiveOp[Any]] = deque()  # The first is in progress, the next ones may be, too.
        self._unordered: list[CollectiveOp[Any]] = []
        # Steps run in this context, one thread at a time. NumPy neither warns nor raises in it: all ranks must behave
        # alike, also where one of them has an infinity or NaN.
        self._context = contextvars.Context()
        self._context.run(np.seterr, all="ignore")
        # Held by the thread that takes steps, whose id is `_stepper`.
        self._stepping = threading.RLock()
        self._stepper = 0
        self._waiting: set[int] = set()  # Thread ids. If Ctrl-C leaves one here, that thread's next wait removes it.
        self._left_until = 0.0  # Until this time the calls are left to a thread that computes before it waits.
        self._next_check = 0.0
        self._helper: threading.Thread | None = None
        self._wake = threading.Event()
        self._asleep = False

    def _detach_from_parent(self) -> None:
        """In a forked child: abandons the calls in progress, which threads of the parent complete."""
        no_calls = no_rank(self._transport.rank, self._transport.size)
        for call in (*self._ordered, *self._unordered):
            parent = f"goes on in process {os.getppid()}, of which this one was forked: wait for it there"
            call.abandon(WorldError(f"{call} {parent}"))
        self._reset()
        if self._transport.name != "single":  # There are other ranks, for which the child must not act as the parent.
            self.notify = lambda: None
            self._error = no_calls
            # All resources of this queue are the parent's.
            self._closed = True
            self._closing = True
            self._released = True

    # Calls -----------------------------------------------------------------------------------------------------------

    def run(self, call: CollectiveOp[T], ordered: bool = True) -> T:
        """Runs `call` now and returns its result. ordered: after all collectives that were submitted before it"""
        if self._stepper:
            self._refuse_nested(call)  # Before `_add` counts the call.
        call.waited_for = True
        self._add(call, ordered)
        try:
            self._take(self._advance_all)
            if not call.done:
                self._wait_until_done(call, None)
        except BaseException as error:
            self._break(call, error)
            raise
        if call.error is not None:
            self.notify()
            raise copy_error(call.error)
        return call.result  # type: ignore[return-value]  # A finished call without an error has a result.

    def submit(self, call: CollectiveOp[Any], ordered: bool = True, awaited: bool = True) -> None:
        """Queues `call`, and starts it if that takes little time. A waiting thread or the helper thread continues it.

        awaited: False if no other rank waits for the call: then a sleeping helper thread is not woken for it
        """
        self._add(call, ordered)
        if not ordered:
            self._take(self._start_unordered)
        elif not callable(call.scale):  # A scale function may be slow.
            if call.plan.small:
                self._take(self._start, call)
            elif call.source is call.target and self._transport.in_flight > 1:
                # This sends data while this thread computes. A call in place needs no copy at its start, unless the
                # array is converted for sending.
                self._take(self._start_ahead)
        if awaited and not call.done:
            self.wake_helper()

    def wake_helper(self) -> None:
        """Makes the helper thread continue the calls that no thread waits for."""
        if self._helper is None:
            self._start_helper()
        else:  # If it is not asleep, it takes steps soon anyway.
            self._wake_if_needed()

    def _wake_if_needed(self) -> None:
        if self._asleep and self._has_steps():
            self._wake.set()

    def expect_wait(self) -> Callable[[], None]:
        """Called by a thread that will compute, and then wait. Returns: the function that waits for all collectives

        Where ranks share cores, the helper thread then takes no steps until this thread waits, or `_LEFT` has passed.
        The helper threads of two ranks would have to meet for each tile, which takes several times as long while all
        cores compute.
        """
        if self._shares_cores:
            self._left_until = time.monotonic() + _LEFT

        def wait_for_all() -> None:
            self._left_until = 0.0
            try:
                last = self._ordered[-1]
            except IndexError:  # No collective is in progress.
                self._wake_if_needed()
            else:
                self._wait_until_done(last, None)

        return wait_for_all

    def record_launched(self, call: CollectiveOp[Any]) -> None:
        """Records a call that already runs on a device, outside of the order of collectives.

        Raises: CommunicatorClosed; the error of an earlier call, if the queue is broken.
        """
        with self.lock:
            if self._error is not None or self._closed:
                self._refuse(call)
            self._record(call, self.started, STARTED)
        call.set_outcome(None, None)

    def wait(self, call: CollectiveOp[Any], deadline: Deadline | None) -> bool:
        """Takes steps until `call` is finished. Returns: whether it finished before the deadline.

        Raises: CollectivesError if this thread is already taking steps, for example in a done callback.
        """
        if self._stepper:
            self._refuse_nested(call)
        return self._wait_until_done(call, deadline)

    def _wait_until_done(self, call: CollectiveOp[Any], deadline: Deadline | None) -> bool:
        thread = threading.get_ident()
        call.waited_for = True
        try:
            self._waiting.add(thread)
            self._take(self._advance_all)
            while not call.done:
                if not spin(lambda: call.done or self._take(self._advance_all)):
                    time.sleep(PAUSE)
                    while not (call.done or self._take(self._advance_all, True) or _passed(deadline)):
                        time.sleep(PAUSE)
                if _passed(deadline):
                    return call.done
        finally:
            self._waiting.discard(thread)
            self._wake_if_needed()
        return True

    def drain(self, deadline: Deadline) -> bool:
        """Waits until no call is in progress, and a closed queue is released. Returns: False after the deadline"""
        while self._ordered or self._unordered or (self._closed and not self._released):
            if deadline.passed():
                return False
            self._take(self._advance_all, True)
            time.sleep(PAUSE)
        return True

    def close(self) -> None:
        """Makes the queue refuse further calls. The helper thread or a waiting thread finishes those in progress."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._wake.set()
            if self._helper is None and (self._ordered or self._unordered):
                self._start_helper()
        self._release_if_idle()

    def _add(self, call: CollectiveOp[Any], ordered: bool) -> None:
        with self.lock:
            if self._error is not None or self._closed:
                self._refuse(call)
            state = STARTED if call.waited_for and not self._ordered else QUEUED
            if ordered:
                self._record(call, self.started, state)
                self.started += 1
                self._ordered.append(call)
            else:
                self._record(call, self._unordered_numbers[call.name], state)
                self._unordered_numbers[call.name] += 1
                self._unordered.append(call)

    def _refuse(self, call: CollectiveOp[Any]) -> None:
        if self._error is not None:
            self.notify()
            raise copy_error(self._error)
        raise CommunicatorClosed(f"rank {self._transport.rank}: {call.name} ({call.site}) on a closed communicator")

    def _record(self, call: CollectiveOp[Any], number: int, state: int) -> None:
        plan = call.plan
        code = call.code
        recorder = self.recorder
        call.queue = self
        call.number = number
        call.recorder = recorder
        call.state = state
        site = (id(code), call.instruction)
        text, _ = plan.recorded.get(site, _UNRECORDED)
        if text <= recorder.oldest:
            text = recorder.intern(
                self._transport.label, plan.name, plan.dtype, plan.shape, plan.more, code.co_filename, call.line
            )
            if len(plan.recorded) >= _MAX_SITES:
                plan.recorded.clear()
            plan.recorded[site] = text, code
        call.record = recorder.begin(text, number, state)

    def _refuse_nested(self, call: CollectiveOp[Any]) -> None:
        if self._stepper == threading.get_ident():
            raise CollectivesError(
                f"rank {self._transport.rank}: {call.name} ({call.site}) is waited for in a done callback, a signal "
                "handler or a finalizer of the thread that has to carry it out: give it async_op=True; wait elsewhere"
            )

    # Steps -----------------------------------------------------------------------------------------------------------

    def _take(self, steps: Callable[..., bool], *arguments: Any) -> bool:
        """Calls `steps` and returns its result. Returns False at once if a thread is already taking steps.

        Does not wait for that thread, because its done callbacks may need a lock that this thread holds. That thread
        may also be this one, if a signal handler that makes a call has interrupted its steps.
        """
        if self._stepper:
            return False
        thread = threading.get_ident()
        try:
            if not self._stepping.acquire(False):
                return False
            self._stepper = thread
            progressed = self._context.run(steps, *arguments)
            self._stepper = 0
            self._stepping.release()
        except BaseException:  # Ctrl-C, which may have come right after the lock was acquired.
            if self._stepper == thread:
                self._stepper = 0
            try:
                self._stepping.release()
            except RuntimeError:  # Not `suppress`, which runs Python code, where Ctrl-C may come again.
                pass
            raise
        if self._closed:
            self._release_if_idle()
        return progressed

    def _advance_all(self, check_waits: bool = False) -> bool:
        """Takes all steps that can be taken now. Returns: whether there was any. check_waits: see `_check_waits`"""
        progressed = False
        ordered = self._ordered
        while ordered:
            call = ordered[0]
            progressed = self._advance(call) or progressed
            if not call.done:
                break
            ordered.popleft()
        if len(ordered) > 1:
            progressed = self._start_ahead() or progressed
        if self._unordered:
            for call in tuple(self._unordered):
                progressed = self._advance(call) or progressed
                if call.done:
                    self._unordered.remove(call)
        if check_waits:
            self._check_waits()
        return progressed

    def _start_ahead(self) -> bool:
        """Starts collectives from the front of the queue, as far as they can run at the same time.

        Starts at most as many as the transport can have in flight. Returns: whether any call took a step
        """
        progressed = False
        # By index: iterating over a deque fails if another thread appends to it meanwhile.
        for index in range(min(len(self._ordered), self._transport.in_flight)):
            call = self._ordered[index]
            if call.done:  # The call has ended before its turn, and is removed when its turn comes.
                break
            # All ranks must start their operations in the same order. A scale function may depend on earlier results.
            if not call.plan.beside or (index and (callable(call.scale) or not self._ordered[index - 1].posted)):
                break
            # Calls that use the same memory run one after the other: two reductions of one array in place, for example.
            if any(_overlap(call, self._ordered[earlier]) for earlier in range(index)):
                break
            if not call.posted:
                progressed = self._advance(call, ahead=True) or progressed
        return progressed

    def _start(self, call: CollectiveOp[Any]) -> bool:
        """Takes the first step of a collective if it is first in order."""
        if not self._ordered or self._ordered[0] is not call:
            return False
        self._advance(call, first=True)
        if call.done:
            self._ordered.popleft()
        return True

    def _start_unordered(self) -> bool:
        """Starts the sends and receives, in order: messages with the same tag must arrive in the order of sending."""
        for call in [call for call in self._unordered if call.test is None]:
            self._advance(call)
            if call.done:
                self._unordered.remove(call)
        return True

    def _advance(self, call: CollectiveOp[Any], first: bool = False, ahead: bool = False) -> bool:
        """Takes the steps of one call that can be taken now. Returns: whether there was any.

        first: takes at most one step; ahead: only starts the call's operation, perhaps before the call's turn
        """
        test_before = call.test
        try:
            try:
                if call.done:
                    return True
                if self._error is not None and (test_before is None or call.state == QUEUED):
                    if test_before is not None:
                        self._keep(call)
                    call.set_outcome(None, copy_error(self._error))
                    return True
                if test_before is None and call.state == QUEUED:
                    self.recorder.start(call.record)
                if not (ahead and call is not self._ordered[0]):
                    call.state = STARTED
                if test_before is None and call.steps is None and call.plan.inline.complete_now(call):
                    return True
                assert call.steps is not None
                while call.test is None or (not first and not (ahead and call.posted) and call.test()):
                    call.test = next(call.steps)
                    call.deadline = None
            except StopIteration as end:
                call.set_outcome(end.value, None)
            except RECOVERABLE as error:
                call.set_outcome(None, error)
            except Exception as error:
                self._break(call, error)
        except BaseException as error:  # Ctrl-C, perhaps in the middle of a step, which must not be taken again.
            if not call.done:
                self._break(call, error)
            raise
        return call.done or call.test is not test_before

    def _check_waits(self) -> None:
        """At intervals, checks the time limit and the peers of each send and receive, and of the first collective.

        Fails a call if its time limit has passed, a rank for which it waits has left, or the queue was aborted.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_INTERVAL
        # By index: copying a deque fails if another thread appends to it meanwhile. Only this thread removes calls.
        first = [self._ordered[0]] if self._ordered else []
        for call in (*first, *tuple(self._unordered)):
            try:
                if self._aborted:
                    assert self._error is not None
                    raise copy_error(self._error)
                check_wait(call, self._transport)
            except Exception as error:
                self._break(call, error)
                if call in first:
                    self._ordered.popleft()
                else:
                    self._unordered.remove(call)

    def _has_steps(self) -> bool:
        """Whether the helper thread has steps to take. It has none while a thread waits: the two would compete."""
        has_calls = self._ordered or self._unordered
        return bool(has_calls) and not self._waiting and time.monotonic() >= self._left_until

    def _run_helper(self) -> None:
        idle_rounds = 0
        while not self._closing:
            if not self._has_steps():
                idle_rounds += 1
                self._release_if_idle()
                self._asleep = idle_rounds > _IDLE_ROUNDS
                self._wake.clear()
                pause = _LEFT if self._asleep and not self._closed else LONG_PAUSE
                if not self._has_steps() and self._wake.wait(pause):
                    if self._has_steps() or self._closed:
                        idle_rounds = 0
                    else:
                        self._asleep = False
                        time.sleep(_WAITED_FOR)
                continue
            idle_rounds = 0
            self._asleep = False
            with contextlib.suppress(Exception):  # A broken device, whose error the steps will raise.
                self.enter_helper()
            if self._take(self._advance_all, True):
                # A waiting thread takes the steps itself. Spinning here as well would only slow it down.
                while not self._waiting and spin(lambda: bool(self._waiting) or self._take(self._advance_all)):
                    pass
            time.sleep(LONG_PAUSE)

    def _start_helper(self) -> None:
        name = f"collectives-{self._transport.key}"
        self._helper = threading.Thread(target=self._run_helper, name=name, daemon=True)
        self._helper.start()

    # Closing and failure ---------------------------------------------------------------------------------------------

    def _release_if_idle(self) -> None:
        """Releases what a closed queue holds, once all its calls are finished."""
        with self.lock:
            if not self._closed or self._closing or self._ordered or self._unordered:
                return
            self._closing = True
        try:
            self._wake.set()
            if self._error is None:  # Otherwise a failed call may still use the transport.
                self._transport.close()
            self._on_closed()
        finally:
            self._released = True

    @property
    def broken(self) -> bool:
        """True once a call failed before its end, or after `abort`: all later calls on this communicator raise."""
        return self._error is not None

    def abort(self, error: CollectivesError, notify: Callable[[], None] | None = None) -> None:
        """Makes calls in progress and all later calls raise `error`, for example after a failure on the device.

        May be called from any thread. If the queue is already broken, they raise the error that broke it.
        notify: called when the program gets the error, from a call or a wait. A call that fails in the helper thread
        raises nothing until the program waits for it. None: as before
        """
        with self.lock:
            if notify is not None:
                self.notify = notify
            if self._error is None:
                self._error = error
            self._aborted = True

    def _break(self, call: CollectiveOp[Any], error: BaseException) -> None:
        """Fails a call before its end. From then on ranks may disagree on what comes next."""
        if not isinstance(error, Exception):
            error = CollectiveInterrupted(
                f"rank {self._transport.rank}: {call} was interrupted ({type(error).__name__}); this communicator "
                "cannot go on"
            )
        elif not isinstance(error, CollectivesError):
            cause = error
            error = CollectivesError(f"rank {self._transport.rank}: {call} failed: {type(error).__name__}: {error}")
            error.__cause__ = cause
        if self._error is None:
            self._error = error
        if not call.done:
            self._keep(call)
        call.set_outcome(None, error)

    def _keep(self, call: CollectiveOp[Any]) -> None:
        """Keeps the buffers of a failed call until the process ends."""
        _never_freed.append((call.test, call.steps, call.source, call.target, call.preallocated, call.out))


def _overlap(call: CollectiveOp[Any], other: CollectiveOp[Any]) -> bool:
    """Whether one of the calls may write to memory that the other one uses."""
    pairs = ((call.source, other.target), (call.target, other.source), (call.target, other.target))
    return any(np.may_share_memory(a, b) for a, b in pairs)


def _passed(deadline: Deadline | None) -> bool:
    return deadline is not None and deadline.passed()


def run_to_completion(name: str, steps: Steps[T], transport: Transport, timeout: float) -> T:
    """Runs steps of ranks that have no communicator yet, and returns the result.

    Raises: CollectiveTimeout, PeerLeft, and each CollectivesError of the steps. Other errors of the steps become one.
    """
    call: CollectiveOp[T] = CollectiveOp(Plan(name), timeout)
    call.steps = steps
    return CallQueue(transport).run(call)


_queues: weakref.WeakSet[CallQueue] = weakref.WeakSet()


def _after_fork() -> None:
    for queue in _queues:
        queue._detach_from_parent()


os.register_at_fork(after_in_child=_after_fork)
