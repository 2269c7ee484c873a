"""Time that does not count: while somebody debugs a rank, or the whole job is stopped, no time limit runs.

The keeper of a rank shares a page of memory with it and notes there when the job stands still. Only who is about to
give up looks at it, so it costs nothing until then; without a keeper nothing ever stands still.
"""

from __future__ import annotations

import mmap
import os
import time

from collectives import world

# Words of 64 bits: whether the job stands still now, and the nanoseconds for which it did so before.
_NOW, _BEFORE = 0, world.PAUSED_AT // 8
# s; how often who would have given up looks whether the job still stands still
_LOOK = 0.05


def _page() -> memoryview:
    fd = os.environ.get(world.PAUSE_FD)
    if fd is None or not world.supervised():  # a child of a rank has inherited the variable, but not the descriptor
        return memoryview(bytes(world.PAUSED_AT + 8)).cast("q")
    return memoryview(mmap.mmap(int(fd), mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)).cast("q")


_words = _page()


def stood_still() -> float:
    """Seconds for which the job has stood still, without the time since the last halt began if it has not ended."""
    return _words[_BEFORE] * 1e-9


def left(deadline: float, before: float) -> float:
    """Seconds until `deadline`, 0 if it has passed. While the job stands still there is always a little left.

    deadline: monotonic, s
    before: what `stood_still` was when the deadline was set
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        if _words[_NOW] & 0xFF:
            return _LOOK
        # The keeper counts a halt before it ends it.
        seconds += stood_still() - before
    return max(0.0, seconds)


class Limit:
    """A limit in time, from now on.

    seconds: that count
    """

    __slots__ = ("_before", "_deadline")

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._before = stood_still()

    def left(self) -> float:
        """Seconds, 0 if it is over; to be asked again after so long, since a halt may have put it off."""
        return left(self._deadline, self._before)

    def over(self) -> bool:
        """True once it is over."""
        return left(self._deadline, self._before) <= 0.0
