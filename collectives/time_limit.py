"""Time limits that stand still while a rank is debugged, or while the whole job is suspended.

The agent of a rank shares a page of memory with it and notes there when the job is suspended. Only a wait that is about
to give up looks at it, so it costs nothing until then; without an agent nothing is ever suspended.
"""

from __future__ import annotations

import mmap
import os
import time

from collectives import world

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
