"""Whole messages between two processes over a socket: two system calls a batch, and no thread that waits in between."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque

_LENGTH = struct.Struct("=Q")
_TIME = struct.Struct("@ll")  # a timeval, as SO_RCVTIMEO takes it
_DESCRIPTOR = struct.Struct("@i")
_ROOM = socket.CMSG_SPACE(_DESCRIPTOR.size)
_PIECE = 1 << 16  # bytes read at once


class Line:
    """One end of a stream socket, for messages of any length. A descriptor may go along with one.

    timeout: seconds that `receive` waits for more to come; 0: until the other end is closed
    """

    def __init__(self, end: socket.socket, timeout: float = 0.0) -> None:
        self.descriptors: deque[int] = deque()  # that have come, in order; whoever takes one closes it
        self._socket = end
        self._read = bytearray()
        if timeout:
            # The kernel's own limit: Python's would ask before every read whether there is something.
            micros = max(1, int(timeout * 1e6))  # 0 would be no limit
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(*divmod(micros, 1_000_000)))

    def send(self, payload: bytes, fd: int = -1) -> None:
        """Sends one message. Reads meanwhile what comes, so that two ends that send to each other both get on.

        Raises: OSError if the other end is closed.
        """
        left = memoryview(_LENGTH.pack(len(payload)) + payload)
        if fd >= 0:
            along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(fd))]
            left = left[self._socket.sendmsg([left], along) :]
        while left:
            try:
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._socket, select.POLLIN | select.POLLOUT)
                if poll.poll()[0][1] & select.POLLIN:
                    self._fill()

    def receive(self) -> bytes:
        """The next message. Raises: EOFError or OSError if the other end is closed; TimeoutError."""
        while len(self._read) < _LENGTH.size:
            self._fill()
        end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
        while len(self._read) < end:
            self._fill()
        payload = bytes(self._read[_LENGTH.size : end])
        del self._read[:end]
        return payload

    def ready(self) -> bool:
        """Whether there is something to receive, if only that the other end is closed."""
        if self._read:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _fill(self) -> None:
        try:
            piece, along, _, _ = self._socket.recvmsg(_PIECE, _ROOM, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            raise TimeoutError from None
        for _, _, data in along:
            self.descriptors.append(*_DESCRIPTOR.unpack(data))
        if not piece:
            raise EOFError
        self._read += piece

    def close(self) -> None:
        """Closes this end; the other one is told so."""
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())
