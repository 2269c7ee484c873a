"""The calls of a communicator under way: collectives in their one order, sends and receives each on its own.

Steps are taken by whichever thread waits for a call of the communicator, for all of its calls, as in MPI. So a call
that a thread waits for never changes threads. A helper thread takes the steps while no thread waits.

Nothing here blocks inside a backend: a test is repeated until it is True, the time limit passes, Ctrl-C arrives or a
rank turns out to have left.
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

from collectives.engine.call import CollectiveOp, Plan, copy_error
from collectives.engine.waiting import LONG_PAUSE, PAUSE, check_wait, spin
from collectives.errors import (
    ArgumentError,
    CollectiveInterrupted,
    CollectivesError,
    CommunicatorClosed,
    MismatchError,
    TooManyCommunicators,
    WorldError,
    no_rank,
)
from collectives.flight.recorder import QUEUED, STARTED, process_recorder
from collectives.time_limit import TimeLimit
from collectives.transport import Steps, Transport

T = TypeVar("T")

# Raised by a step only after its last operation, or by all ranks together: they still agree on what comes next.
_IN_ORDER = (ArgumentError, MismatchError, TooManyCommunicators)
_LOOK = 0.05  # s; how often a waiting rank looks who has left, and at the time
_UNRECORDED = 0, None
_IDLE_LOOKS = 10  # of the helper thread, after which it sleeps until it is woken

# MPI cannot cancel a collective: what a broken call may still write into must live until the process ends.
_never_freed: list[Any] = []


class CallQueue:
    """The calls of one communicator on one rank.

    started: how many collectives; p2p_counts: returns what a leaving rank says of its sends and receives
    lock: guards the order of calls
    enter_helper: called in the helper thread before it takes steps
    """

    def __init__(self, transport: Transport, ended: Callable[[], None] = lambda: None) -> None:
        self._transport = transport
        self._ended = ended  # called once, when it is closed and all its calls are finished
        self._closed = self._closing = self._given_back = False
        self._error: BaseException | None = None  # once a call has ended half-way
        self._heard: Callable[[], None] = lambda: None  # called before it is raised
        self._broken_off = False
        self.enter_helper: Callable[[], object] = lambda: None
        self.recorder = process_recorder()
        self.started = 0
        self.p2p_counts: Callable[[], dict[str, int]] = dict
        self._unordered_numbers: Counter[str] = Counter()
        self._begin()
        _queues.add(self)

    def _begin(self) -> None:
        """Nothing is under way."""
        self.lock = threading.RLock()  # reentrant: a signal handler may come in the middle
        self._ordered: deque[CollectiveOp[Any]] = deque()  # the first one is being carried out
        self._unordered: list[CollectiveOp[Any]] = []
        # Steps run in here, one thread at a time: infinities and NaN are values in them, and errors on no rank.
        self._context = contextvars.Context()
        self._context.run(np.seterr, all="ignore")
        self._stepping = threading.RLock()  # held by the thread that takes steps,
        self._stepper = 0  # which is this one
        self._waiting: set[int] = set()  # threads; one that Ctrl-C left in here leaves with its next wait
        self._next_look = 0.0
        self._helper: threading.Thread | None = None
        self._wake = threading.Event()
        self._asleep = False

    def _detach_from_parent(self) -> None:
        """In a forked child: what is under way is the parent's, and so are the threads that see it through."""
        no_calls = no_rank(self._transport.rank, self._transport.size)
        for call in (*self._ordered, *self._unordered):
            parent = f"goes on in process {os.getppid()}, of which this one was forked: wait for it there"
            call.abandon(WorldError(f"{call} {parent}"))
        self._begin()
        if self._transport.name != "single":  # else no other rank would take it for the parent
            self._error, self._heard = no_calls, lambda: None
            self._closed = self._closing = self._given_back = True  # all that it holds is the parent's

    # Calls -----------------------------------------------------------------------------------------------------------

    def run(self, call: CollectiveOp[T], ordered: bool = True) -> T:
        """Runs `call` now, and returns its result. ordered: after all collectives that were submitted before it."""
        if self._stepper:
            self._refuse_nested(call)  # before it is counted
        call.waited_for = True
        self._enter(call, ordered)
        try:
            self._take(self._advance_all)
            if not call.done:
                self._see_through(call, None)
        except BaseException as error:
            self._break(call, error)
            raise
        if call.error is not None:
            raise copy_error(call.error)
        return call.result  # type: ignore[return-value]  # a finished call without an error has its result

    def submit(self, call: CollectiveOp[Any], ordered: bool = True, awaited: bool = True) -> None:
        """Starts `call`, which goes on in the threads that wait for a call, or in the helper thread.

        awaited: False if no other rank waits for it, and the helper thread has time until it is asked for: see `help`
        """
        self._enter(call, ordered)
        if not ordered:
            self._take(self._start_unordered)
        elif call.plan.small and not callable(call.scale):  # that function may take its time
            self._take(self._start, call)
        if awaited and not call.done:
            self.help()

    def help(self) -> None:
        """Has the helper thread see to the calls that no thread waits for."""
        if self._helper is None:
            self._start_helper()
        elif self._asleep and not self._waiting:  # else it looks soon: to be woken takes as long as a small call
            self._wake.set()

    def note(self, call: CollectiveOp[Any]) -> None:
        """Enters a call that is on a device already, outside the collectives' order."""
        with self.lock:
            if self._error is not None or self._closed:
                self._refuse(call)
            self._record(call, self.started, STARTED)
        call.finish(None, None)

    def wait(self, call: CollectiveOp[Any], timeout: float | None) -> bool:
        """Takes steps until `call` is finished; False if it is not after `timeout` seconds."""
        if self._stepper:
            self._refuse_nested(call)
        return self._see_through(call, None if timeout is None else TimeLimit(timeout))

    def _see_through(self, call: CollectiveOp[Any], limit: TimeLimit | None) -> bool:
        thread = threading.get_ident()
        call.waited_for = True
        try:
            self._waiting.add(thread)
            self._take(self._advance_all)
            while not call.done:
                if not spin(lambda: call.done or self._take(self._advance_all)):
                    time.sleep(PAUSE)
                    while not (call.done or self._take(self._advance_all, True) or _passed(limit)):
                        time.sleep(PAUSE)
                if _passed(limit):
                    return call.done
        finally:
            self._waiting.discard(thread)
            if self._asleep and self._has_work():
                self._wake.set()
        return True

    def drain(self, limit: TimeLimit) -> bool:
        """Waits until nothing is under way and a closed queue has ended; False if that is not so within the limit."""
        while self._ordered or self._unordered or (self._closed and not self._given_back):
            if limit.passed():
                return False
            self._take(self._advance_all, True)
            time.sleep(PAUSE)
        return True

    def close(self) -> None:
        """Takes no further calls. The helper thread finishes those under way."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._wake.set()
            if self._helper is None and (self._ordered or self._unordered):
                self._start_helper()
        self._end_if_idle()

    def _enter(self, call: CollectiveOp[Any], ordered: bool) -> None:
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
            self._heard()
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
        site = id(code), call.instruction
        signature, _ = plan.recorded.get(site, _UNRECORDED)
        if signature <= recorder.oldest:
            signature = recorder.intern(
                self._transport.label, plan.name, plan.dtype, plan.shape, plan.more, code.co_filename, call.line
            )
            plan.recorded[site] = signature, code
        call.record = recorder.begin(signature, number, state)

    def _refuse_nested(self, call: CollectiveOp[Any]) -> None:
        if self._stepper == threading.get_ident():
            raise CollectivesError(
                f"rank {self._transport.rank}: {call.name} ({call.site}) is waited for in a done callback, a signal "
                "handler or a finalizer of the thread that has to carry it out: give it async_op=True; wait elsewhere"
            )

    # Steps -----------------------------------------------------------------------------------------------------------

    def _take(self, steps: Callable[..., bool], *arguments: Any) -> bool:
        """Calls `steps` as the one thread that takes steps. False if another does, or this one before a signal handler.

        Never waits for the other thread: its done callbacks may want a lock that this thread holds.
        """
        if self._stepper:
            return False
        thread = threading.get_ident()
        try:
            if not self._stepping.acquire(False):
                return False
            self._stepper = thread
            taken = self._context.run(steps, *arguments)
            self._stepper = 0
            self._stepping.release()
        except BaseException:  # Ctrl-C, which may have come with the lock taken
            if self._stepper == thread:
                self._stepper = 0
            try:
                self._stepping.release()
            except RuntimeError:  # `suppress` runs Python code, where Ctrl-C may come again
                pass
            raise
        if self._closed:
            self._end_if_idle()
        return taken

    def _advance_all(self, look: bool = False) -> bool:
        """Takes all steps that can be taken now; True if there was any. look: also ends calls that wait in vain."""
        taken = False
        ordered = self._ordered
        while ordered:
            call = ordered[0]
            taken = self._advance(call) or taken
            if not call.done:
                break
            ordered.popleft()
        if self._unordered:
            for call in tuple(self._unordered):
                taken = self._advance(call) or taken
                if call.done:
                    self._unordered.remove(call)
        if look:
            self._look()
        return taken

    def _start(self, call: CollectiveOp[Any]) -> bool:
        """Takes the first step of a collective if it is the next."""
        if not self._ordered or self._ordered[0] is not call:
            return False
        self._advance(call, first=True)
        if call.done:
            self._ordered.popleft()
        return True

    def _start_unordered(self) -> bool:
        """Starts the sends and receives, in order: messages of one tag arrive as they were sent."""
        for call in [call for call in self._unordered if call.test is None]:
            self._advance(call)
            if call.done:
                self._unordered.remove(call)
        return True

    def _advance(self, call: CollectiveOp[Any], first: bool = False) -> bool:
        """Takes the steps of one call that can be taken now; True if there was any. first: at most one"""
        before = call.test
        try:
            try:
                if call.done:
                    return True
                if before is None:
                    if self._error is not None:
                        call.finish(None, copy_error(self._error))
                        return True
                    if call.state == QUEUED:
                        self.recorder.start(call.record)
                    if call.steps is None and call.plan.inline.is_done_at_once(call):
                        return True
                assert call.steps is not None
                while call.test is None or (not first and call.test()):
                    call.test, call.limit = next(call.steps), None
            except StopIteration as end:
                call.finish(end.value, None)
            except _IN_ORDER as error:
                call.finish(None, error)
            except Exception as error:
                self._break(call, error)
        except BaseException as error:  # Ctrl-C, half-way in a step or at its end: the step must not be taken again
            if not call.done:
                self._break(call, error)
            raise
        return call.done or call.test is not before

    def _look(self) -> None:
        """Now and then looks who has left, what has broken, and at the time."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK
        # By index: to copy a deque fails if another thread appends to it meanwhile. Only this thread removes calls.
        first = [self._ordered[0]] if self._ordered else []
        for call in (*first, *tuple(self._unordered)):
            try:
                if self._broken_off:
                    self._heard()
                    assert self._error is not None
                    raise copy_error(self._error)
                check_wait(call, self._transport)
            except Exception as error:
                self._break(call, error)
                if call in first:
                    self._ordered.popleft()
                else:
                    self._unordered.remove(call)

    def _has_work(self) -> bool:
        """Whether the helper thread has steps to take: not while a thread waits, whose core it would share."""
        return bool(self._ordered or self._unordered) and not self._waiting

    def _help(self) -> None:
        idle = 0
        while not self._closing:
            if not self._has_work():
                idle += 1
                self._end_if_idle()
                self._asleep = bool(self._waiting) or idle > _IDLE_LOOKS
                self._wake.clear()
                if not self._has_work():
                    self._wake.wait(None if self._asleep and not self._closed else LONG_PAUSE)
                continue
            idle, self._asleep = 0, False
            with contextlib.suppress(Exception):  # of a broken device, which the steps will tell
                self.enter_helper()
            if self._take(self._advance_all, True):
                while not self._waiting and spin(lambda: self._take(self._advance_all)):
                    pass
            time.sleep(LONG_PAUSE)

    def _start_helper(self) -> None:
        self._helper = threading.Thread(target=self._help, name=f"collectives-{self._transport.key}", daemon=True)
        self._helper.start()

    # Ends ------------------------------------------------------------------------------------------------------------

    def _end_if_idle(self) -> None:
        """Gives back what a closed queue holds, once all its calls are finished."""
        with self.lock:
            if not self._closed or self._closing or self._ordered or self._unordered:
                return
            self._closing = True
        try:
            self._wake.set()
            if self._error is None:  # a broken one may still be written to
                self._transport.close()
            self._ended()
        finally:
            self._given_back = True

    @property
    def broken(self) -> bool:
        """True once a call ended half-way: no further call on this communicator can be trusted."""
        return self._error is not None

    def break_off(self, error: CollectivesError, heard: Callable[[], None]) -> None:
        """From any thread: what a finished call left running on a device has failed, so no further call can be trusted.

        heard: called when a call is about to raise the error
        """
        with self.lock:
            if self._error is None:
                self._error, self._heard, self._broken_off = error, heard, True

    def _break(self, call: CollectiveOp[Any], error: BaseException) -> None:
        """Ends a call half-way: ranks no longer agree on what comes next."""
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
            _never_freed.append((call.test, call.steps, call.source, call.target, call.early, call.out))
        call.finish(None, error)


def _passed(limit: TimeLimit | None) -> bool:
    return limit is not None and limit.passed()


def run_to_completion(name: str, steps: Steps[T], transport: Transport, timeout: float) -> T:
    """Takes steps that belong to no communicator yet to their end. Raises: CollectiveTimeout, PeerLeft."""
    call: CollectiveOp[T] = CollectiveOp(Plan(name), timeout)
    call.steps = steps
    return CallQueue(transport).run(call)


_queues: weakref.WeakSet[CallQueue] = weakref.WeakSet()


def _after_fork() -> None:
    for queue in _queues:
        queue._detach_from_parent()


os.register_at_fork(after_in_child=_after_fork)
