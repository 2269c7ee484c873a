"""Progress: who drives a communicator's collectives to their end, and in which order.

A synchronous call runs in the caller when nothing of its communicator is queued or in flight; everything else goes
through one helper thread a communicator, one call after the other.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from collectives.engine.call import CallArguments, CallSite, CollectiveOp, copy_error
from collectives.engine.progress import LONG_PAUSE, PAUSE, run_steps
from collectives.errors import (
    ArgumentError,
    CollectiveInterrupted,
    CollectivesError,
    CommunicatorClosed,
    MismatchError,
    TooManyCommunicators,
    no_rank,
)
from collectives.flight.recorder import FAILED, QUEUED, STARTED, process_recorder
from collectives.nccl_config import NcclConfig
from collectives.time_limit import TimeLimit
from collectives.transport import Transport

T = TypeVar("T")

# Raised by a step only after its last operation, or by all ranks together: they still agree on what comes next.
_IN_ORDER = (ArgumentError, MismatchError, TooManyCommunicators)

# MPI cannot cancel a collective: what a broken call may still write into must live until the process ends.
_never_freed: list[Any] = []


class Begun(NamedTuple):
    """A cached call that a thread has begun, and that its next `run` goes on with."""

    thread: int
    record: int
    number: int


class CallQueue:
    """The calls of one communicator on one rank, in their one order.

    started: how many collectives; p2p_counts: returns what a leaving rank says of its sends and receives, which are not
    part of the collectives' order because two ranks alone make them
    """

    def __init__(self, transport: Transport, ended: Callable[[], None] = lambda: None) -> None:
        self._transport = transport
        self._ended = ended  # called once, when it is closed and all its calls are finished
        self._closed = False
        self._given_back = False
        self._error: BaseException | None = None
        self._heard: Callable[[], None] = lambda: None  # called before it is raised
        self._broken_off = False
        self.recorder = process_recorder()
        self.communicator = self.recorder.communicator(transport.key)
        self.started = 0
        self.p2p_counts: Callable[[], dict[str, int]] = dict
        self.forked: Callable[[], None] = lambda: None  # called in a forked child
        self._unordered_numbers: Counter[str] = Counter()
        self._begin()
        _queues.add(self)

    def _begin(self) -> None:
        """Nothing is queued or under way."""
        self.lock = threading.RLock()  # a signal handler may close the communicator in the middle of a call
        self.inside = False  # a prepared call is under way, in the thread that holds the lock
        self._postponed = False  # close was called in the middle of one
        self._changed = threading.Condition(self.lock)
        self._queue: deque[CollectiveOp[Any]] = deque()
        self._busy = False  # a call is being driven, by whichever thread
        self._helper: threading.Thread | None = None
        self._unordered = 0
        self._waiting = 0  # threads, for calls that the helper thread drives
        self._draining = 0  # how many wait until nothing is under way
        self.begun: Begun | None = None

    def _detach_from_parent(self) -> None:
        """In a forked child: what is under way is the parent's, and so are the threads that see it through."""
        self._begin()
        self.forked()
        if self._transport.name != "single":  # else there is nobody who would take it for the parent
            self._error, self._heard = no_rank(self._transport.rank, self._transport.size), lambda: None
            self._closed = self._given_back = True  # all that it holds is the parent's

    def run(self, call: CollectiveOp[T]) -> T:
        """Runs `call` after all that were submitted before it, and returns its result."""
        inline = False
        try:
            with self._changed:
                inline = self._goes_on_with(call)
                if not inline:
                    self._not_in_helper(call)  # before it is counted
                    self._enter(call)
                    inline = not self._busy and not self._queue
                    self._enlist(call, STARTED if inline else QUEUED)
                if inline:
                    self._busy = True
                else:
                    self._enqueue(call)
            if inline:
                return self.drive(call)
        finally:  # reached wherever Ctrl-C strikes
            if inline:
                with self._changed:
                    self._busy = False
                    # An idle helper thread is left alone: woken after every call, it would slow the next one down.
                    if self._queue or self._closed or self._draining:
                        self._changed.notify_all()
        # Its own time limit ends it, so waiting for it ends too.
        call.join(None)
        return call.outcome()

    def submit(self, call: CollectiveOp[Any]) -> None:
        """Has the helper thread run `call` after all that were submitted before it."""
        call.drive, call.pause = partial(self._join, call), self._pause
        with self._changed:
            self._enter(call)
            self._enlist(call, QUEUED)
            self._enqueue(call)

    def _join(self, call: CollectiveOp[Any], timeout: float | None) -> bool:
        self._not_in_helper(call)
        with self.lock:
            self._waiting += 1
        try:
            return call.block(timeout)
        finally:
            with self.lock:
                self._waiting -= 1

    def _pause(self) -> float:
        return PAUSE if self._waiting else LONG_PAUSE

    def _not_in_helper(self, call: CollectiveOp[Any]) -> None:
        if threading.current_thread() is self._helper:
            raise CollectivesError(
                f"rank {self._transport.rank}: {call.name} ({call.site}) is waited for in a done callback, which runs "
                "in the thread that has to carry it out: give it async_op=True, and wait for it elsewhere"
            )

    def close(self) -> None:
        """Takes no further calls. Those under way are finished by the helper thread, which then ends."""
        with self._changed:
            if self._closed:
                return
            if self.inside:
                self._postponed = True
                return
            self._closed = True
            self._changed.notify_all()
            helped = self._helper is not None or self._busy or self._unordered > 0
            if helped and self._helper is None:
                self._start_helper()  # another thread's call is in flight: somebody must end after it
        if not helped:
            self._end()

    def _finished(self) -> bool:
        """True if nothing is queued or in flight, and if a closed communicator has given back what it holds."""
        return not (self._busy or self._queue or self._unordered or (self._closed and not self._given_back))

    def drain(self, limit: TimeLimit) -> bool:
        """Waits until nothing is queued or in flight; False if that is not so within the limit."""
        with self._changed:
            self._draining += 1
            try:
                while not self._changed.wait_for(self._finished, limit.remaining()):
                    if limit.passed():
                        return False
                return True
            finally:
                self._draining -= 1

    def enter_unordered(self, call: CollectiveOp[Any]) -> None:
        """Counts a send, a receive or another call of a few ranks, which is no part of the collectives' order.

        `leave_unordered` ends it.
        """
        with self.lock:
            self._admit(call)
            call.number = self._unordered_numbers[call.name]
            call.look = self._look
            self._enlist(call, STARTED)
            self._unordered_numbers[call.name] += 1
            self._unordered += 1

    def note(self, call: CollectiveOp[Any]) -> None:
        """Enters a call that is on a device already, outside the collectives' order."""
        with self._changed:
            self._admit(call)
            call.number = self.started
            self._enlist(call, STARTED)
        call.finish(None, None)

    def leave_unordered(self) -> None:
        """A call outside the collectives' order is finished."""
        with self.lock:
            self._unordered -= 1
            if self._closed or self._draining:
                self._changed.notify_all()

    def drive(self, call: CollectiveOp[T]) -> T:
        """Runs an entered call to its end in this thread, and returns its result."""
        call.look = self._look
        self.recorder.start(call.record)
        try:
            if self._error is not None:
                raise copy_error(self._error)
            # Infinities and NaN are values here: a rank on which they are errors would leave the others waiting.
            with np.errstate(all="ignore"):
                result = run_steps(call, self._transport)
        # Where in our own code an error was noticed tells the user nothing.
        except _IN_ORDER as error:
            call.finish(None, error)
            raise error.with_traceback(None) from error.__cause__
        except CollectivesError as error:
            raise self._break(call, error).with_traceback(None) from None
        except Exception as error:
            raise self._break(call, error) from error
        except BaseException as error:
            self._break(call, error)
            raise
        call.finish(result, None)
        return result

    def fail(self, call: CollectiveOp[Any], error: BaseException) -> None:
        """Publishes that `error` ended an entered call; unless ranks still agree, it breaks the communicator."""
        if isinstance(error, _IN_ORDER):
            call.finish(None, error)
        else:
            self._break(call, error)

    def occupied(self) -> bool:
        """True if a call could not be run now, in the calling thread. Asked with the lock held."""
        ends = self._closed or self._postponed or self._error is not None
        return ends or self.inside or self._busy or bool(self._queue)

    def hand_over(self, index: int) -> None:
        """The call that this thread runs next has been begun already: its signature is published, under this record.

        Called with the lock held, by a thread that found the queue unoccupied and calls `withdraw` in the end.
        """
        self._busy = True
        self.begun = Begun(threading.get_ident(), index, self.started)
        self.started += 1

    def withdraw(self) -> None:
        """If this thread has not run what it handed over, because Ctrl-C came in between, that breaks us."""
        with self._changed:
            if self.begun is not None and self.begun.thread == threading.get_ident():
                self.interrupt(f"call #{self.begun.number}", self.begun.record, KeyboardInterrupt())
                self._changed.notify_all()

    def interrupt(self, what: str, index: int, error: BaseException) -> None:
        """A call that this thread ran by itself ended half-way, so ranks no longer agree. Called with the lock held."""
        self.recorder.end(index, FAILED)
        self._error = _interrupted(self._transport.rank, what, error)
        self._busy, self.begun = False, None

    def break_off(self, error: CollectivesError, heard: Callable[[], None]) -> None:
        """From any thread: what a finished call left running on a device has failed, so no further call can be trusted.

        heard: called when a call is about to raise the error
        """
        with self._changed:
            if self._error is None:
                self._error, self._heard, self._broken_off = error, heard, True

    def _look(self, call: CollectiveOp[Any]) -> None:
        """Raises: what broke the communicator from elsewhere, while `call` waits."""
        if self._broken_off:
            _never_freed.append(call)
            self._heard()
            assert self._error is not None
            raise copy_error(self._error)

    @property
    def broken(self) -> bool:
        """True once a call ended half-way: no further call on this communicator can be trusted."""
        return self._error is not None

    def _enter(self, call: CollectiveOp[Any]) -> None:
        self._admit(call)
        call.number = self.started
        self.started += 1

    def _goes_on_with(self, call: CollectiveOp[Any]) -> bool:
        """True if this thread has begun that call."""
        begun = self.begun
        if begun is None or begun.thread != threading.get_ident():
            return False
        self.begun = None
        call.record, call.recorder, call.number = begun.record, self.recorder, begun.number
        return True

    def _enlist(self, call: CollectiveOp[Any], state: int) -> None:
        signature = self.intern(call.name, call.what, call.site)
        call.record = self.recorder.begin(self.communicator, call.number, signature, state)
        call.recorder = self.recorder

    def intern(self, name: str, what: CallArguments, site: CallSite) -> int:
        """The flight record's number for such a call."""
        return self.recorder.intern(name, what.dtype, what.shape, what.more, site.file, site.line)

    def _admit(self, call: CollectiveOp[Any]) -> None:
        if self._error is not None:
            self._heard()
            raise copy_error(self._error)
        if self.inside:
            raise CollectivesError(
                f"rank {self._transport.rank}: {call.name} ({call.site}) was called in the middle of another call of "
                "this communicator, by a signal handler or a finalizer"
            )
        if self._closed or self._postponed:
            raise CommunicatorClosed(f"rank {self._transport.rank}: {call.name} ({call.site}) on a closed communicator")

    def _enqueue(self, call: CollectiveOp[Any]) -> None:
        self._queue.append(call)
        if self._helper is None:
            self._start_helper()
        self._changed.notify_all()

    def _start_helper(self) -> None:
        self._helper = threading.Thread(target=self._help, name=f"collectives-{self._transport.key}", daemon=True)
        self._helper.start()

    def _end(self) -> None:
        try:
            if self._error is None:  # a broken one may still be written to
                self._transport.close()
            self._ended()
        finally:
            with self._changed:
                self._given_back = True
                self._changed.notify_all()

    def _help(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._busy and (self._queue or (self._closed and not self._unordered))
                )
                if not self._queue:
                    break
                call = self._queue.popleft()
                self._busy = True
            try:
                self.drive(call)
            except BaseException:  # published in the call, raised where it is waited for
                pass
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
            del call  # its arrays belong to whoever waits, not to an idle thread
        self._end()

    def _break(self, call: CollectiveOp[Any], error: BaseException) -> BaseException:
        if self._error is None:
            if isinstance(error, Exception):
                if not isinstance(error, CollectivesError):
                    reason = f"{type(error).__name__}: {error}"
                    error = CollectivesError(f"rank {self._transport.rank}: {call} failed: {reason}")
                self._error = error
            else:
                self._error = _interrupted(self._transport.rank, str(call), error)
            _never_freed.append(call)
        call.finish(None, error)
        return error


