"""Arrays in memory that the ranks of a node share (`comm.empty`): found again by address, on every rank alike.

Each is a segment with one part a rank. A rank that drops its array may still be asked for it by the others, who may
hold theirs: a segment is unmapped only when every rank has dropped its part, as marks in the segment itself say.
"""

from __future__ import annotations

import bisect
import os
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np

from collectives.backends.shm.segment import PAGE, Segment

Array = np.ndarray[Any, Any]


class Place(NamedTuple):
    """Where an array lies: segment number (0: in no segment), and bytes from the start of its rank's part."""

    segment: int
    offset: int


NOWHERE = Place(0, 0)


def part_bytes(nbytes: int) -> int:
    """The bytes that each rank's part takes in a segment."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


def segment_bytes(nbytes: int, size: int) -> int:
    """The size of a segment for arrays of `nbytes` on `size` ranks."""
    return PAGE + size * part_bytes(nbytes)


class _Shared(NamedTuple):
    segment: Segment
    marks: Any  # int64 items, one a rank: 1 once it has dropped its array
    parts: list[Array]
    start: int


class SharedArrays:
    """The shared arrays of one group of ranks, seen from one of them."""

    def __init__(self, me: int, size: int) -> None:
        self._me, self._size = me, size
        self._lock = threading.Lock()  # duplicates share this, and may be used by several threads
        self._open: dict[int, _Shared] = {}
        self._starts: list[int] = []  # addresses of this rank's parts, sorted
        self._numbers: list[int] = []  # their segments' numbers

    def add(self, segment: Segment, nbytes: int) -> Array:
        """This rank's array of a new segment, (nbytes,) uint8. Every rank adds the same segments."""
        # Its token is the same on all ranks, whatever order their threads add the arrays of several communicators in.
        number, length = segment.address.token, part_bytes(nbytes)
        marks = segment.memory[:PAGE].view(np.int64).data
        parts = [segment.memory[PAGE + rank * length :][:length] for rank in range(self._size)]
        start = _address(parts[self._me])
        with self._lock:
            self._sweep()
            self._open[number] = _Shared(segment, marks, parts, start)
            at = bisect.bisect(self._starts, start)
            self._starts.insert(at, start)
            self._numbers.insert(at, number)
        # An array object of its own: it dies with the last view that a user holds.
        mine: Array = np.frombuffer(segment.map, np.uint8, nbytes, segment.offset_of(parts[self._me]))
        weakref.finalize(mine, _mark, marks, self._me, os.getpid()).atexit = False
        return mine

    def find(self, array: Array) -> Place:
        """Where a C-contiguous array of this rank lies."""
        if not self._starts:
            return NOWHERE
        address = _address(array)
        with self._lock:
            at = bisect.bisect(self._starts, address) - 1
            if at < 0:
                return NOWHERE
            number = self._numbers[at]
            shared = self._open[number]
        offset = address - shared.start
        return Place(number, offset) if offset + array.nbytes <= len(shared.parts[self._me]) else NOWHERE

    def view(self, rank: int, place: Place, nbytes: int) -> Array:
        """That rank's bytes at a place of its own, (nbytes,) uint8."""
        return self._open[place.segment].parts[rank][place.offset : place.offset + nbytes]

    def _sweep(self) -> None:
        for number, shared in list(self._open.items()):
            if all(shared.marks[rank] for rank in range(self._size)):
                at = self._numbers.index(number)
                del self._starts[at], self._numbers[at], self._open[number]


def _mark(marks: Any, me: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child lets go of its own view only
        marks[me] = 1


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
