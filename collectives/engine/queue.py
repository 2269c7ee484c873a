"""The calls of a communicator under way: collectives in their one order, sends and receives each on its own.

Steps are taken by whichever thread waits for a call of the communicator, for all of its calls, as in MPI. So a call
that a thread waits for never changes threads. A helper thread takes the steps while no thread waits.

Nothing here blocks inside a backend: a test is repeated until it is True, the time limit passes, Ctrl-C arrives or a
rank turns out to have left.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from collectives.backends.nccl.library import NcclConfig
from collectives.engine.call import CollectiveOp, copy_error
from collectives.errors import (
    ArgumentError,
    CollectiveInterrupted,
    CollectivesError,
    CollectiveTimeout,
    CommunicatorClosed,
    MismatchError,
    PeerLeft,
    TooManyCommunicators,
    WorldError,
    no_rank,
)
from collectives.flight.reader import describe_process, on_communicator
from collectives.flight.recorder import FAILED, QUEUED, process_recorder
from collectives.time_limit import TimeLimit
from collectives.transport import Steps, Test, Transport, describe_exits, left_before, spans

_SPIN = 20e-6  # s; a peer that is about to arrive is worth a short spin,
_YIELD = 300e-6  # s; a later one gets this core whenever it can use it: ranks may share one,
# s; which a yield tells that took longer. For a while waiting ranks spin no more than this.
_SHARED = 5e-6
# s; and a yield that takes longer gave the core to a process that computes, and did so for a whole time slice. A
# process that sleeps gets its core back at once, so that for a while waiting ranks sleep instead
# (benchmarks/collectives.py --busy 1).
_TAKEN = 200e-6
_CROWDED = 5e-3
_NAP = 1e-6  # s; the system makes about 55 us of it
# s; and one that is still later may be computing on it. Longer sleeps save a little of the core, and where that is busy
# they cost much of the wire's bandwidth (benchmarks/overlap.py).
PAUSE = 100e-6
# s; the same for a call that no thread waits for yet, as the program computes: each test costs the core some 10 us, and
# at the end of the wait some bandwidth is lost that computing hides. Shorter than _YIELD, so that ranks of a node that
# test in turns meet.
LONG_PAUSE = 250e-6
_SHOWN = 8  # late ranks of which a timeout says what they do
_ORDER = "Every rank must make the same calls in the same order"

_shared_until = _crowded_until = 0.0


def spin(test: Test) -> bool:
    """Repeats a test for a fraction of a millisecond; False if it is not True by then."""
    global _shared_until, _crowded_until
    start = now = time.monotonic()
    while now - start < _YIELD:
        if now - start < (_SPIN if now >= _shared_until else _SHARED):
            pass
        elif now < _crowded_until:
            time.sleep(_NAP)
        else:
            os.sched_yield()
            taken = time.monotonic() - now
            if taken > _SHARED:
                _shared_until = now + _CROWDED
            if taken > _TAKEN:
                _crowded_until = now + _CROWDED
        if test():
            return True
        now = time.monotonic()
    return False


def check_wait(call: CollectiveOp[Any], transport: Transport) -> None:
    """Looks at a call whose test has not been True for a while.

    Raises: PeerLeft if a rank that it waits for has left; CollectiveTimeout if the time limit of this step has passed.
    """
    what = f"{call}{on_communicator(transport.label)}"
    exit_notices = transport.exit_notices()
    if exit_notices:
        if call.gone is not None:
            gone = call.gone(exit_notices)
        else:
            gone = left_before(exit_notices, transport.key, call.number)
        # Tested again: what it sent before it left may have arrived just before the notice.
        if gone and not (call.test is not None and call.test()):
            raise PeerLeft(f"{describe_exits(exit_notices, gone)} while rank {transport.rank} waits in {what}")
    if call.limit is None:
        call.limit = TimeLimit(call.timeout)
    elif call.limit.passed():
        late = describe_late(call, transport)
        raise CollectiveTimeout(f"rank {transport.rank}: {what} was not complete after {call.timeout:g} s. {late}")


def describe_late(call: CollectiveOp[Any], transport: Transport) -> str:
    """Names the ranks that are late for a call, as far as this rank knows, and the last call of those on its node."""
    late = list(transport.late() if call.peers is None else call.peers)
    if not late:
        return f"{_ORDER}; one has not arrived, or hangs elsewhere"
    missed = "arrived" if call.peers is None else "made the call that it answers"
    head = f"{'Rank' if len(late) == 1 else 'Ranks'} {spans(late)} {'has' if len(late) == 1 else 'have'} not {missed}"
    processes = {rank: pid for rank in late[:_SHOWN] if (pid := transport.pid(rank)) is not None}
    lines = [f"\n  rank {rank} (pid {pid}): {describe_process(pid)}" for rank, pid in processes.items()]
    return f"{head}:{''.join(lines)}\n  {_ORDER}." if lines else f"{head}. {_ORDER}"


T = TypeVar("T")

# Raised by a step only after its last operation, or by all ranks together: they still agree on what comes next.
_IN_ORDER = (ArgumentError, MismatchError, TooManyCommunicators)
_LOOK = 0.05  # s; how often a waiting rank looks who has left, and at the time
_IDLE_LOOKS = 10  # of the helper thread, after which it sleeps until it is woken

# MPI cannot cancel a collective: what a broken call may still write into must live until the process ends.
_never_freed: list[Any] = []


class CallQueue:
    """The calls of one communicator on one rank.

    started: how many collectives; p2p_counts: returns what a leaving rank says of its sends and receives
    lock: guards the order of calls; inside: the thread that holds it is in the middle of a cached call
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
        self.inside = False
        self._ordered: deque[CollectiveOp[Any]] = deque()  # the first one is being carried out
        self._unordered: list[CollectiveOp[Any]] = []
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
        self._refuse_nested(call)  # before it is counted
        self._enter(call, ordered)
        return self.complete(call)

    def submit(self, call: CollectiveOp[Any], ordered: bool = True) -> None:
        """Starts `call`, which goes on in the threads that wait for a call, or in the helper thread."""
        self._enter(call, ordered)
        if not ordered or (call.small and self._ordered and self._ordered[0] is call):
            self._start(call if ordered else None)
        if not call.done:
            if self._helper is None:
                self._start_helper()
            elif self._asleep and not self._waiting:  # else it looks soon: to be woken takes as long as a small call
                self._wake.set()

    def resume(self, call: CollectiveOp[Any], record: int) -> None:
        """Enters a collective that this thread has begun with the lock held; it calls `complete` without the lock."""
        call.queue, call.number, call.record, call.recorder = self, self.started, record, self.recorder
        self.started += 1
        self._ordered.append(call)

    def complete(self, call: CollectiveOp[T]) -> T:
        """Sees an entered call through in this thread, and returns its result."""
        try:
            self.wait(call, None)
        except BaseException as error:
            self._break(call, error)
            raise
        return call.outcome()

    def note(self, call: CollectiveOp[Any]) -> None:
        """Enters a call that is on a device already, outside the collectives' order."""
        with self.lock:
            self._admit(call)
            self._record(call, self.started)
        call.finish(None, None)

    def wait(self, call: CollectiveOp[Any], timeout: float | None) -> bool:
        """Takes steps until `call` is finished; False if it is not after `timeout` seconds."""
        self._refuse_nested(call)
        limit = None if timeout is None else TimeLimit(timeout)
        thread = threading.get_ident()
        try:
            self._waiting.add(thread)
            with np.errstate(all="ignore"):  # infinities and NaN are values here, and errors on no rank
                self._take_steps()
                while not call.done:
                    if not spin(lambda: call.done or self._take_steps()):
                        time.sleep(PAUSE)
                        while not (call.done or self._take_steps(look=True) or (limit is not None and limit.passed())):
                            time.sleep(PAUSE)
                    if limit is not None and limit.passed():
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
            with np.errstate(all="ignore"):
                self._take_steps(look=True)
            time.sleep(PAUSE)
        return True

    def close(self) -> None:
        """Takes no further calls. The helper thread finishes those under way."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._wake.set()
            if self._helper is None and (self._ordered or self._unordered or self.inside):
                self._start_helper()
        self._end_if_idle()

    def occupied(self) -> bool:
        """True if a collective could not be run now, in the calling thread. Asked with the lock held."""
        return self.inside or self._closed or self._error is not None or bool(self._ordered) or self._stepper != 0

    def _enter(self, call: CollectiveOp[Any], ordered: bool) -> None:
        with self.lock:
            self._admit(call)
            if ordered:
                self._record(call, self.started)
                self.started += 1
                self._ordered.append(call)
            else:
                self._record(call, self._unordered_numbers[call.name])
                self._unordered_numbers[call.name] += 1
                self._unordered.append(call)

    def _admit(self, call: CollectiveOp[Any]) -> None:
        if self._error is not None:
            self._heard()
            raise copy_error(self._error)
        if self.inside:
            raise CollectivesError(
                f"rank {self._transport.rank}: {call.name} ({call.site}) was called in the middle of another call of "
                "this communicator, by a signal handler or a finalizer"
            )
        if self._closed:
            raise CommunicatorClosed(f"rank {self._transport.rank}: {call.name} ({call.site}) on a closed communicator")

    def _record(self, call: CollectiveOp[Any], number: int) -> None:
        call.queue, call.number, call.recorder = self, number, self.recorder
        signature = self.recorder.intern(self._transport.label, *call.signature)
        call.record = self.recorder.begin(signature, number, QUEUED)

    def _refuse_nested(self, call: CollectiveOp[Any]) -> None:
        if self._stepper and self._stepper == threading.get_ident():
            raise CollectivesError(
                f"rank {self._transport.rank}: {call.name} ({call.site}) is waited for in a done callback, or a signal "
                "handler, of the thread that has to carry it out: give it async_op=True, and wait for it elsewhere"
            )

    # Steps -----------------------------------------------------------------------------------------------------------

    def _take_steps(self, look: bool = False) -> bool:
        """Takes all steps that can be taken now; True if there was any. look: also ends calls that wait in vain."""
        if not self._begin_steps():
            return False
        taken = False
        ordered = self._ordered
        try:
            while ordered:
                call = ordered[0]
                taken = self._advance(call) or taken
                if not call.done:
                    break
            for call in tuple(self._unordered):
                taken = self._advance(call) or taken
            if look:
                self._look()
        finally:
            self._stepper = 0
            self._stepping.release()
        if self._closed:
            self._end_if_idle()
        return taken

    def _start(self, call: CollectiveOp[Any] | None) -> None:
        """Takes the first step of that collective; None: starts the sends and receives.

        If another thread is taking steps, that one or the helper thread starts them.
        """
        if not self._begin_steps():
            return
        try:
            with np.errstate(all="ignore"):
                # In order: messages of one tag arrive as they were sent.
                for each in [each for each in self._unordered if each.test is None] if call is None else [call]:
                    self._advance(each, first=call is not None)
        finally:
            self._stepper = 0
            self._stepping.release()

    def _begin_steps(self) -> bool:
        """Makes this thread the one that takes steps. False if another does, or this one did before a signal handler.

        Never waits for the other thread: its done callbacks may want a lock that this thread holds.
        """
        if self._stepper:
            return False
        try:
            if not self._stepping.acquire(blocking=False):
                return False
            self._stepper = threading.get_ident()
        except BaseException:  # Ctrl-C, which may have come with the lock taken
            with contextlib.suppress(RuntimeError):
                self._stepping.release()
            raise
        return True

    def _advance(self, call: CollectiveOp[Any], first: bool = False) -> bool:
        """Takes the steps of one call that can be taken now; True if there was any. first: at most one"""
        before = call.test
        try:
            if call.done:
                return True
            if before is None:
                if self._error is not None:
                    call.finish(None, copy_error(self._error))
                    return True
                self.recorder.start(call.record)
            while call.test is None or (not first and call.test()):
                call.test, call.limit = next(call.steps), None
        except StopIteration as end:
            call.finish(end.value, None)
        except _IN_ORDER as error:
            call.finish(None, error)
        except Exception as error:
            self._break(call, error)
        except BaseException as error:  # Ctrl-C, half-way in a step
            self._break(call, error)
            raise
        finally:
            if call.done:
                self._forget(call)
        return call.done or call.test is not before

    def _forget(self, call: CollectiveOp[Any]) -> None:
        if self._ordered and self._ordered[0] is call:
            self._ordered.popleft()
        elif call in self._unordered:
            self._unordered.remove(call)

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
                self._forget(call)

    def _has_work(self) -> bool:
        """Whether the helper thread has steps to take: not while a thread waits, whose core it would share."""
        return bool(self._ordered or self._unordered) and not self._waiting

    def _help(self) -> None:
        idle = 0
        with np.errstate(all="ignore"):
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
                if self._take_steps(look=True):
                    while not self._waiting and spin(self._take_steps):
                        pass
                time.sleep(LONG_PAUSE)

    def _start_helper(self) -> None:
        self._helper = threading.Thread(target=self._help, name=f"collectives-{self._transport.key}", daemon=True)
        self._helper.start()

    # Ends ------------------------------------------------------------------------------------------------------------

    def _end_if_idle(self) -> None:
        """Gives back what a closed queue holds, once all its calls are finished."""
        with self.lock:
            if not self._closed or self._closing or self._ordered or self._unordered or self.inside:
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

    def interrupt(self, what: str, record: int, error: BaseException) -> None:
        """A cached call ended half-way in this thread, so ranks no longer agree. Called with the lock held."""
        self.recorder.end(record, FAILED)
        self._error = self._interrupted(what, error)

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
            error = self._interrupted(str(call), error)
        elif not isinstance(error, CollectivesError):
            cause = error
            error = CollectivesError(f"rank {self._transport.rank}: {call} failed: {type(error).__name__}: {error}")
            error.__cause__ = cause
        if self._error is None:
            self._error = error
        if not call.done:
            _never_freed.append(call)
        call.finish(None, error)

    def _interrupted(self, what: str, error: BaseException) -> CollectiveInterrupted:
        return CollectiveInterrupted(
            f"rank {self._transport.rank}: {what} was interrupted ({type(error).__name__}); this communicator cannot "
            "go on"
        )


def run_to_completion(name: str, steps: Steps[T], transport: Transport, timeout: float) -> T:
    """Takes steps that belong to no communicator yet to their end. Raises: CollectiveTimeout, PeerLeft."""
    call: CollectiveOp[T] = CollectiveOp(name, None, "", timeout)
    call.steps = steps
    return CallQueue(transport).run(call)


_queues: weakref.WeakSet[CallQueue] = weakref.WeakSet()


def _after_fork() -> None:
    for queue in _queues:
        queue._detach_from_parent()


os.register_at_fork(after_in_child=_after_fork)


class CommunicatorRegistry:
    """The calls of all communicators of one world on one rank. A closed one is remembered by its number of calls.

    wanted: the backend for arrays on GPUs that was asked for by name, if any; nccl: how its communicators are made
    """

    def __init__(self, wanted: str | None = None, nccl: NcclConfig | None = None) -> None:
        self.wanted = wanted
        self.nccl = nccl
        self._open: dict[str, CallQueue] = {}
        self._closed: dict[str, int] = {}  # calls, by communicator, and of sends and receives by pair of ranks
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
        """How many calls each communicator made, and how many sends and receives by pair; closed ones too."""
        calls: dict[str, int] = {}
        for key, queue in self._open.copy().items():
            calls.update(_calls_of(key, queue))
        return {**calls, **self._closed.copy()}

    def drain(self, limit: TimeLimit) -> None:
        """Waits until no call is under way, or the limit is over."""
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
