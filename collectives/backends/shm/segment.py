"""Memory that processes of one node share. It has no name, so a killed process leaves nothing behind.

A segment is a `memfd`, which other processes map through /proc/PID/fd/N of the process that created it. It is not
limited by the size of /dev/shm, and is freed with its last mapping. A token in its first bytes proves that it is the
right one: a process in another container may have the same pid.

The control block of a communicator's ranks on a node is in a segment: signatures, inline buffers, staging buffers. Each
rank writes only its own parts and reads the others'. Before a collective every rank publishes a signature, its sequence
number last, and waits for the signatures of all. So no rank is more than one call ahead, and each rank needs only two
signatures and two inline buffers: call n + 2 may overwrite what call n wrote, since by then all ranks have begun call
n + 1 and finished call n. Staging buffers work the same way, from one phase to the next. This is correct on CPUs whose
stores become visible to other CPUs in program order (x86-64).
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

from collectives.transport import DIGEST, SEQUENCE, WORDS, Steps, Transport, gather_records

Array = np.ndarray[Any, Any]

PAGE = mmap.PAGESIZE
# Bytes of the token, which has a page of its own. The segment's memory starts on the next page.
TOKEN = 16
TOKEN_PAGE = PAGE


class Address(NamedTuple):
    """How another process finds a segment."""

    pid: int
    fd: int
    token: int


def supported() -> str:
    """The reason why this machine cannot share memory between ranks; "" if it can.

    Python has no memory barriers: communication by plain stores needs a CPU that keeps their order.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the order of stores is not kept on {platform.machine()}"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    return ""


class Segment:
    """A segment that is mapped into this process. Arrays over it keep the mapping alive.

    Its file descriptor stays open until `release`, since other processes map the segment through it.
    Raises: OSError if the system does not allow it; ValueError if the file is shorter than the segment.
    """

    def __init__(self, fd: int, nbytes: int, address: Address) -> None:
        self._fd = fd
        self.address = address
        self.map = mmap.mmap(fd, TOKEN_PAGE + nbytes)
        self.memory: Array = np.frombuffer(self.map, np.uint8, nbytes, TOKEN_PAGE)

    def offset_of(self, part: Array) -> int:
        """The offset in `map` of a view of `memory`."""
        start: int = part.__array_interface__["data"][0] - self.memory.__array_interface__["data"][0]
        return TOKEN_PAGE + start

    def reserve(self, start: int, nbytes: int) -> None:
        """Makes the kernel allocate these bytes of `memory` now.

        Without this call, pages are allocated at their first write, and SIGBUS kills the process if no memory is left.
        Raises: OSError if there is not enough memory, or the kernel gives no estimate of it.
        """
        free = available_memory()
        if nbytes > free:  # Checked here, because a kernel without free memory may kill processes.
            raise OSError(errno.ENOMEM, f"{nbytes} bytes are asked for, and {free} are free")
        os.posix_fallocate(self._fd, TOKEN_PAGE + start, nbytes)

    def release(self) -> None:
        """Closes the descriptor. Called when every process that should map the segment has done so, or has failed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def available_memory() -> int:
    """Bytes that are available without swapping, as the kernel estimates it (proc(5), MemAvailable).

    Raises: OSError if the kernel gives no estimate.
    """
    _, name, fields = Path("/proc/meminfo").read_text().partition("MemAvailable:")
    if not name:
        raise OSError("/proc/meminfo should have a line MemAvailable, and has none")
    return int(fields.split()[0]) << 10


def create(nbytes: int) -> Segment:
    """A new segment of `nbytes` zero bytes.

    Raises: OSError if the system does not allow it; OverflowError if `nbytes` does not fit into 64 bits.
    """
    fd = os.memfd_create("ddp-shared", os.MFD_CLOEXEC)
    try:
        # Sets the size of the file. If a sandbox limits memory, this call raises, and no later write causes SIGBUS.
        os.ftruncate(fd, TOKEN_PAGE + nbytes)
        token = int.from_bytes(os.urandom(7), "little") | 1  # Never 0, which means "no segment".
        os.pwrite(fd, token.to_bytes(TOKEN, "little"), 0)
        return Segment(fd, nbytes, Address(os.getpid(), fd, token))
    except BaseException:
        os.close(fd)
        raise


def attach(address: Address, nbytes: int) -> Segment:
    """Maps the segment that another process created.

    Raises: OSError if it is not accessible, or not the right one; ValueError if it is shorter than `nbytes`.
    """
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(fd, TOKEN, 0) != address.token.to_bytes(TOKEN, "little"):
            raise OSError(f"process {address.pid} is not the rank that was meant: another container?")
        return Segment(fd, nbytes, address)
    except BaseException:
        os.close(fd)
        raise


class ArrayLocation(NamedTuple):
    """Where an array is: the number of the segment (0: in none), and the offset in its rank's part, in bytes."""

    segment: int
    offset: int


