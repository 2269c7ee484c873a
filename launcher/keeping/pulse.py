"""What a rank does now, seen from outside: its process in /proc, its calls and its Python in its flight record.

The rank takes no part in this, so one that is stopped, computes without ever letting go of the GIL or waits for ever is
described like any other, and never taken for dead.
"""

from __future__ import annotations

import os
import time

from launcher.keeping.offspring import Offspring
from launcher.wire import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collectives.flight.glance import Glance

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_NO_RECORD = {
    "step": None,
    "calls": 0,
    "call": None,
    "call_on": None,
    "call_state": None,
    "call_age": None,
    "where": None,
    "where_age": None,
}


class Pulse:
    """The view of one rank."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._offspring = Offspring(pid)
        self._record: Glance | None = None

    def found(self, fd: int) -> None:
        """The rank keeps a flight record, as its file descriptor `fd`."""
        from collectives.errors import RecordError
        from collectives.flight.glance import Glance

        try:
            self._record = Glance.of_fd(self._pid, fd)
        except RecordError:
            self._record = None  # it has closed the file already, or hides itself from others

    def state(self) -> str:
        """The state of the rank's process as one letter: R, S, D, T, Z; "" once it is gone."""
        return parse_stat(_stat(self._pid))[0]

    def take(self) -> Message:
        """The beat: state, cpu (s since the start), below (the same of its descendants), rss (bytes), `Glance.read`."""
        state, cpu, rss = parse_stat(_stat(self._pid))
        return {"state": state, "cpu": cpu, "below": self._offspring.cpu(), "rss": rss, **self._glance()}

    def stood(self) -> str:
        """Where the rank's Python stood last, in words."""
        glance = self._glance()
        if glance["where"] is None:
            return "where its Python stood was never noted"
        return f"its Python stood at {glance['where']} {glance['where_age']:.1f} s ago"

    def _glance(self) -> Message:
        if self._record is not None:
            from collectives.errors import RecordError

            try:
                return self._record.read(time.monotonic_ns())
            except RecordError:
                self._record = None
        return _NO_RECORD


def parse_stat(stat: bytes, ticks: int = _TICKS, page: int = _PAGE) -> tuple[str, float, int]:
    """State, CPU time (s) and resident memory (bytes) of a process, from /proc/PID/stat; "", 0, 0 for an empty one.

    >>> parse_stat(b"7 (a) b) t 1 7 7 0 -1 4194304 9 0 0 0 150 50 0 0 20 0 3 0 99 4096 25", 100, 4096)
    ('T', 2.0, 102400)
    """
    fields = stat.rpartition(b")")[2].split()
    if not fields:
        return "", 0.0, 0
    # A process that a debugger has stopped is "t": no other than "T" to who wonders why it does not move.
    return fields[0].decode().upper(), (int(fields[11]) + int(fields[12])) / ticks, int(fields[21]) * page


def _stat(pid: int) -> bytes:
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 4096)
    except OSError:  # it ended between the two
        return b""
    finally:
        os.close(fd)
