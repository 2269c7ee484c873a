"""Heartbeat: what a rank does now, read from /proc and from its flight record once a second.

The rank takes no part in this, so a rank that is stopped, holds the GIL or waits forever is described like any other.
"""

from __future__ import annotations

import os
import time

from launcher.linux import read, stat_of
from launcher.protocol import Message

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


class Heartbeat:
    """The view of one rank."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu = 0.0
        self._below = 0.0
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
        # A rank with a GPU has a hundred threads, each of which may have children: to ask them all takes a millisecond,
        # and matters only where the rank itself does nothing.
        if stat.cpu - self._cpu < _IDLE:
            self._below = descendants_cpu(self._pid)
        self._cpu = stat.cpu
        return {"state": stat.state, "cpu": stat.cpu, "below": self._below, "rss": stat.rss, **self._glance()}

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


_IDLE = 0.05  # s of CPU between two beats


def descendants_cpu(pid: int) -> float:
    """CPU time of all descendants of a process in s, of those that have ended and were waited for too.

    0.0 for a process that has gone, and where the kernel names no children (CONFIG_PROC_CHILDREN).
    """
    cpu = stat_of(pid).waited
    found = [pid]
    for each in found:  # grows
        try:
            threads = os.listdir(f"/proc/{each}/task")
        except OSError:
            continue  # it has ended meanwhile
        children = [int(child) for thread in threads for child in read(f"/proc/{each}/task/{thread}/children").split()]
        cpu += sum(stat.cpu + stat.waited for stat in map(stat_of, children))
        found += children
    return cpu
