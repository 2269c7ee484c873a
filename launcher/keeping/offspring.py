"""CPU time of what a rank has started: one that waits for its data loaders or for a program of its own is not idle."""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_below(pid: int) -> float:
    """CPU time of all descendants of a process in s, of those that have ended and were waited for too.

    0.0 for a process that has gone, and less than all where the kernel does not name children (CONFIG_PROC_CHILDREN).
    """
    ticks = sum(_ticks(pid)[2:])
    found = _children(pid)
    for child in found:  # grows
        ticks += sum(_ticks(child))
        found += _children(child)
    return ticks / _TICKS


def _ticks(pid: int) -> list[int]:
    """User and system time of a process, then the same of the children that it has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return [int(field) for field in stat.read().rpartition(b")")[2].split()[11:15]]
    except OSError:
        return []  # it has ended


def _children(pid: int) -> list[int]:
    """The children of all threads of a process."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as children:
                found += map(int, children.read().split())
    except OSError:
        pass  # a thread, or the process, has ended meanwhile
    return found
