"""Memory that processes of one node share: nameless, so a killed process leaves nothing behind.

A segment is a `memfd`; the others map it through /proc/PID/fd/N of the process that made it. No name, no limit of
/dev/shm, freed when its last mapping goes. A token in its first bytes proves that it is the segment that was meant:
in a container of its own, another process may have that pid.

The control block of the ranks of a communicator lies in one: headers, inline buffers, staging buffers for tiles. Each
rank writes only its own parts and reads the others'. Before a collective every rank publishes a header, its sequence
number last, and waits for the headers of all; so no rank is more than one call ahead, and two of everything are enough:
what call n wrote may be overwritten by call n + 2, since by then all have begun n + 1 and finished n. Staging buffers
work the same way, from one phase to the next. Sound where stores of one CPU are seen by others in their order (x86-64).
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import struct
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.transport import HASH, SEQUENCE, WORDS, Steps, Transport, gather_records

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
    """A segment that is mapped into this process. Arrays over it keep the mapping alive.

    Its file descriptor stays open until `release`: other processes map the segment by it.
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

    def reserve(self, start: int, nbytes: int) -> None:
        """Has the kernel allocate these bytes of `memory` now. Raises: OSError if it has not that much.

        Otherwise pages are allocated when they are first written, which ends the process by SIGBUS where memory is out.
        """
        free = available_memory()
        if nbytes > free:  # fails here, because the kernel would kill other processes to make room
            raise OSError(errno.ENOMEM, f"{nbytes} bytes are asked for, and {free} are free")
        os.posix_fallocate(self._fd, TOKEN_PAGE + start, nbytes)

    def release(self) -> None:
        """Every process that should map it has done so."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def available_memory() -> int:
    """Bytes that this machine can give without swapping, as the kernel estimates it (proc(5), MemAvailable)."""
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) << 10


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
        return Segment(fd, nbytes, address)
    except BaseException:
        os.close(fd)
        raise


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


def part_of(rank: int, nbytes: int) -> tuple[int, int]:
    """Start and length in bytes of a rank's part of a segment for arrays of `nbytes`."""
    length = part_bytes(nbytes)
    return PAGE + rank * length, length


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
        number = segment.address.token
        marks = segment.memory[:PAGE].view(np.int64).data
        parts = [
            segment.memory[start : start + length]
            for start, length in (part_of(rank, nbytes) for rank in range(self._size))
        ]
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


