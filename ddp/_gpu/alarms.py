"""What a kernel finds wrong with numbers, an index out of range say, and how the host hears of it without waiting.

The kernel goes on with a number that does no harm, and writes what it met into host memory. Whoever waits for the
device next (`item`, `cpu`, `synchronize`) looks there and raises. A trap would do as well, but CUDA forgets all memory
of a process that it stops; and the error would not say which op, nor which number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._gpu import faults

_WORDS = 4  # which alarm (0: none), the number, what it was compared with
_LATE = (
    " It was met by work that was launched earlier; with CUDA_LAUNCH_BLOCKING=1 every op waits for its work, and "
    "raises itself."
)


class Alarm:
    """Words of host memory that every device can write to. address: for kernels"""

    def __init__(self, xp: Any) -> None:
        self.words = np.frombuffer(xp.cuda.alloc_pinned_memory(8 * _WORDS), np.int64, _WORDS)
        self.words[...] = 0
        self.address = int(self.words.ctypes.data)


_alarms: dict[Any, Alarm] = {}  # by array module: there is one, but for tests
_known: dict[tuple[type[Exception], str], int] = {}
_messages: list[tuple[type[Exception], str]] = []


def alarm(xp: Any) -> int:
    """The address that a kernel writes to."""
    found = _alarms.get(xp)
    if found is None:
        found = _alarms[xp] = Alarm(xp)
    return found.address


def number(error: type[Exception], message: str) -> int:
    """What a kernel writes first, so that this is raised. message: with {value} and {limit}"""
    found = _known.get((error, message))
    if found is None:
        _messages.append((error, message))
        found = _known[error, message] = len(_messages)
    return found


def listen() -> None:
    """For where the host has waited: raises what a kernel has told since the last time."""
    for each in _alarms.values():
        which = int(each.words[0])
        if which:
            value, limit = int(each.words[1]), int(each.words[2])
            each.words[...] = 0
            error, message = _messages[which - 1]
            late = "" if faults.blocking() else _LATE
            raise error(message.format(value=value, limit=limit, last=limit - 1) + "." + late)