NOWHERE = ArrayLocation(0, 0)


def part_bytes(nbytes: int) -> int:
    """The size of each rank's part of a segment, in bytes."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


def segment_bytes(nbytes: int, size: int) -> int:
    """The size of a segment for arrays of `nbytes` on `size` ranks."""
    return PAGE + size * part_bytes(nbytes)


def part_of(rank: int, nbytes: int) -> tuple[int, int]:
    """Start and length of a rank's part of a segment for arrays of `nbytes`, in bytes."""
    length = part_bytes(nbytes)
    return PAGE + rank * length, length


class _Shared(NamedTuple):
    segment: Segment
    marks: Any  # int64, one per rank: 1 once the rank has dropped its array.
    parts: list[Array]
    start: int


class SharedArrays:
    """The shared arrays of a group of ranks, seen from one of them."""

    def __init__(self, me: int, size: int) -> None:
        self._me = me
        self._size = size
        self._lock = threading.Lock()  # Duplicates share this object, and several threads may use them.
        self._open: dict[int, _Shared] = {}

    def add(self, segment: Segment, nbytes: int) -> Array:
        """This rank's array of a new segment, (nbytes,) uint8. Every rank adds the same segments."""
        # The token is the same on all ranks; a count would depend on the order in which their threads add segments.
        number = segment.address.token
        marks = segment.memory[:PAGE].view(np.int64).data
        locations = [part_of(rank, nbytes) for rank in range(self._size)]
        parts = [segment.memory[start : start + length] for start, length in locations]
        start = _address(parts[self._me])
        with self._lock:
            # Unmap the segments whose arrays every rank has dropped.
            for dropped in [number for number, shared in self._open.items() if all(shared.marks[: self._size])]:
                del self._open[dropped]
            self._open[number] = _Shared(segment, marks, parts, start)
        # An array object of its own, which is deleted together with the last view that the user holds.
        array: Array = np.frombuffer(segment.map, np.uint8, nbytes, segment.offset_of(parts[self._me]))
        weakref.finalize(array, _mark, marks, self._me, os.getpid()).atexit = False
        return array

    def find(self, array: Array) -> ArrayLocation:
        """The location of a C-contiguous array of this rank; NOWHERE if it is not in a segment."""
        address = _address(array)
        with self._lock:
            for number, shared in self._open.items():
                offset = address - shared.start
                if 0 <= offset <= len(shared.parts[self._me]) - array.nbytes:
                    return ArrayLocation(number, offset)
        return NOWHERE

    def view(self, rank: int, location: ArrayLocation, nbytes: int) -> Array:
        """Returns a rank's bytes at a location in its part, (nbytes,) uint8."""
        return self._open[location.segment].parts[rank][location.offset : location.offset + nbytes]


def _mark(marks: Any, me: int, pid: int) -> None:
    if os.getpid() == pid:  # A forked child only drops its own view.
        marks[me] = 1


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# Maximum length of a reason that ranks exchange.
_REASON = 200


