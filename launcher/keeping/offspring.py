"""CPU time of what a rank has started: one that waits for its data loaders or for a program of its own is not idle."""

from __future__ import annotations

import os

from launcher.process import stat_of

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
