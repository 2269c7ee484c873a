"""Pipes and queues whose messages carry file descriptors: while a message is under way, the kernel holds them.

PyTorch's sender keeps a descriptor open until the receiver has fetched it: the sender has to live until then, and a
descriptor that is never fetched leaks. Here a descriptor travels in the socket with the message. The sender may drop
the tensor, or end, as soon as the message is written. When all processes have closed the receiving end of the socket,
the kernel closes the descriptors that were never read.
The queues are the standard library's, with its locks, feeder thread and counters.

Source: unix(7), SCM_RIGHTS.
"""

from __future__ import annotations

import errno
import io
import itertools
import multiprocessing.queues
import os
import pickle
import socket
import struct
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from ddp.errors import SharingError
from ddp.multiprocessing.pickling import PackedObject, SentFd, pack

# The header of a message: the number of its descriptors, and its length in bytes.
_HEADER = struct.Struct("!IQ")
# Maximum number of descriptors that one sendmsg may carry: the kernel's SCM_MAX_FD.
_MAX_FDS = 253
# Bytes of ancillary data that hold _MAX_FDS descriptors.
_ANCILLARY = socket.CMSG_LEN(4 * _MAX_FDS)
# If the kernel refuses to send descriptors, they are sent again after this time (s).
_RETRY_INTERVAL = 1e-3


