"""What a way of moving device arrays must be able to do, whatever moves them.

Where `Transport` speaks of host arrays and tests, this speaks of device arrays and one stream: a carrier
puts the collective on its `stream`, after what is there already, and returns once it has been put there. All arrays are
one-dimensional, contiguous, and stay alive until an event behind the collective has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from collectives.backends.transport import offsets
from collectives.engine.call import Steps
from collectives.reduction import ReduceOp


class Rest(NamedTuple):
    """What of a reduction is left to do where it arrives: MEAN divides, a factor multiplies.

    made: arrays that must live as long as the collective does
    """

    op: ReduceOp
    factor: Any
    made: tuple[Any, ...] = ()


class Carrier(Protocol):
    """One rank's end of a communicator for device arrays.

    name: what it is called in the log; capturable: its collectives can be part of a graph; stream: where they stand
    """

    name: str
    capturable: bool
    stream: Any

    def all_reduce(self, x: Any, out: Any, op: ReduceOp, factor: Any) -> Steps[Rest]:
        """x, out: (n,) of the wire's dtype, the same array or apart. factor: a number, a 0-d device array or None."""

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, factor: Any, root: int) -> Steps[Rest]:
        """x: (n,); out: (n,) on the root, the same array as x or apart, None elsewhere."""

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp, factor: Any) -> Steps[Rest]:
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

    def watch(self, event: Any, call: object) -> None:
        """`call` is over when this event has passed; not called for what is captured into a graph."""

    def check(self) -> None:
        """Raises: what has gone wrong on the device since the last call, if anything."""

    def close(self) -> None:
        """Frees what it holds; nothing is under way on this rank."""


def parts_of(whole: Any, counts: Sequence[int]) -> dict[int, Any]:
    """Each rank's part of a joined array."""
    pairs = enumerate(zip(offsets(counts), counts, strict=True))
    return {rank: whole[start : start + count] for rank, (start, count) in pairs}
