"""Memory that processes of one node share: nameless, so nothing is left behind whoever is killed.

A segment is a `memfd`; the others map it through /proc/PID/fd/N of the process that made it. No name, no limit of
/dev/shm, freed when its last mapping goes. A token in its first bytes proves that it is the segment that was meant:
in a container of its own, another process may have that pid.
"""

from __future__ import annotations

import mmap
import os
import platform
from typing import Any, NamedTuple

import numpy as np

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