def share_segment(
    transport: Transport, nbytes: int, reserved: tuple[int, int] | None = None
) -> Steps[tuple[list[int], Segment | None, str]]:
    """One segment a node with several ranks, made by the first and mapped by all of them.

    nbytes: of the segment of this rank's node
    reserved: start and length in bytes of the part for which this rank has memory allocated at once. Each rank does so
    for its own part, whose pages are then on its NUMA node
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
        if mine is not None and reserved is not None:
            mine.reserve(*reserved)
    except (OSError, ValueError) as error:
        reason = f"rank {transport.rank} (pid {os.getpid()}) cannot map the segment of rank {maker}: {error}"
    reasons = yield from gather_records(transport, reason[:_REASON])
    if mine is not None:
        mine.release()
    first = next(filter(None, reasons), "")
    return nodes, None if first else mine, first


#: Up to this many ranks each one sums whole arrays for itself: fewer phases, and nothing to copy back.
SUM_ALONE = 3
#: Bytes of a staging buffer: tiles of it stay in a core's second-level cache.
STAGING_BYTES = 256 << 10
#: A header's words after the sequence number, as bytes: digest, rows, bytes, prefix, and where x and out lie.
pack_header = struct.Struct("8q").pack
#: An array in shared memory that is larger than this is read where it lies.
IN_PLACE_BYTES = 128 << 10
_POLLS = 50
_LINE = 8  # int64 words of a cache line, so that no two ranks write into the same one


def inline_bytes(size: int) -> int:
    """Bytes of an inline buffer among `size` ranks: an array up to this size travels with its header.

    For few ranks 1 MiB and a prefix, which saves calls of 64 KiB to 1 MiB a phase (benchmarks/collectives.py). What no
    call uses is never in memory.
    """
    return (1 << 20) + PAGE if size <= SUM_ALONE else 64 << 10


def control_bytes(size: int) -> int:
    """The size of a segment that holds a control block of `size` ranks."""
    return _control_bytes(size) + 2 * size * (inline_bytes(size) + STAGING_BYTES)


def _control_bytes(size: int) -> int:
    words = 2 * size * WORDS + size * _LINE
    return -(-words * 8 // PAGE) * PAGE


class ControlBlock:
    """One rank's view of the control block.

    words, bytes: the control part, as memoryviews, since their items are read twenty times as fast as an array's
    sequence: of this rank's last header
    heads: where the other ranks' headers begin in `words`, for even and odd sequence numbers
    """

    def __init__(self, segment: Segment, me: int, size: int) -> None:
        self.segment = segment
        self.me, self.size = me, size
        control = _control_bytes(size)
        memory = segment.memory
        self.bytes = memory[:control].data
        self.words = memory[:control].view(np.int64).data
        self.inline_bytes = inline_bytes(size)
        staged = control + 2 * size * self.inline_bytes
        inline = memory[control:staged].reshape(2, size, self.inline_bytes)
        staging = memory[staged : staged + 2 * size * STAGING_BYTES].reshape(2, size, STAGING_BYTES)
        self.inline = [[inline[parity, rank] for rank in range(size)] for parity in (0, 1)]
        self.staging = [[staging[parity, rank] for rank in range(size)] for parity in (0, 1)]
        self.sequence = 0
        self.phase = 0
        self._turn = 0
        first = 2 * size * WORDS
        self._phases = [first + rank * _LINE for rank in range(size)]
        self.others = [rank for rank in range(size) if rank != me]
        self._published = [b"", b""]
        self._own_heads = [self.header(parity, me) for parity in (0, 1)]
        self.heads = [[self.header(parity, rank) for rank in self.others] for parity in (0, 1)]

    # Headers ---------------------------------------------------------------------------------------------------------

    def header(self, parity: int, rank: int) -> int:
        """The index of that rank's header in `words`."""
        return (parity * self.size + rank) * WORDS

    def inline_buffer(self) -> Array:
        """(inline_bytes,) uint8: where this rank puts what travels with the header of its next call."""
        return self.inline[(self.sequence + 1) & 1][self.me]

    def publish(self, header: bytes) -> None:
        """Shows this rank's header of its next call: see `pack_header`."""
        self.sequence = sequence = self.sequence + 1
        parity = sequence & 1
        at = self._own_heads[parity]
        if self._published[parity] is not header:  # else it is there already
            start = (at + HASH) * 8
            self.bytes[start : start + len(header)] = header
            self._published[parity] = header
        self.words[at + SEQUENCE] = sequence

    def missing(self) -> list[int]:
        """The ranks whose header of this call is not there yet; if all are, those that are behind in its phases."""
        parity = self.sequence & 1
        absent = [rank for rank in self.others if self.words[self.header(parity, rank)] < self.sequence]
        return absent or [rank for rank in self.others if self.words[self._phases[rank]] < self.phase]

    def met(self) -> bool:
        """True once all headers of this call are there."""
        words = self.words
        sequence = self.sequence
        for at in self.heads[sequence & 1]:  # noqa: SIM110  # `all` takes three times as long
            if words[at] < sequence:
                return False
        return True

    def met_soon(self) -> bool:
        """True if all headers of this call are there within about 3 microseconds: to look again later takes as long."""
        words = self.words
        sequence = self.sequence
        polls = _POLLS
        for at in self.heads[sequence & 1]:
            while words[at] < sequence:
                polls -= 1
                if not polls:
                    return False
        return True

    def signatures(self) -> list[list[int]]:
        """The headers of this call, a list of words a rank."""
        first = self.header(self.sequence & 1, 0)
        flat = self.words[first : first + self.size * WORDS].tolist()
        return [flat[at : at + WORDS] for at in range(0, len(flat), WORDS)]

    # Staging buffers -------------------------------------------------------------------------------------------------

    def turn(self) -> list[Array]:
        """Every rank's staging buffer for the next tile: those of the tile before it may still be read."""
        self._turn ^= 1
        return self.staging[self._turn]

    def advance(self) -> None:
        """This rank has done its part of a phase."""
        self.phase += 1
        self.words[self._phases[self.me]] = self.phase

    def advanced(self) -> bool:
        """True once every rank has done its part of this phase."""
        words, phase = self.words, self.phase
        return all(words[self._phases[rank]] >= phase for rank in self.others)
