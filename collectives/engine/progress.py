"""Waiting: how long a rank spins, yields and sleeps until a step is complete, and what ends a wait that would not end.

Nothing here blocks inside a backend: a test is repeated until it is True, the time limit passes, Ctrl-C arrives or a
rank turns out to have left.
"""

from __future__ import annotations

import os
import time
from typing import Any, TypeVar

from collectives import exit_notice
from collectives.engine.call import CallArguments, CollectiveOp
from collectives.engine.verify import spans
from collectives.errors import CollectiveTimeout, PeerLeft
from collectives.flight.report import describe_process
from collectives.time_limit import TimeLimit
from collectives.transport import Steps, Test, Transport

T = TypeVar("T")

_SPIN = 5e-6  # s; a peer that is about to arrive is worth a short spin,
_YIELD = 300e-6  # s; a later one gets this core whenever it can use it: ranks may share one,
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
_POLL_INTERVAL = 0.05  # s; how often a waiting rank looks who has left
_SHOWN = 8  # late ranks of which a timeout says what they do
_ORDER = "Every rank must make the same calls in the same order"

_crowded_until = 0.0


def run_to_completion(name: str, steps: Steps[T], transport: Transport, timeout: float) -> T:
    """Takes steps that belong to no communicator yet to their end. Raises: CollectiveTimeout, PeerLeft."""
    call: CollectiveOp[T] = CollectiveOp(name, CallArguments(None, ""), timeout)
    call.steps, call.number = steps, 0
    return run_steps(call, transport)


def run_steps(call: CollectiveOp[T], transport: Transport) -> T:
    """Takes a call's steps to their end in this thread, and returns its result."""
    try:
        while True:
            call.test = test = next(call.steps)
            if not test():
                _wait(test, call, transport)
    except StopIteration as end:
        return end.value


def spin(test: Test) -> bool:
    """Repeats a test for a fraction of a millisecond; False if it is not True by then."""
    global _crowded_until
    start = now = time.monotonic()
    while now - start < _YIELD:
        if now - start < _SPIN:
            pass
        elif now < _crowded_until:
            time.sleep(_NAP)
        else:
            os.sched_yield()
            if time.monotonic() - now > _TAKEN:
                _crowded_until = now + _CROWDED
        if test():
            return True
        now = time.monotonic()
    return False


def _wait(test: Test, call: CollectiveOp[Any], transport: Transport) -> None:
    if spin(test):
        return
    watch = WaitMonitor(test, call, transport)
    while not test():
        time.sleep(PAUSE if call.pause is None else call.pause())
        watch.poll()


class WaitMonitor:
    """Ends one wait, by an error, when its time is over or the rank it waits for has left."""

    __slots__ = ("_call", "_limit", "_look", "_test", "_transport")

    def __init__(self, test: Test, call: CollectiveOp[Any], transport: Transport) -> None:
        self._test = test
        self._call = call
        self._transport = transport
        self._limit = TimeLimit(call.timeout)
        self._look = time.monotonic() + _POLL_INTERVAL

    def poll(self) -> None:
        """Now and then looks who has left, what has broken, and at the time.

        Raises: PeerLeft, CollectiveTimeout; what `break_off` was given.
        """
        now = time.monotonic()
        if now < self._look:
            return
        self._look = now + _POLL_INTERVAL
        call, transport = self._call, self._transport
        if call.look is not None:
            call.look(call)
        exit_notices = transport.exit_notices()
        if exit_notices:
            if call.gone is not None:
                gone = call.gone(exit_notices)
            else:
                gone = exit_notice.left_before(exit_notices, transport.key, call.number)
            if gone and not self._test():
                raise PeerLeft(
                    f"{exit_notice.describe(exit_notices, gone)} while rank {transport.rank} waits in {call}"
                )
        if self._limit.passed():
            late = describe_late(call, transport)
            raise CollectiveTimeout(f"rank {transport.rank}: {call} was not complete after {call.timeout:g} s. {late}")


def describe_late(call: CollectiveOp[Any], transport: Transport) -> str:
    """Says who has not come to a call whose time is over, as far as this rank knows, and what they do on this node."""
    late = list(transport.late() if call.peers is None else call.peers)
    if not late:
        return f"{_ORDER}; one has not arrived, or hangs elsewhere"
    missed = "arrived" if call.peers is None else "made the call that it answers"
    head = f"{'Rank' if len(late) == 1 else 'Ranks'} {spans(late)} {'has' if len(late) == 1 else 'have'} not {missed}"
    processes = {rank: pid for rank in late[:_SHOWN] if (pid := transport.pid(rank)) is not None}
    if not processes:
        return f"{head}. {_ORDER}"
    lines = [f"\n  rank {rank} (pid {pid}): {describe_process(pid)}" for rank, pid in processes.items()]
    return f"{head}:{''.join(lines)}\n  {_ORDER}."
