"""Heartbeat: what a rank does now, read from /proc and from its flight record once a second; and its memory, for the
case that the kernel's out-of-memory killer ends it.

The rank takes no part in this, so a rank that is stopped, holds the GIL or waits forever is described like any other.
"""

from __future__ import annotations

import os
import time

from launcher.linux import format_bytes, read, read_text, stat_of
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


_CGROUPS = "/sys/fs/cgroup"


class MemoryWatch:
    """What is known of the memory of one rank, noted now and then, so that the last note is from before its end."""

    def __init__(self, pid: int) -> None:
        # The kernel counts what its out-of-memory killer took, by cgroup (version 2); else on the whole machine.
        _, _, group = read_text(f"/proc/{pid}/cgroup").partition("0::")
        events = f"{_CGROUPS}{group.strip()}/memory.events"
        self._events = events if group and os.path.exists(events) else "/proc/vmstat"
        self.note()

    def note(self) -> None:
        """Takes down what must be known from before the end."""
        self._kills = count_kills(read_text(self._events))
        self._available = field(read_text("/proc/meminfo"), "MemAvailable")

    def describe(self, peak: int) -> str:
        """About a rank that SIGKILL has ended. peak: the most memory that it had, in bytes"""
        return explain(peak, self._available, count_kills(read_text(self._events)) > self._kills)


def explain(peak: int, available: int | None, taken: bool) -> str:
    """What the figures say, in bytes. available: on the machine, shortly before

    taken: the out-of-memory killer has taken a process meanwhile

    >>> explain(2 << 30, 5 << 29, False)
    'it had 2.0 GiB at most; the machine had 2.5 GiB free'
    """
    begin = "the kernel's out-of-memory killer ended it: it had" if taken else "it had"
    free = f"; the machine had {format_bytes(available)} free" if available is not None else ""
    return f"{begin} {format_bytes(peak)} at most{free}"


def count_kills(text: str) -> int:
    """How many processes the out-of-memory killer has taken, by memory.events or /proc/vmstat; 0 if it is silent."""
    _, found, rest = f"\n{text}".partition("\noom_kill ")
    return int(rest.partition("\n")[0]) if found else 0


def field(meminfo: str, name: str) -> int | None:
    """A line of /proc/meminfo, in bytes."""
    _, found, rest = f"\n{meminfo}".partition(f"\n{name}:")
    return int(rest.split(maxsplit=1)[0]) << 10 if found else None
