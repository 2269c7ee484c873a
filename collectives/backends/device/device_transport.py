"""The protocol of what moves device arrays; the transport of a world of one, and that through host memory.

Where a host `Transport` has host arrays and tests, this has device arrays and one stream: a device transport puts the
collective on its `stream`, after what is there already, and returns once it has been put there. All arrays are
one-dimensional, contiguous, and stay alive until an event behind the collective has passed.

Over the host's transport an array is copied into pinned memory, transferred, and copied up again.
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

    name: as the log calls it; capturable: its collectives can be part of a graph; stream: where they are enqueued
    averages: MEAN of floats and complex numbers is done by the transport; else its caller divides a SUM
    timeout: s; until the event behind a collective has to pass, None where nothing on the stream waits for other ranks
    staged: host memory of the collective, which has to live as long as its other buffers
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
        """Whether the reductions below serve this dtype and op; else each rank combines a part by itself."""
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


class HostStagedTransport(DeviceTransport):
    """The device transport that goes through host memory, over any transport."""

    name = "host memory"
    capturable = False  # the host takes part in it

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

    def _move(self, transfer: Callable[..., Test], source: Any, target: Any, *how: Any) -> Steps[None]:
        """Copies `source` down, has the host transfer it, and copies what came up; either array may be None."""
        sent, received = self._pinned(source), self._pinned(target)
        self.staged = self.staged, sent, received  # the last one: what earlier transfers of this collective have
        if sent is not None:
            self._cuda.copy_down(sent, source, self.stream)
            yield functools.partial(self._cuda.passed, self._cuda.mark(self.stream))
        yield transfer(sent, received, *how)
        if received is not None:
            self._cuda.copy_up(target, received, self.stream)

    def _pinned(self, like: Any) -> Array | None:
        """Host memory for a device array, from CuPy's pool."""
        return None if like is None else self._cuda.pinned(like.nbytes).view(like.dtype)