_queues: weakref.WeakSet[CallQueue] = weakref.WeakSet()


def _after_fork() -> None:
    for queue in _queues:
        queue._detach_from_parent()


os.register_at_fork(after_in_child=_after_fork)


def _interrupted(rank: int, what: str, error: BaseException) -> CollectiveInterrupted:
    return CollectiveInterrupted(
        f"rank {rank}: {what} was interrupted ({type(error).__name__}); this communicator cannot go on"
    )


class CommunicatorRegistry:
    """The calls of all communicators of one world on one rank. A closed one is remembered by its number of calls.

    wanted: the backend for arrays on GPUs that was asked for by name, if any; nccl: how its communicators are made
    """

    def __init__(self, wanted: str | None = None, nccl: NcclConfig | None = None) -> None:
        self.wanted = wanted
        self.nccl = nccl
        self._open: dict[str, CallQueue] = {}
        self._closed: dict[str, int] = {}  # calls, by communicator and by line
        self._closed_with: dict[str, list[CallQueue]] = {}  # what was made of a communicator for its own use

    def join(self, key: str, queue: CallQueue) -> None:
        """A communicator has been made."""
        self._open[key] = queue

    def leave(self, key: str) -> None:
        """A communicator has been closed, and its calls are finished."""
        # Entered first: a rank that leaves at this moment must find it in one of the two.
        self._closed.update(_calls_of(key, self._open[key]))
        del self._open[key]
        self._close_followers(key)

    def close_with(self, key: str, queue: CallQueue) -> None:
        """Closes `queue` when the communicator of `key` is closed, or now if it is."""
        self._closed_with.setdefault(key, []).append(queue)
        if key not in self._open:
            self._close_followers(key)

    def calls(self) -> Mapping[str, int]:
        """How many calls each communicator made, and how many sends and receives on each line; closed ones too."""
        calls: dict[str, int] = {}
        for key, queue in self._open.copy().items():
            calls.update(_calls_of(key, queue))
        return {**calls, **self._closed.copy()}

    def drain(self, limit: TimeLimit) -> None:
        """Waits until no call is queued or in flight, or the limit is over."""
        for queue in self._open.copy().values():
            queue.drain(limit)

    def broken(self) -> bool:
        """True if a call ended half-way on any of them."""
        return any(queue.broken for queue in self._open.copy().values())

    def close(self) -> None:
        """Closes all of them."""
        for queue in self._open.copy().values():
            queue.close()

    def _close_followers(self, key: str) -> None:
        for queue in self._closed_with.pop(key, []):
            queue.close()


def _calls_of(key: str, queue: CallQueue) -> dict[str, int]:
    return {key: queue.started, **queue.p2p_counts()}