def share_segment(
    transport: Transport, nbytes: int, reserved: tuple[int, int] | None = None
) -> Steps[tuple[list[int], Segment | None, str]]:
    """Shares a segment on each node with several ranks. The node's first rank creates it, and the others map it.

    nbytes: the size of this node's segment
    reserved: start and length in bytes of this rank's part. This rank allocates the part at once, so that its pages are
    on the rank's NUMA node
    Returns: each rank's node; this node's segment; why there are no segments, or "", the same text on every rank. The
    segment is None if this rank is alone on its node, or if there are no segments
    """
    segment: Segment | None = None
    several = transport.local_size > 1
    reason = supported() if several else ""
    if several and transport.local_rank == 0 and not reason:
        try:
            segment = create(nbytes)
        except (OSError, OverflowError) as error:  # OverflowError: nbytes does not fit into 64 bits.
            reason = f"rank {transport.rank} cannot make a segment of {nbytes} bytes: {error}"
    own_address = None if segment is None else segment.address
    records = yield from gather_records(transport, [transport.node, own_address])
    nodes = [node for node, _ in records]
    if len(set(nodes)) == transport.size:
        return nodes, None, ""
    creator = nodes.index(transport.node)
    address = records[creator][1]
    try:
        if several and transport.rank != creator and address is not None and not reason:
            segment = attach(Address(*address), nbytes)
        if segment is not None and reserved is not None:
            segment.reserve(*reserved)
    except (OSError, ValueError) as error:
        reason = f"rank {transport.rank} (pid {os.getpid()}) cannot map the segment of rank {creator}: {error}"
    reasons = yield from gather_records(transport, reason[:_REASON])
    if segment is not None:
        segment.release()
    first_reason = next(filter(None, reasons), "")
    return nodes, None if first_reason else segment, first_reason


#: Up to this many ranks, in an all_reduce through the staging buffers, each rank reduces the whole array for itself.
#: This takes fewer phases than if each rank reduced one part, and no part is copied back.
SUM_ALONE = 3
#: Bytes that are reduced at a time where the ranks' arrays are visible: small enough for a core's L2 cache.
TILE_BYTES = 256 << 10
#: Packs a signature's words after the sequence number: digest, rows, bytes, prefix, and the locations of x and out.
pack_signature = struct.Struct("8q").pack
#: An array in shared memory is read in place if it is larger than this (bytes), or does not fit into an inline buffer.
IN_PLACE_BYTES = 128 << 10
# After this many tests that find a signature missing, `ControlBlock.all_arrive_soon` returns False.
_POLLS = 50
# int64 words of a cache line. Each rank's phase has a cache line of its own.
_LINE = 8


def inline_bytes(size: int) -> int:
    """Bytes of an inline buffer among `size` ranks.

    An array that fits in, with its prefix, travels with the signature, unless it is read in place. For up to SUM_ALONE
    ranks a buffer has 1 MiB and a page for a prefix, otherwise 64 KiB. The larger buffer saves a phase in calls of 64
    KiB to 1 MiB (benchmarks/collectives.py). Pages of a buffer that no call uses take no memory.
    """
    return (1 << 20) + PAGE if size <= SUM_ALONE else 64 << 10


def staging_bytes(size: int) -> int:
    """Bytes of a staging buffer among `size` ranks, which holds a tile of an array.

    For up to SUM_ALONE ranks a buffer has 1 MiB, otherwise TILE_BYTES. Larger tiles need fewer phases, but each rank
    has two such buffers.
    """
    return 1 << 20 if size <= SUM_ALONE else TILE_BYTES


def control_bytes(size: int) -> int:
    """The size of a segment that holds a control block of `size` ranks."""
    return _control_bytes(size) + 2 * size * (inline_bytes(size) + staging_bytes(size))


