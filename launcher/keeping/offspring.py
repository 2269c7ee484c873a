"""CPU time of what a rank has started: one that waits for its data loaders or for a program of its own is not idle."""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")
# The kernel names children by the thread that started them, and a rank with a GPU has a hundred threads: to ask them
# all costs more than all else that a keeper does. So it is done once in so many looks.
_RARELY = 10


class Offspring:
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
        ticks = sum(_ticks(self._pid)[2:])
        found = self._children(self._pid, thorough)
        for child in found:  # grows
            ticks += sum(_ticks(child))
            found += self._children(child, thorough or child not in self._parents)
        if thorough:
            self._parents = {pid: self._parents[pid] for pid in (self._pid, *found) if pid in self._parents}
        return ticks / _TICKS

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


def _ticks(pid: int) -> list[int]:
    """User and system time of a process, then the same of the children that it has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return [int(field) for field in stat.read().rpartition(b")")[2].split()[11:15]]
    except OSError:
        return []  # it has ended
