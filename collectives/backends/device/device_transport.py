"""Device transports: their interface, the transport of a world of one, and the transport through host memory.

A host `Transport` moves host arrays, and its methods return tests, which tell whether the operation is complete. A
device transport moves device arrays, and its methods return steps, which put a collective on the transport's one
`stream`, after the work that is there already. The steps end when the collective is on the stream. All arrays are
one-dimensional and contiguous. They stay alive until an event is complete that was recorded after the collective.

The transport through host memory copies an array into pinned memory, moves it by the host transport, and copies the
result back to the device.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from collectives.backends.device.cuda import Cuda
from collectives.reduction import Array, ReduceOp
from collectives.transport import Steps, Test, Transport


class DeviceTransport(ABC):
    """One rank's end of a communicator for device arrays.

    name: the transport's name in errors; stream: the CUDA stream on which collectives are enqueued
    capturable: whether collectives can be part of a CUDA graph
    averages: whether the transport computes MEAN of floats and complex numbers itself; if not, its caller divides a SUM
    timeout: seconds within which the event after a collective must be complete; None if the stream does not
    wait for other ranks
    staged: host memory that the last collective uses, which must live as long as the collective's other buffers
    """

    name: str
    capturable = True
    averages = False
    timeout: float | None = None
    staged: Any = None

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.stream = cuda.stream()

    def reduces(self, dtype: Any, op: ReduceOp) -> bool:
        """Whether the reductions below support this dtype and op; if not, the caller has each rank combine a part."""
        return True

    @abstractmethod
    def all_reduce(self, x: Any, out: Any, op: ReduceOp) -> Steps[None]:
        """x, out: (n,) of the wire dtype; the same array, or not overlapping."""

    @abstractmethod
    def reduce(self, x: Any, out: Any | None, op: ReduceOp, root: int) -> Steps[None]:
        """x: (n,); out: (n,) on the root, the same array as x or not overlapping, None elsewhere."""

    @abstractmethod
    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> Steps[None]:
        """x: (sum(counts),); out: (counts[rank],), not overlapping x."""

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
        """table[source][destination]: bytes; x: (sum of this rank's row,) uint8; out: (sum of its column,) uint8."""

    def close(self) -> None:
        """Frees the transport's resources. Nothing may be in progress on this rank."""
        return


class SingleDeviceTransport(DeviceTransport):
    """The device transport of a communicator of one rank: a collective is at most a copy on the device."""

    name = "single"

    def _copy(self, x: Any, out: Any, *_: Any, **more: Any) -> Steps[None]:
        yield from ()
        if out is not x:
            self._cuda.copy(out, x, self.stream)

    all_reduce = reduce = reduce_scatter = gather = all_gather = scatter = all_to_all = _copy

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        yield from ()


class HostStagedTransport(DeviceTransport):
    """The device transport that goes through host memory, over any host transport."""

    name = "host memory"
    capturable = False  # The host takes part in its collectives.

    def __init__(self, cuda: Cuda, host: Transport) -> None:
        super().__init__(cuda)
        self._host = host

    def all_reduce(self, x: Any, out: Any, op: ReduceOp) -> Steps[None]:
        return self._move(self._host.all_reduce, x, out, op)

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, root: int) -> Steps[None]:
        return self._move(self._host.reduce, x, out, op, root)

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> Steps[None]:
        return self._move(self._host.reduce_scatter, x, out, counts, op)

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        if self._host.rank == root:
            return self._move(lambda sent, _: self._host.broadcast(sent, root), x, None)
        return self._move(lambda _, received: self._host.broadcast(received, root), None, x)

    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        return self._move(self._host.gather, x, out, counts, root)

    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        return self._move(self._host.all_gather, x, out, counts)

    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        return self._move(self._host.scatter, x, out, counts, root)

    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        return self._move(self._host.all_to_all, x, out, table)

    def _move(self, transfer: Callable[..., Test], source: Any, target: Any, *arguments: Any) -> Steps[None]:
        """Copies `source` to the host, calls `transfer`, and copies the result to `target`. Each array may be None."""
        sent = self._pinned(source)
        received = self._pinned(target)
        self.staged = (self.staged, sent, received)  # Includes the arrays of the collective's earlier transfers.
        if sent is not None:
            self._cuda.copy_d2h(sent, source, self.stream)
            yield functools.partial(self._cuda.is_complete, self._cuda.record_event(self.stream))
        yield transfer(sent, received, *arguments)
        if received is not None:
            self._cuda.copy_h2d(target, received, self.stream)

    def _pinned(self, like: Any) -> Array | None:
        """Host memory for a device array, from CuPy's pool."""
        return None if like is None else self._cuda.pinned(like.nbytes).view(like.dtype)
