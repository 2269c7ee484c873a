"""What a rank does now, seen from outside: its process in /proc, its calls and its Python in its flight record.

The rank takes no part in this, so one that is stopped, computes without ever letting go of the GIL or waits for ever is
described like any other, and never taken for dead.
"""

from __future__ import annotations

import time

from launcher.keeping.offspring import Offspring
from launcher.process import stat_of
from launcher.wire import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collectives.flight.reader import FlightReader

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
        self._record: FlightReader | None = None

    def found(self, fd: int) -> None:
        """The rank keeps a flight record, as its file descriptor `fd`."""
        from collectives.errors import RecordError
        from collectives.flight.reader import FlightReader

        try:
            self._record = FlightReader.of_fd(self._pid, fd)
        except RecordError:
            self._record = None  # it has closed the file already, or hides itself from others

    def state(self) -> str:
        """The state of the rank's process as one letter: R, S, D, T, Z; "" once it is gone."""
        return stat_of(self._pid).state

    def take(self) -> Message:
        """The beat: state, cpu (s since the start), below (of its descendants), rss (bytes), `FlightReader.newest`."""
        stat = stat_of(self._pid)
        below = self._offspring.cpu()
        return {"state": stat.state, "cpu": stat.cpu, "below": below, "rss": stat.rss, **self._glance()}

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
                return self._record.newest(time.monotonic_ns())
            except RecordError:
                self._record = None
        return _NO_RECORD
