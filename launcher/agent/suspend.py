"""Pauses a rank's time limits while the job is suspended or some rank is in a debugger.

While the job is suspended, the rank's processes are stopped, too. Both reasons may hold at the same time. Only
processes that were stopped here are continued here: a process that the user has stopped stays stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from collectives.world import PAUSED_AT
from launcher.linux import children_of, parents, send_signal, stat_of

#: Reason to stop the rank's processes: the job is suspended.
SUSPENDED = "suspended"
#: Reason to pause the rank's time limits only: some rank is in a debugger.
DEBUGGING = "debugging"


class Suspension:
    """The reasons for which one rank's time limits are paused, and whether its processes are stopped, too.

    page: file descriptor of the memory page from which the rank reads pauses (see `collectives.world.PAUSE_FD`)
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self._reasons: set[str] = set()
        self._stopped_pids: set[int] = set()
        self._paused_at = 0
        self._total = 0  # Length of all pauses that have ended (ns).

    def set(self, reason: str, active: bool) -> None:
        """Adds a reason, or removes it if not `active`. Has no effect if that was done before.

        While there is a reason, the rank's time limits are paused. With SUSPENDED its processes are stopped, too.
        """
        reasons = self._reasons
        self._reasons = reasons | {reason} if active else reasons - {reason}
        if self._reasons and not reasons:
            self._paused_at = time.monotonic_ns()
            self._write(0, 1)
        if SUSPENDED in self._reasons - reasons:
            self._stop_processes()
        if reasons and not self._reasons:
            self._total += time.monotonic_ns() - self._paused_at
            self._write(PAUSED_AT, self._total)
            self._write(0, 0)
        # Last, so that no process runs before its time limits have been extended.
        if SUSPENDED in reasons - self._reasons:
            self._continue_processes()

    def _write(self, offset: int, word: int) -> None:
        os.pwrite(self._page, word.to_bytes(8, sys.byteorder), offset)

    def _stop_processes(self) -> None:
        seen: set[int] = set()
        # Repeated until no new process shows up: a process may fork before it is stopped.
        while new := [pid for pid in children_of(parents(), os.getpid()) if pid not in seen]:
            seen.update(new)
            for pid in new:
                if stat_of(pid).state != "T" and send_signal(pid, signal.SIGSTOP):
                    self._stopped_pids.add(pid)

    def _continue_processes(self) -> None:
        for pid in children_of(parents(), os.getpid()):
            if pid in self._stopped_pids:
                send_signal(pid, signal.SIGCONT)
        self._stopped_pids.clear()
