"""Time limits that stand still while a rank is debugged, or while the whole job is suspended.

The agent of a rank shares a page of memory with it and notes there when the job is suspended. Only a wait that is about
to give up looks at it, so it costs nothing until then; without an agent nothing is ever suspended.
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

# Words of 64 bits: whether the job is suspended now, and the nanoseconds for which it was before.
_NOW, _BEFORE = 0, world.PAUSED_AT // 8
_POLL = 0.05  # s; how often a wait that would have given up looks whether the job is still suspended


def _page() -> memoryview:
    fd = os.environ.get(world.PAUSE_FD)
    if fd is None or not world.supervised():  # a child of a rank has inherited the variable, but not the descriptor
        return memoryview(bytes(world.PAUSED_AT + 8)).cast("q")
    return memoryview(mmap.mmap(int(fd), mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)).cast("q")


_words = _page()


def suspended_seconds() -> float:
    """Seconds for which the job was suspended, without the time since it was last if that has not ended."""
    return _words[_BEFORE] * 1e-9


class TimeLimit:
    """A limit in time, from now on.

    seconds: that count
    """

    __slots__ = ("_before", "_deadline")

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._before = suspended_seconds()

    def remaining(self) -> float:
        """Seconds, 0 if it has passed; to be asked again after so long, since a suspension may have put it off."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            if _words[_NOW] & 0xFF:
                return _POLL
            # The agent counts a suspension before it ends it.
            seconds += suspended_seconds() - self._before
        return max(0.0, seconds)

    def passed(self) -> bool:
        """True once it has passed."""
        return self.remaining() <= 0.0


# C code cannot be interrupted: a call that may block for ever is made in a daemon thread, which can be left behind.


class StillRunning(Exception):
    """The call has not returned in time; its thread goes on, and its outcome is lost. Or the process is ending."""


def run_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Runs `call` in a daemon thread called `name`. Returns: a future of its result or exception."""
    outcome: Future[T] = Future()
    try:
        threading.Thread(target=carry_out, args=(call, outcome), name=name, daemon=True).start()
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
        # From Python 3.12 on no thread starts any more once the script has ended; and here it could wait for ever.
        outcome.set_exception(StillRunning(f"{name}: {error}"))
    return outcome


def run_within(seconds: float, call: Callable[[], T], name: str) -> T:
    """What `call` returns or raises, if it does so in time; it runs in a daemon thread called `name`.

    Raises: StillRunning after `seconds`.
    """
    outcome = run_in_thread(call, name)
    limit = TimeLimit(seconds)
    while not outcome.done():
        if limit.passed():
            raise StillRunning(name)
        wait([outcome], timeout=limit.remaining())
    return outcome.result()


def carry_out(call: Callable[[], T], outcome: Future[T]) -> None:
    """Calls `call`; its result or exception becomes that of `outcome`."""
    try:
        outcome.set_result(call())
    except BaseException as error:  # raised where the outcome is waited for
        outcome.set_exception(error)