def _control_bytes(size: int) -> int:
    words = 2 * size * WORDS + size * _LINE
    return -(-words * 8 // PAGE) * PAGE


class ControlBlock:
    """One rank's view of the control block.

    words, bytes: signatures and phases, as memoryviews, whose items are read twice as fast as an array's
    sequence: number of this rank's last signature
    other_signatures: the indices in `words` of the other ranks' signatures, for even and odd sequence numbers
    """

    def __init__(self, segment: Segment, me: int, size: int) -> None:
        self.segment = segment
        self.me = me
        self.size = size
        control = _control_bytes(size)
        memory = segment.memory
        self.bytes = memory[:control].data
        self.words = memory[:control].view(np.int64).data
        self.inline_bytes = inline_bytes(size)
        self.staging_bytes = staging_bytes(size)
        staged = control + 2 * size * self.inline_bytes
        inline = memory[control:staged].reshape(2, size, self.inline_bytes)
        staging = memory[staged : staged + 2 * size * self.staging_bytes].reshape(2, size, self.staging_bytes)
        self.inline = [[inline[parity, rank] for rank in range(size)] for parity in (0, 1)]
        self.staging = [[staging[parity, rank] for rank in range(size)] for parity in (0, 1)]
        self.sequence = 0
        self.phase = 0
        self._staging_index = 0
        first = 2 * size * WORDS
        self._phases = [first + rank * _LINE for rank in range(size)]
        self.others = [rank for rank in range(size) if rank != me]
        self._published = [b"", b""]
        self._own_signatures = [self._signature_index(parity, me) for parity in (0, 1)]
        self.other_signatures = [[self._signature_index(parity, rank) for rank in self.others] for parity in (0, 1)]

    # Signatures ------------------------------------------------------------------------------------------------------

    def _signature_index(self, parity: int, rank: int) -> int:
        """The index in `words` of a rank's signature."""
        return (parity * self.size + rank) * WORDS

    def inline_buffer(self) -> Array:
        """This rank's inline buffer for its next call, (inline_bytes,) uint8. `publish` shows it to the others."""
        return self.inline[(self.sequence + 1) & 1][self.me]

    def publish(self, signature: bytes) -> None:
        """Shows this rank's signature of its next call, packed by `pack_signature`."""
        self.sequence = sequence = self.sequence + 1
        parity = sequence & 1
        index = self._own_signatures[parity]
        if self._published[parity] is not signature:  # Otherwise it is already there.
            start = (index + DIGEST) * 8
            self.bytes[start : start + len(signature)] = signature
            self._published[parity] = signature
        self.words[index + SEQUENCE] = sequence

    def missing(self) -> list[int]:
        """The ranks whose signature of this call is missing; if all are there, those that have not done this phase."""
        parity = self.sequence & 1
        absent = [rank for rank in self.others if self.words[self._signature_index(parity, rank)] < self.sequence]
        return absent or [rank for rank in self.others if self.words[self._phases[rank]] < self.phase]

    def all_arrived(self) -> bool:
        """True once all signatures of this call are there."""
        words = self.words
        sequence = self.sequence
        for index in self.other_signatures[sequence & 1]:  # noqa: SIM110  # `all` takes three times as long
            if words[index] < sequence:
                return False
        return True

    def all_arrive_soon(self) -> bool:
        """Whether all signatures of this call arrive within about 3 us, which is as long as a later test would take."""
        words = self.words
        sequence = self.sequence
        polls = _POLLS
        for index in self.other_signatures[sequence & 1]:
            while words[index] < sequence:
                polls -= 1
                if not polls:
                    return False
        return True

    def signatures(self) -> list[list[int]]:
        """The signatures of this call, a list of words per rank."""
        first = self._signature_index(self.sequence & 1, 0)
        words = self.words[first : first + self.size * WORDS].tolist()
        return [words[start : start + WORDS] for start in range(0, len(words), WORDS)]

    # Staging buffers -------------------------------------------------------------------------------------------------

    def next_staging(self) -> list[Array]:
        """Every rank's staging buffer for the next tile; those of the previous tile may still be read."""
        self._staging_index ^= 1
        return self.staging[self._staging_index]

    def advance(self) -> None:
        """Shows the others that this rank has done its part of a phase, and begins the wait for them."""
        self.phase += 1
        self.words[self._phases[self.me]] = self.phase

    def advanced(self) -> bool:
        """True once every rank has done its part of this phase."""
        words = self.words
        phase = self.phase
        return all(words[self._phases[rank]] >= phase for rank in self.others)
