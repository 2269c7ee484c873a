"""The protocol of what moves device arrays; the transport of a world of one, and that through host memory.

Where a host `Transport` has host arrays and tests, this has device arrays and one stream: a device transport puts the
collective on its `stream`, after what is there already, and returns once it has been put there. All arrays are
one-dimensional, contiguous, and stay alive until an event behind the collective has passed.

Over the host's transport an array goes through pinned memory, in chunks, so that copies and transfers overlap:

    chunk            0      1      2      3
    copied down      ====   ====   ====   ====
    transferred             ====   ====   ====   ====
    copied up                      ====   ====   ====   ====

Three staging buffers of pinned memory take turns. Each is filled on one stream, handed to the transport when the host
has seen that copy done, emptied on a second stream, and filled again when the host has seen that done. What the
transport computes is what it computes for host arrays, chunk by chunk. Collectives whose result is not the same piece
of the array on every rank go as one chunk.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from collectives.backends.device.cuda import Cuda
from collectives.reduction import Array, ReduceOp
from collectives.transport import Steps, Test, Transport, chunks


class DeviceTransport(ABC):
    """One rank's end of a communicator for device arrays.

    name: as the log calls it; capturable: its collectives can be part of a graph; stream: where they are enqueued
    averages: MEAN of floats and complex numbers is done by the transport; else its caller divides a SUM
    timeout: s; until the event behind a collective has to pass, None where nothing on the stream waits for other ranks
    """

    name: str
    capturable = True
    averages = False
    timeout: float | None = None

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.stream = cuda.stream()

    def reduces(self, dtype: Any, op: ReduceOp) -> bool:
        """Whether the reductions below serve this dtype and op; else the caller gathers, and reduces by itself."""
        return True

    @abstractmethod
    def all_reduce(self, x: Any, out: Any, op: ReduceOp) -> Steps[None]:
        """x, out: (n,) of the wire's dtype, the same array or apart."""

    @abstractmethod
    def reduce(self, x: Any, out: Any | None, op: ReduceOp, root: int) -> Steps[None]:
        """x: (n,); out: (n,) on the root, the same array as x or apart, None elsewhere."""

    @abstractmethod
    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> Steps[None]:
        """x: (sum(counts),); out: (counts[rank],), apart from x."""

    @abstractmethod
    def broadcast(self, x: Any, root: int) -> Steps[None]:
        """x: (n,) uint8, read on the root, written elsewhere."""

    @abstractmethod
    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        """x: (counts[rank],) uint8; out: (sum(counts),) uint8 on the root, None elsewhere."""

    @abstractmethod
    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        """x: (counts[rank],) uint8; out: (sum(counts),) uint8."""

    @abstractmethod
    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        """x: (sum(counts),) uint8 on the root, None elsewhere; out: (counts[rank],) uint8."""

    @abstractmethod
    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        """table: bytes, [source][destination]; x: (sum of this rank's row,) uint8; out: (sum of its column,) uint8."""

    def close(self) -> None:
        """Frees what it holds; nothing is under way on this rank."""
        return


class SingleDeviceTransport(DeviceTransport):
    """The device transport of a communicator of one rank: every collective is a copy on the device."""

    name = "single"

    def _copy(self, x: Any, out: Any, *_: Any, **more: Any) -> Steps[None]:
        yield from ()
        if out is not x:
            self._cuda.copy(out, x, self.stream)

    all_reduce = reduce = reduce_scatter = gather = all_gather = scatter = all_to_all = _copy

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        yield from ()


CHUNK = 4 << 20  # bytes; a copy of this size takes long enough to hide its launch, and short enough to overlap
_BUFFERS = 3

#: Starts the transfer of a chunk: what this rank sends, and where it receives; None where it does not.
Transfer = Callable[[Any, Any], Test]


class StagingBuffer:
    """Pinned memory of one chunk: what is sent, what is received, and the events behind their copies."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._memory = {"sent": cuda.pinned(0), "received": cuda.pinned(0)}
        self.down: Any = None  # the event behind the copy into it
        self.up: Any = None  # the event behind the copy out of it

    def array(self, which: str, like: Any) -> Array | None:
        """Host memory for a device array; None for None. which: "sent" or "received"."""
        if like is None:
            return None
        if self._memory[which].nbytes < like.nbytes:
            self._memory[which] = self._cuda.pinned(like.nbytes)
        return self._memory[which][: like.nbytes].view(like.dtype)


class HostStagedTransport(DeviceTransport):
    """The device transport that goes through host memory, over any transport."""

    name = "host memory"
    capturable = False  # the host takes part in it

    def __init__(self, cuda: Cuda, host: Transport) -> None:
        super().__init__(cuda)
        self._host = host
        self._down = cuda.stream()
        self._up = cuda.stream()
        self._buffers = [StagingBuffer(cuda) for _ in range(_BUFFERS)]

    def all_reduce(self, x: Any, out: Any, op: ReduceOp) -> Steps[None]:
        return self._pipeline(lambda sent, received: self._host.all_reduce(sent, received, op), *_chunks(x, out))

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, root: int) -> Steps[None]:
        return self._pipeline(lambda sent, received: self._host.reduce(sent, received, op, root), *_chunks(x, out))

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> Steps[None]:
        return self._pipeline(lambda sent, received: self._host.reduce_scatter(sent, received, counts, op), [x], [out])

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        source, target = (x, None) if self._host.rank == root else (None, x)
        return self._pipeline(
            lambda sent, received: self._host.broadcast(sent if received is None else received, root),
            *_chunks(source, target),
        )

    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        return self._pipeline(lambda sent, received: self._host.gather(sent, received, counts, root), [x], [out])

    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        return self._pipeline(lambda sent, received: self._host.all_gather(sent, received, counts), [x], [out])

    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        return self._pipeline(lambda sent, received: self._host.scatter(sent, received, counts, root), [x], [out])

    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        return self._pipeline(lambda sent, received: self._host.all_to_all(sent, received, table), [x], [out])

    def _pipeline(self, transfer: Transfer, sources: Sequence[Any], targets: Sequence[Any]) -> Steps[None]:
        """Copies every chunk down, transfers it, and copies it up. sources, targets: device arrays, None for none."""
        begun = self._cuda.mark(self.stream)
        self._down.wait_event(begun)
        self._up.wait_event(begun)
        for k in range(len(sources) + 1):
            if k < len(sources):
                buffer = self._buffers[k % _BUFFERS]
                if buffer.up is not None:
                    yield functools.partial(self._cuda.passed, buffer.up)
                sent = buffer.array("sent", sources[k])
                if sent is not None:
                    self._cuda.copy_down(sent, sources[k], self._down)
                    buffer.down = self._cuda.mark(self._down)
            if k > 0:
                buffer, source, target = self._buffers[(k - 1) % _BUFFERS], sources[k - 1], targets[k - 1]
                if source is not None:
                    yield functools.partial(self._cuda.passed, buffer.down)
                received = buffer.array("received", target)
                yield transfer(buffer.array("sent", source), received)
                if received is not None:
                    self._cuda.copy_up(target, received, self._up)
                    buffer.up = self._cuda.mark(self._up)
        self.stream.wait_event(self._cuda.mark(self._up))


def _chunks(source: Any, target: Any) -> tuple[list[Any], list[Any]]:
    """The chunks of arrays of one length, either of which may be None."""
    like = target if source is None else source
    spans = chunks(like.size, max(CHUNK // like.itemsize, 1))
    return [[None if array is None else array[a:b] for a, b in spans] for array in (source, target)]  # type: ignore
