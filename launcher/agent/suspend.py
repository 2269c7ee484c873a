"""Suspends a rank: stops its processes, or only its time limits, while a rank is in a debugger or the job is suspended.

There may be several reasons at a time. Only processes that were stopped here are continued here: a process that its
user has stopped stays so.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from collectives.world import PAUSED_AT
from launcher.linux import children_of, parents, stat_of

#: Why a rank is stopped: the job is suspended.
ORDERED = "ordered"
#: Why its time limits alone stand still: another rank is in a debugger.
PAUSED = "paused"


class Suspension:
    """The reasons for which one rank stands still, and what follows from them.

    page: file descriptor of the page by which the rank learns of it
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self._reasons: set[str] = set()
        self._stopped: set[int] = set()
        self._since = 0
        self._total = 0  # ns

    @property
    def frozen(self) -> bool:
        """The rank's processes are stopped."""
        return ORDERED in self._reasons

    def set(self, reason: str, holds: bool) -> None:
        """A reason holds from now on, or no longer."""
        before, frozen = bool(self._reasons), self.frozen
        if holds:
            self._reasons.add(reason)
        else:
            self._reasons.discard(reason)
        if self._reasons and not before:
            self._since = time.monotonic_ns()
            self._write(0, 1)
        if self.frozen and not frozen:
            self._stop()
        if not self._reasons and before:
            self._total += time.monotonic_ns() - self._since
            self._write(PAUSED_AT, self._total)
            self._write(0, 0)
        if frozen and not self.frozen:  # last, so that no process runs before its limits have been moved
            self._continue()

    def _write(self, at: int, word: int) -> None:
        os.pwrite(self._page, word.to_bytes(8, sys.byteorder), at)

    def _stop(self) -> None:
        me = os.getpid()
        seen: set[int] = set()
        while new := [pid for pid in children_of(parents(), me) if pid not in seen]:
            seen.update(new)  # and look again: one may have forked before it was stopped
            for pid in new:
                if stat_of(pid).state != "T" and _send(pid, signal.SIGSTOP):
                    self._stopped.add(pid)

    def _continue(self) -> None:
        for pid in children_of(parents(), os.getpid()):
            if pid in self._stopped:
                _send(pid, signal.SIGCONT)
        self._stopped.clear()


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # it has ended, or runs as another user
        return False
    return True
