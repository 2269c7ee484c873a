"""Heartbeat: what a rank does now, read from /proc and from its flight record once a second; and its memory, for the
case that the kernel's out-of-memory killer ends it.

The rank takes no part in this, so a rank that is stopped, holds the GIL or waits forever is described like any other.
"""

from __future__ import annotations

import os
import time

from launcher.linux import read, read_text, stat_of
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
# all costs more than all else that an agent does. So it is done once in so many looks; and so is reading the machine's
# counter of out-of-memory kills.
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
                children = read(f"/proc/{pid}/task/{thread}/children").split()
                if children or thread == str(pid):
                    parents.append(thread)
                found += map(int, children)
        except OSError:
            pass  # a thread, or the process, has ended meanwhile
        if thorough:
            self._parents[pid] = parents
        return found


_CGROUPS = "/sys/fs/cgroup"


class MemoryWatch:
    """What is known of the memory of one rank, noted now and then, so that the last note is from before its end."""

    def __init__(self, pid: int) -> None:
        self._folders = cgroup_folders(read_text(f"/proc/{pid}/cgroup"))
        # Counts what any out-of-memory killer took from this cgroup; where there is none, from the machine.
        events = self._folders[0] + "/memory.events" if self._folders else ""
        self._events = events if os.path.exists(events) else "/proc/vmstat"
        self._notes = 0
        self.note()

    def note(self) -> None:
        """Takes down what must be known from before the end."""
        if self._notes % _RARELY == 0:
            self._kills = count_kills(read_text(self._events))
        self._notes += 1
        self._available = field(read_text("/proc/meminfo"), "MemAvailable")

    def words(self, peak: int) -> str:
        """About a rank that SIGKILL has ended. peak: the most memory that it had, in bytes"""
        limits = [read_text(folder + "/memory.max") for folder in self._folders]
        limit = min((int(text) for text in limits if text.strip().isdigit()), default=None)
        return explain(peak, limit, self._available, count_kills(read_text(self._events)) > self._kills)


def explain(peak: int, limit: int | None, available: int | None, taken: bool) -> str:
    """What the figures say, in bytes. limit: of the cgroup; available: on the machine, shortly before

    taken: the out-of-memory killer has taken a process meanwhile

    >>> explain(2 << 30, None, 5 << 29, False)
    'it had 2.0 GiB at most; the machine had 2.5 GiB free'
    """
    about = []
    if limit is not None:
        about.append(f"the limit of its cgroup is {amount(limit)}")
    if available is not None and (limit is None or not taken):
        about.append(f"the machine had {amount(available)} free")
    begin = "the kernel's out-of-memory killer ended it: it had" if taken else "it had"
    return f"{begin} {'; '.join([f'{amount(peak)} at most', *about])}"


def cgroup_folders(text: str, root: str = _CGROUPS) -> list[str]:
    """The folders of a process's cgroup and of those above it, by its /proc/PID/cgroup; only version 2 has them.

    >>> cgroup_folders("4:memory:/x\\n0::/job/step\\n", "/r")
    ['/r/job/step', '/r/job', '/r']
    """
    for line in text.splitlines():
        if line.startswith("0::/"):
            path = line[3:].rstrip("/")
            parts = path.split("/")
            return [root + "/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return []


def count_kills(text: str) -> int:
    """How many processes the out-of-memory killer has taken, by memory.events or /proc/vmstat; 0 if it is silent."""
    _, found, rest = f"\n{text}".partition("\noom_kill ")
    return int(rest.partition("\n")[0]) if found else 0


def field(meminfo: str, name: str) -> int | None:
    """A line of /proc/meminfo, in bytes."""
    _, found, rest = f"\n{meminfo}".partition(f"\n{name}:")
    return int(rest.split(maxsplit=1)[0]) << 10 if found else None


def amount(size: int) -> str:
    """Bytes as people say them.

    >>> [amount(size) for size in (5 << 20, 3 << 29)]
    ['5 MiB', '1.5 GiB']
    """
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size >> 20} MiB"
