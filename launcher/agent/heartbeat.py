"""Heartbeat: what a rank is doing, read once a second from /proc and from its flight record.

The rank takes no part in this, so a rank that is stopped, holds the GIL or waits forever is described like any other.
"""

from __future__ import annotations

import time

from launcher.linux import list_folder, read, stat_of
from launcher.protocol import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collectives.flight.reader import FlightReader

# The flight record's part of a heartbeat if the rank has no flight record. Keys: as in `FlightReader.newest`.
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
# A rank that has used less CPU time than this (s) since the last heartbeat is idle.
_IDLE = 0.05


class RankReader:
    """Reads the state of one rank from outside."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu = 0.0
        self._descendants_cpu = 0.0
        self._reader: FlightReader | None = None

    def open_record(self, fd: int) -> None:
        """Reads the rank's flight record from now on. fd: its file descriptor in the rank"""
        from collectives.errors import RecordError
        from collectives.flight.reader import FlightReader

        try:
            self._reader = FlightReader.of_fd(self._pid, fd)
        except RecordError:
            self._reader = None  # The rank has closed it already, or it cannot be read.

    def heartbeat(self) -> Message:
        """The rank's heartbeat of this moment.

        Keys: state: a letter, as in `Stat`; cpu: CPU time of the rank since its start (s); below: CPU time of its
        descendants (s), read at the last heartbeat at which the rank was idle; rss: its resident memory (bytes); and
        the keys of `FlightReader.newest`
        """
        stat = stat_of(self._pid)
        # What descendants do matters only while the rank itself is idle. Reading it takes a millisecond: a rank with a
        # GPU has a hundred threads, each of which may have children.
        if stat.cpu - self._cpu < _IDLE:
            self._descendants_cpu = descendants_cpu(self._pid)
        self._cpu = stat.cpu
        return {
            "state": stat.state,
            "cpu": stat.cpu,
            "below": self._descendants_cpu,
            "rss": stat.rss,
            **self._read_record(),
        }

    def last_position(self) -> str:
        """A clause that says where the rank's Python code was last seen."""
        record = self._read_record()
        if record["where"] is None:
            return "where its Python stood was never noted"
        return f"its Python stood at {record['where']} {record['where_age']:.1f} s ago"

    def _read_record(self) -> Message:
        if self._reader is not None:
            from collectives.errors import RecordError

            try:
                return self._reader.newest(time.monotonic_ns())
            except RecordError:
                self._reader = None
        return _NO_RECORD


def descendants_cpu(pid: int) -> float:
    """CPU time (s) of all descendants of a process, including those that have ended and were waited for.

    0.0 if the process is gone. A kernel without CONFIG_PROC_CHILDREN does not list living children: they do not count.
    """
    cpu = stat_of(pid).waited
    pids = [pid]
    for parent in pids:  # The list grows while it is walked.
        for thread in list_folder(f"/proc/{parent}/task"):
            for child in map(int, read(f"/proc/{parent}/task/{thread}/children").split()):
                stat = stat_of(child)
                cpu += stat.cpu + stat.waited
                pids.append(child)
    return cpu
