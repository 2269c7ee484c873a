"""Time limits that are paused while any rank is in a debugger, or while the whole job is suspended.

Below, both are called a suspension. The agent of a rank shares a page of memory with the rank. In it the agent records
suspensions, and whether another rank has failed or the job is to be resized. A wait looks for suspensions only when it
is about to time out, so the check costs nothing before that. Without an agent no time limit is paused.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from collectives import world

T = TypeVar("T")

# Indices of 64-bit words: whether the job is suspended now, and the length of all earlier suspensions (ns).
_NOW = 0
_BEFORE = world.PAUSED_AT // 8
# Index of the word that says whether the launcher ends this rank because another one has failed.
_PEER_FAILED = world.PEER_FAILED_AT // 8
# Index of the word that says whether the job is to go on with another number of ranks.
_RESIZE = world.RESIZE_AT // 8
# Interval at which a wait whose time is up checks whether the job is still suspended (s).
_POLL = 0.05


def _page() -> memoryview:
    fd = os.environ.get(world.PAUSE_FD)
    # A child of a rank has inherited the variable, but usually not the descriptor.
    if fd is None or not world.supervised():
        return memoryview(bytes(world.RESIZE_AT + 8)).cast("q")
    return memoryview(mmap.mmap(int(fd), mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)).cast("q")


_words = _page()


def suspended_seconds() -> float:
    """Seconds for which the job was suspended; a suspension that has not ended is not counted."""
    return _words[_BEFORE] * 1e-9


def peer_failed() -> bool:
    """True once the launcher ends this rank because another rank has failed. Waiting for that rank is then useless."""
    return bool(_words[_PEER_FAILED] & 0xFF)


def resize_requested() -> bool:
    """True once the job is to be resized; the ranks then leave their loop together, after the same step."""
    return bool(_words[_RESIZE] & 0xFF)


class Deadline:
    """A time limit that ends `seconds` from now, not counting suspensions."""

    __slots__ = ("_before", "_deadline", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._before = suspended_seconds()

    def remaining(self) -> float:
        """Seconds left; 0 once the time is up. Never 0 while the job is suspended.

        A caller that has waited this long calls this again, since a suspension may have extended the limit.
        """
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            if _words[_NOW] & 0xFF:
                return _POLL
            # The agent adds a suspension to the total before it clears the word _NOW.
            seconds += suspended_seconds() - self._before
        return max(0.0, seconds)

    def passed(self) -> bool:
        """True once the time is up."""
        return self.remaining() <= 0.0


# Python cannot interrupt C code. So a call that may block forever runs in a daemon thread, which can be abandoned.


class StillRunning(Exception):
    """The call has not returned in time: its thread continues, and its result is lost.

    Also raised if the process is exiting, so that no thread could be started for the call.
    """


def run_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Runs `call` in a daemon thread called `name`. Returns: a future with the result or exception of `call`."""
    outcome: Future[T] = Future()
    try:
        threading.Thread(target=carry_out, args=(call, outcome), name=name, daemon=True).start()
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
        # From Python 3.12 on no thread can start once the script has ended. Running `call` here could block forever.
        outcome.set_exception(StillRunning(f"{name}: {error}"))
    return outcome


def run_within(seconds: float, call: Callable[[], T], name: str) -> T:
    """Runs `call` in a daemon thread called `name`. If it ends in time, returns its result or raises its exception.

    Raises: StillRunning after `seconds`, or at once if the process is exiting.
    """
    outcome = run_in_thread(call, name)
    deadline = Deadline(seconds)
    while not outcome.done():
        if deadline.passed():
            raise StillRunning(name)
        wait([outcome], timeout=deadline.remaining())
    return outcome.result()


def carry_out(call: Callable[[], T], outcome: Future[T]) -> None:
    """Calls `call` and stores its result or exception in `outcome`."""
    try:
        outcome.set_result(call())
    except BaseException as error:  # re-raised by `outcome.result()`
        outcome.set_exception(error)
