"""Pipes that carry file descriptors along with a message, so that what is under way belongs to the kernel alone.

PyTorch's sender keeps a descriptor open until the receiver has fetched it, so it has to outlive what it sends, and
leaks what nobody fetches. Here a descriptor lies in the socket beside the message: the sender may forget the tensor, or
end, as soon as the message is written, and whatever is never read goes with the last end of the socket.

Source: unix(7), SCM_RIGHTS.
"""

from __future__ import annotations

import array
import errno
import io
import os
import socket
import struct
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from ddp.errors import SharingError
from ddp.multiprocessing._parcels import Parcel, carry, pack, taken

_HEADER = struct.Struct("!IQ")  # descriptors, bytes
_MOST = 253  # descriptors a sendmsg; the kernel's SCM_MAX_FD
_ROOM = socket.CMSG_SPACE(_MOST * 4)
_TOGETHER = 1 << 14  # bytes that are better copied than sent by a call of their own
_PAUSE = 1e-3  # seconds, between two looks whether the kernel takes more descriptors


class Channel(Connection):
    """One end of a pipe, with the methods of the standard library's Connection; tensors in objects go by handle."""

    def __init__(self, handle: int, readable: bool = True, writable: bool = True) -> None:
        super().__init__(handle, readable, writable)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=handle)
        self._socket.settimeout(None)  # whatever socket.setdefaulttimeout says

    def send(self, obj: Any) -> None:
        """Sends an object, its tensors by handle. Blocks while the pipe is full."""
        self.ship(pack(obj))

    def recv(self) -> Any:
        """The next object. Blocks until there is one. Raises: EOFError if nothing is left and no other end open."""
        return self.fetch().open()

    def ship(self, parcel: Parcel) -> None:
        """Sends what `pack` has made."""
        self._check_closed()  # type: ignore[attr-defined]  # as the standard library's own send does
        self._check_writable()  # type: ignore[attr-defined]
        self._post(parcel.data, [each.fileno() for each in parcel.carried])

    def fetch(self) -> Parcel:
        """The next object, still packed: to be opened once locks have been released. Raises: EOFError."""
        self._check_closed()  # type: ignore[attr-defined]
        self._check_readable()  # type: ignore[attr-defined]
        return self._take()

    def _post(self, data: Any, fds: list[int]) -> None:
        header = _HEADER.pack(len(fds), len(data))
        if len(data) <= _TOGETHER and len(fds) <= _MOST:
            self._send_all(header + data, fds)
            return
        self._send_all(header, fds[:_MOST])
        for start in range(_MOST, len(fds), _MOST):
            self._send_all(b"+", fds[start : start + _MOST])  # descriptors need a byte to travel with
        self._socket.sendall(data)

    def _send_all(self, data: bytes, fds: list[int]) -> None:
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                sent = self._socket.sendmsg([data], beside)
                break
            except OSError as error:
                # As many as this user may have open are under way: go on when some have been received.
                if error.errno != errno.ETOOMANYREFS:
                    raise
                time.sleep(_PAUSE)
        self._socket.sendall(data[sent:])

    def _take(self) -> Parcel:
        fds: list[int] = []
        try:
            header = self._receive(_HEADER.size, fds)
            count, length = _HEADER.unpack(header)
            for _ in range(_MOST, count, _MOST):
                self._receive(1, fds)
            data = bytearray(length)
            self._fill(memoryview(data))
            if len(fds) != count:
                raise SharingError(
                    f"a message came with {count} file descriptors, of which this process could take {len(fds)}: it "
                    "has too many open (ulimit -n); share_memory() puts a whole module behind one"
                )
            return Parcel(data, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _receive(self, size: int, fds: list[int]) -> bytes:
        """That many bytes, and the descriptors beside them."""
        got = b""
        while len(got) < size:
            data, beside, _, _ = self._socket.recvmsg(size - len(got), _ROOM, socket.MSG_CMSG_CLOEXEC)
            for level, kind, packed in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.extend(array.array("i", packed[: len(packed) // 4 * 4]))
            if not data:
                raise EOFError if not got and not fds else OSError("got end of file during message")
            got += data
        return got

    def _fill(self, memory: memoryview) -> None:
        while memory:
            n = self._socket.recv_into(memory)
            if n == 0:
                raise OSError("got end of file during message")
            memory = memory[n:]

    # What the standard library's methods for bytes stand on:

    def _send_bytes(self, buf: Any) -> None:
        self._post(buf, [])

    def _recv_bytes(self, maxsize: int | None = None) -> Any:
        parcel = self._take()
        parcel.drop()
        return None if maxsize is not None and len(parcel.data) > maxsize else io.BytesIO(parcel.data)

    def _close(self) -> None:
        self._socket.close()


def make_pipe(duplex: bool = True) -> tuple[Channel, Channel]:
    """The two ends of a new pipe; with duplex off, the first receives and the second sends."""
    one, other = socket.socketpair()
    return Channel(one.detach(), True, duplex), Channel(other.detach(), duplex, True)


def _channel(fd: Any, readable: bool, writable: bool) -> Channel:
    return Channel(fd.detach(), readable, writable)


def _reduce(channel: Channel) -> tuple[Any, ...]:
    return _channel, (reduction.DupFd(channel.fileno()), channel.readable, channel.writable)


def _carried(index: int, readable: bool, writable: bool) -> Channel:
    return Channel(taken(index), readable, writable)


reduction.register(Channel, _reduce)
carry(Channel, lambda channel: (_carried, (channel.readable, channel.writable)))
