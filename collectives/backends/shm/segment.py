"""Memory that processes of one node share: nameless, so a killed process leaves nothing behind.

A segment is a `memfd`; the others map it through /proc/PID/fd/N of the process that made it. No name, no limit of
/dev/shm, freed when its last mapping goes. A token in its first bytes proves that it is the segment that was meant:
in a container of its own, another process may have that pid.
"""

from __future__ import annotations

import mmap
import os
import platform
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np

from collectives.transport import Steps, Transport, gather_records

Array = np.ndarray[Any, Any]

PAGE = mmap.PAGESIZE
TOKEN = 16  # bytes
TOKEN_PAGE = PAGE  # the token has a page of its own, and memory starts on the next


class Address(NamedTuple):
    """Where another process finds a segment."""

    pid: int
    fd: int
    token: int


def supported() -> str:
    """Why this machine cannot share memory between ranks, "" if it can.

    Python has no memory barriers: two processes that talk through plain stores need a CPU that keeps their order.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the order of stores is not kept on {platform.machine()}"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    return ""


class Segment:
    """A mapped segment. Arrays over it keep the mapping alive; the file descriptor is needed only while others map it.

    Raises: OSError where the system forbids it.
    """

    def __init__(self, fd: int, nbytes: int, address: Address) -> None:
        self._fd = fd
        self.address = address
        self.map = mmap.mmap(fd, TOKEN_PAGE + nbytes)
        self.memory: Array = np.frombuffer(self.map, np.uint8, nbytes, TOKEN_PAGE)

    def offset_of(self, part: Array) -> int:
        """Where a view of `memory` starts in `map`."""
        start: int = part.__array_interface__["data"][0] - self.memory.__array_interface__["data"][0]
        return TOKEN_PAGE + start

    def release(self) -> None:
        """Every process that should map it has done so."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def create(nbytes: int) -> Segment:
    """A new segment of `nbytes` zero bytes. Raises: OSError where the system forbids it."""
    fd = os.memfd_create("ddp-shared", os.MFD_CLOEXEC)
    try:
        # Fails here where memory is rationed, and not with a SIGBUS at the first touch.
        os.ftruncate(fd, TOKEN_PAGE + nbytes)
        token = int.from_bytes(os.urandom(7), "little") | 1  # never 0, which stands for no segment
        os.pwrite(fd, token.to_bytes(TOKEN, "little"), 0)
        return Segment(fd, nbytes, Address(os.getpid(), fd, token))
    except BaseException:
        os.close(fd)
        raise


def attach(address: Address, nbytes: int) -> Segment:
    """The segment that another process made. Raises: OSError if it cannot be reached, or is another one."""
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(fd, TOKEN, 0) != address.token.to_bytes(TOKEN, "little"):
            raise OSError(f"process {address.pid} is not the rank that was meant: another container?")
        segment = Segment(fd, nbytes, address)
    except BaseException:
        os.close(fd)
        raise
    segment.release()
    return segment


class ArrayLocation(NamedTuple):
    """Where an array lies: segment number (0: in no segment), and bytes from the start of its rank's part."""

    segment: int
    offset: int


NOWHERE = ArrayLocation(0, 0)


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

    def add(self, segment: Segment, nbytes: int) -> Array:
        """This rank's array of a new segment, (nbytes,) uint8. Every rank adds the same segments."""
        # Its token is the same on all ranks, whatever order their threads add the arrays of several communicators in.
        number, length = segment.address.token, part_bytes(nbytes)
        marks = segment.memory[:PAGE].view(np.int64).data
        parts = [segment.memory[PAGE + rank * length :][:length] for rank in range(self._size)]
        start = _address(parts[self._me])
        with self._lock:
            # What every rank has dropped is unmapped.
            for old in [number for number, shared in self._open.items() if all(shared.marks[: self._size])]:
                del self._open[old]
            self._open[number] = _Shared(segment, marks, parts, start)
        # An array object of its own: it dies with the last view that a user holds.
        mine: Array = np.frombuffer(segment.map, np.uint8, nbytes, segment.offset_of(parts[self._me]))
        weakref.finalize(mine, _mark, marks, self._me, os.getpid()).atexit = False
        return mine

    def find(self, array: Array) -> ArrayLocation:
        """Where a C-contiguous array of this rank lies."""
        address = _address(array)
        with self._lock:
            for number, shared in self._open.items():
                offset = address - shared.start
                if 0 <= offset <= len(shared.parts[self._me]) - array.nbytes:
                    return ArrayLocation(number, offset)
        return NOWHERE

    def view(self, rank: int, place: ArrayLocation, nbytes: int) -> Array:
        """That rank's bytes at a place of its own, (nbytes,) uint8."""
        return self._open[place.segment].parts[rank][place.offset : place.offset + nbytes]


def _mark(marks: Any, me: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child lets go of its own view only
        marks[me] = 1


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


_REASON = 200  # characters


def share_segment(transport: Transport, nbytes: int) -> Steps[tuple[list[int], Segment | None, str]]:
    """One segment a node with several ranks, made by the first and mapped by all of them.

    nbytes: of the segment of this rank's node
    Returns: each rank's node; this node's segment, None for a rank alone; why there are none, the same on every rank
    """
    mine: Segment | None = None
    several = transport.local_size > 1
    reason = supported() if several else ""
    if several and transport.local_rank == 0 and not reason:
        try:
            mine = create(nbytes)
        except (OSError, OverflowError) as error:  # the latter: more bytes than a number of 64 bits holds
            reason = f"rank {transport.rank} cannot make a segment of {nbytes} bytes: {error}"
    made = None if mine is None else mine.address
    places = yield from gather_records(transport, [transport.node, made])
    nodes = [node for node, _ in places]
    if len(set(nodes)) == transport.size:
        return nodes, None, ""
    maker = nodes.index(transport.node)
    address = places[maker][1]
    try:
        if several and transport.rank != maker and address is not None and not reason:
            mine = attach(Address(*address), nbytes)
    except (OSError, ValueError) as error:
        reason = f"rank {transport.rank} (pid {os.getpid()}) cannot map the segment of rank {maker}: {error}"
    reasons = yield from gather_records(transport, reason[:_REASON])
    if mine is not None:
        mine.release()
    first = next(filter(None, reasons), "")
    return nodes, None if first else mine, first