class SharingConnection(Connection):
    """One end of a pipe, with the methods of the standard library's Connection; tensors in objects go by handle."""

    def __init__(self, handle: int, readable: bool = True, writable: bool = True) -> None:
        super().__init__(handle, readable, writable)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=handle)
        self._socket.settimeout(None)  # even if socket.setdefaulttimeout was called

    def send(self, obj: Any) -> None:
        """Sends an object, its tensors by handle. Blocks while the pipe is full."""
        self.send_packed(pack(obj))

    def recv(self) -> Any:
        """Receives the next object; waits for one.

        Raises: EOFError if no object is left and all processes have closed the other end; SharingError if this process
        has too many files open to take the descriptors; OSError if this end is closed or sends only, or the sender
        ended within a message.
        """
        return self.take().open()

    def send_packed(self, packed: PackedObject) -> None:
        """Sends an object that was packed by `pack`."""
        self.post(packed.data, [owner.fileno() for owner in packed.fd_owners])

    def post(self, data: Any, fds: list[int]) -> None:
        """Sends bytes together with descriptors. Raises: OSError if an end is closed, or if this end only receives."""
        self._check_closed()  # type: ignore[attr-defined]  # as the standard library's own send does
        self._check_writable()  # type: ignore[attr-defined]
        prefix = _HEADER.pack(len(fds), len(data))
        while len(fds) > _MAX_FDS:
            self._send_all([prefix], fds[:_MAX_FDS])
            fds = fds[_MAX_FDS:]
            prefix = b"+"  # descriptors need a byte to travel with
        self._send_all([prefix, data], fds)

    def _send_all(self, parts: list[Any], fds: list[int]) -> None:
        sent = 0
        while not sent:
            try:
                sent = socket.send_fds(self._socket, parts, fds)
            except OSError as error:
                # This user has as many descriptors under way as the kernel allows: wait until some have been received.
                if error.errno != errno.ETOOMANYREFS:
                    raise
                time.sleep(_RETRY_INTERVAL)
        if sent < sum(map(len, parts)):  # a signal interrupted the call
            self._socket.sendall(b"".join(parts)[sent:])

    def take(self) -> PackedObject:
        """Receives a packed message: the caller opens it after releasing its locks.

        Raises: as `recv`.
        """
        self._check_closed()  # type: ignore[attr-defined]
        self._check_readable()  # type: ignore[attr-defined]
        fds: list[int] = []
        try:
            count, length = _HEADER.unpack(self._receive(_HEADER.size, fds))
            for _ in range(_MAX_FDS, count, _MAX_FDS):
                self._receive(1, fds)
            data = bytearray(length)
            unread = memoryview(data)
            while unread:
                if not (received := self._socket.recv_into(unread)):
                    raise OSError("got end of file during message")
                unread = unread[received:]
            if len(fds) != count:
                raise SharingError(
                    f"a message came with {count} file descriptors, of which this process could take {len(fds)}: it "
                    "has too many open (ulimit -n); share_memory() puts a whole module behind one"
                )
            return PackedObject(data, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _receive(self, size: int, fds: list[int]) -> bytes:
        """Receives `size` bytes, and appends the descriptors that came with them to `fds`."""
        received = b""
        while len(received) < size:
            # Not `socket.recv_fds`, which ignores its flags.
            data, ancillary, _, _ = self._socket.recvmsg(size - len(received), _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
            for _, _, packed in ancillary:
                fds += memoryview(packed).cast("i")
            if not data:
                raise EOFError if not received and not fds else OSError("got end of file during message")
            received += data
        return received

    # The standard library's send_bytes, recv_bytes and close call these.

    def _send_bytes(self, buf: Any) -> None:
        self.post(buf, [])

    def _recv_bytes(self, maxsize: int | None = None) -> Any:
        packed = self.take()
        packed.close()
        return None if maxsize is not None and len(packed.data) > maxsize else io.BytesIO(packed.data)

    def _close(self) -> None:
        self._socket.close()


def make_pipe(duplex: bool = True) -> tuple[SharingConnection, SharingConnection]:
    """The two ends of a new pipe; with duplex off, the first receives and the second sends."""
    first, second = socket.socketpair()
    return SharingConnection(first.detach(), True, duplex), SharingConnection(second.detach(), duplex, True)


def _reduce(connection: SharingConnection) -> tuple[Any, ...]:
    return SharingConnection, (SentFd(connection), connection.readable, connection.writable)


reduction.register(SharingConnection, _reduce)


class _DeferredPickle:
    """Wraps an object for the feeder thread. Pickling the wrapper packs the object, and pickles only its number."""

    __slots__ = ("_obj", "_queue")

    def __init__(self, queue: Queue, obj: Any) -> None:
        self._queue = queue
        self._obj = obj

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (self._queue._number(pack(self._obj)),)


class Queue(multiprocessing.queues.Queue):  # type: ignore[type-arg]  # no subscript before Python 3.12
    """A queue for several processes, like the standard library's; tensors go by handle and are shared from then on.

    Made by `ddp.multiprocessing.Queue(maxsize=0)`. The standard library's code handles only the numbers of packed
    objects.
    """

    _reader: Any
    _writer: Any

    def __init__(self, maxsize: int = 0, *, ctx: Any) -> None:
        super().__init__(maxsize, ctx=ctx)
        _replace_pipe(self)
        self._reset()

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)  # type: ignore[misc]  # private: the stubs leave it out
        self._numbers = itertools.count()
        self._packed: dict[int, PackedObject] = {}
        self._send_bytes = lambda number: self._writer.send_packed(self._packed.pop(pickle.loads(number)))
        self._recv_bytes = lambda: pickle.dumps(self._number(self._reader.take()))

    def _number(self, packed: PackedObject) -> int:
        number = next(self._numbers)
        self._packed[number] = packed
        return number

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Puts an object in, waiting for a free slot if the queue is full. Another thread packs and sends the object.

        timeout: seconds to wait at most; block=False: does not wait. Raises: queue.Full if there is no slot in time;
        ValueError if the queue is closed.
        """
        super().put(_DeferredPickle(self, obj), block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes an object out, waiting for one if there is none.

        timeout: seconds to wait at most; block=False: does not wait. Raises: queue.Empty if there is none in time;
        ValueError if the queue is closed; SharingError as `SharingConnection.recv`.
        """
        return self._packed.pop(super().get(block, timeout)).open()


class JoinableQueue(Queue, multiprocessing.queues.JoinableQueue):  # type: ignore[type-arg]  # as for Queue
    """A Queue whose `join` waits until `task_done` was called for each object."""


class SimpleQueue(multiprocessing.queues.SimpleQueue):  # type: ignore[type-arg]  # as for Queue
    """A pipe with a lock at each end: `put` sends at once and blocks while the pipe is full."""

    _reader: Any
    _writer: Any
    _rlock: Any
    _wlock: Any

    def __init__(self, *, ctx: Any) -> None:
        super().__init__(ctx=ctx)
        _replace_pipe(self)
        self._poll = self._reader.poll

    def get(self) -> Any:
        """Takes an object out, waiting for one if there is none."""
        with self._rlock:
            packed = self._reader.take()
        return packed.open()

    def put(self, obj: Any) -> None:
        """Puts an object in."""
        packed = pack(obj)
        with self._wlock:
            self._writer.send_packed(packed)


def _replace_pipe(queue: Any) -> None:
    """Replaces a queue's pipe, which the standard library made, by a pipe of `make_pipe`."""
    queue._reader.close()
    queue._writer.close()
    queue._reader, queue._writer = make_pipe(duplex=False)
