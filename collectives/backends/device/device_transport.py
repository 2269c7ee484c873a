"""What a way of moving device arrays must be able to do, whatever moves them; and the way of a world of one.

Where a host `Transport` speaks of host arrays and tests, this speaks of device arrays and one stream: a device
transport puts the collective on its `stream`, after what is there already, and returns once it has been put there. All
arrays are one-dimensional, contiguous, and stay alive until an event behind the collective has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from collectives.backends.device.cuda import Cuda
from collectives.reduction import ReduceOp
from collectives.transport import Steps, offsets


class Remainder(NamedTuple):
    """What of a reduction is left to do where it arrives: MEAN divides, a factor multiplies.

    buffers: arrays that must live as long as the collective does
    """

    op: ReduceOp
    factor: Any
    buffers: tuple[Any, ...] = ()


class DeviceTransport(Protocol):
    """One rank's end of a communicator for device arrays.

    name: what it is called in the log; capturable: its collectives can be part of a graph; stream: where they stand
    timeout: s; until the event behind a collective has to pass, None where nothing on the stream waits for other ranks
    """

    name: str
    capturable: bool
    stream: Any

    @property
    def timeout(self) -> float | None: ...

    def all_reduce(self, x: Any, out: Any, op: ReduceOp, factor: Any) -> Steps[Remainder]:
        """x, out: (n,) of the wire's dtype, the same array or apart. factor: a number, a 0-d device array or None."""

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, root: int, factor: Any) -> Steps[Remainder]:
        """x: (n,); out: (n,) on the root, the same array as x or apart, None elsewhere."""

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp, factor: Any) -> Steps[Remainder]:
        """x: (sum(counts),); out: (counts[rank],), apart from x."""

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        """x: (n,) uint8, read on the root, written elsewhere."""

    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        """x: (counts[rank],) uint8; out: (sum(counts),) uint8 on the root, None elsewhere."""

    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        """x: (counts[rank],) uint8; out: (sum(counts),) uint8."""

    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        """x: (sum(counts),) uint8 on the root, None elsewhere; out: (counts[rank],) uint8."""

    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        """table: bytes, [source][destination]; x: (sum of this rank's row,) uint8; out: (sum of its column,) uint8."""

    def close(self) -> None:
        """Frees what it holds; nothing is under way on this rank."""


class SingleDeviceTransport:
    """The device transport of a communicator of one rank: whatever is sent arrives, by a copy on the device."""

    name = "single"
    capturable = True
    timeout = None

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.stream = cuda.stream()

    def all_reduce(self, x: Any, out: Any, op: ReduceOp, factor: Any) -> Steps[Remainder]:
        yield from self._copy(x, out)
        return Remainder(op, factor)

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, root: int, factor: Any) -> Steps[Remainder]:
        return self.all_reduce(x, out, op, factor)

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp, factor: Any) -> Steps[Remainder]:
        return self.all_reduce(x, out, op, factor)

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        yield from ()

    def _copy(self, x: Any, out: Any, *_: object) -> Steps[None]:
        yield from ()
        if out is not x:
            with self._cuda.on(self.stream):
                self._cuda.xp.copyto(out, x)

    gather = all_gather = scatter = all_to_all = _copy

    def close(self) -> None:
        return


def parts_of(whole: Any, counts: Sequence[int]) -> dict[int, Any]:
    """Each rank's part of a joined array."""
    pairs = enumerate(zip(offsets(counts), counts, strict=True))
    return {rank: whole[start : start + count] for rank, (start, count) in pairs}
