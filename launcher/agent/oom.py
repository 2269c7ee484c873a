"""Was it the kernel's out-of-memory killer? Reads its counters, and the memory figures by which a user can judge."""

from __future__ import annotations

import os

_ROOT = "/sys/fs/cgroup"
# The machine's counter takes longer to read than all the rest of a beat: it is noted once in so many.
_RARELY = 10
_MOST = 1 << 16  # bytes; none of these files is nearly as long


class MemoryWatch:
    """What is known of the memory of one rank, noted now and then, so that the last note is from before its end."""

    def __init__(self, pid: int) -> None:
        self._folders = cgroup_folders(_read(f"/proc/{pid}/cgroup"))
        # Counts what any out-of-memory killer took from this cgroup; where there is none, from the machine.
        events = self._folders[0] + "/memory.events" if self._folders else ""
        self._events = events if os.path.exists(events) else "/proc/vmstat"
        self._notes = 0
        self.note()

    def note(self) -> None:
        """Takes down what must be known from before the end."""
        if self._notes % _RARELY == 0:
            self._kills = count_kills(_read(self._events))
        self._notes += 1
        self._available = field(_read("/proc/meminfo"), "MemAvailable")

    def words(self, peak: int) -> str:
        """About a rank that SIGKILL has ended. peak: the most memory that it had, in bytes"""
        limits = [_read(folder + "/memory.max") for folder in self._folders]
        limit = min((int(text) for text in limits if text.strip().isdigit()), default=None)
        return explain(peak, limit, self._available, count_kills(_read(self._events)) > self._kills)


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


def cgroup_folders(text: str, root: str = _ROOT) -> list[str]:
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


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, _MOST).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
