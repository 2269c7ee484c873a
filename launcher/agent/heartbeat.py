"""Heartbeat: what a rank does now, read from /proc and from its flight record once a second.

The rank takes no part in this, so a rank that is stopped, holds the GIL or waits forever is described like any other.
"""

from __future__ import annotations

import os
import time

from launcher.linux import stat_of
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
        self._descendants = Descendants(pid)
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
        below = self._descendants.cpu()
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


# The kernel names children by the thread that started them, and a rank with a GPU has a hundred threads: to ask them
# all costs more than all else that an agent does. So it is done once in so many looks.
_RARELY = 10


class Descendants:
    """The descendants of one process, seen every now and then.

    Those of a thread that started its first child between two thorough looks are missing until the next; the main
    thread is asked always.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looks = 0
        self._parents: dict[int, list[str]] = {}  # threads that have children, by process

    def cpu(self) -> float:
        """CPU time of all descendants in s, of those that have ended and were waited for too.

        0.0 for a process that has gone; less than all where the kernel names no children (CONFIG_PROC_CHILDREN).
        """
        thorough = self._looks % _RARELY == 0
        self._looks += 1
        cpu = stat_of(self._pid).waited
        found = self._children(self._pid, thorough)
        for child in found:  # grows
            stat = stat_of(child)
            cpu += stat.cpu + stat.waited
            found += self._children(child, thorough or child not in self._parents)
        if thorough:
            self._parents = {pid: self._parents[pid] for pid in (self._pid, *found) if pid in self._parents}
        return cpu

    def _children(self, pid: int, thorough: bool) -> list[int]:
        found: list[int] = []
        parents = []
        try:
            for thread in os.listdir(f"/proc/{pid}/task") if thorough else self._parents[pid]:
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    children = file.read().split()
                if children or thread == str(pid):
                    parents.append(thread)
                found += map(int, children)
        except OSError:
            pass  # a thread, or the process, has ended meanwhile
        if thorough:
            self._parents[pid] = parents
        return found
