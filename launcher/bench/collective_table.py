"""The collectives that are measured: the buffers of each, what its size means, and how its bandwidth is computed.

Source of sizes and bus factors: NVIDIA's nccl-tests, doc/PERFORMANCE.md; for gather and scatter its gather.cu and
scatter.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: The elements of a buffer: those of one rank, or those of all ranks.
Extent = Literal["part", "whole"]
#: Whether the result is out of place or in place.
ResultPlace = Literal["out", "in"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective.

    x, out: the extents of what it reads and writes; out None: it writes to x
    factor: number of ranks → bus bandwidth / algorithm bandwidth
    places: where the result can be: "out", in a buffer of its own; "in", in the buffer of x or a part of it
    reduces, rooted: whether it takes an op, and a root
    trips: how many messages one call sends, one after the other; the reported time is that of one message
    least_ranks: how many ranks it needs; empty: it has no buffers
    """

    name: str
    x: Extent = "part"
    out: Extent | None = "part"
    factor: Callable[[int], float] = lambda n: 1.0
    places: tuple[ResultPlace, ...] = ("out", "in")
    reduces: bool = False
    rooted: bool = False
    trips: int = 1
    least_ranks: int = 1
    empty: bool = False

    def size(self, count: int, ranks: int, itemsize: int) -> int:
        """Bytes of the larger buffer, for `count` elements a rank: what nccl-tests calls size."""
        return 0 if self.empty else count * itemsize * (ranks if "whole" in (self.x, self.out) else 1)

    def count(self, size: int, ranks: int, itemsize: int) -> int:
        """Elements per rank for about `size` bytes: at least 1; 0 if the collective has no buffers."""
        if self.empty:
            return 0
        return max(1, size // (itemsize * (ranks if "whole" in (self.x, self.out) else 1)))


def _others(n: int) -> float:
    return (n - 1) / n


def _twice_others(n: int) -> float:
    return 2 * (n - 1) / n


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective(name="all_reduce", factor=_twice_others, reduces=True),
        Collective(name="reduce", reduces=True, rooted=True),
        Collective(name="broadcast", out=None, places=("in",), rooted=True),
        Collective(name="gather", factor=_others, out="whole", rooted=True),
        Collective(name="scatter", factor=_others, x="whole", rooted=True),
        Collective(name="all_gather", factor=_others, out="whole"),
        Collective(name="reduce_scatter", factor=_others, x="whole", reduces=True),
        Collective(name="all_to_all", factor=_others, x="whole", out="whole", places=("out",)),
        Collective(name="send_recv", places=("out",), trips=2, least_ranks=2),
        Collective(name="barrier", places=("out",), empty=True),
    )
}

#: The root of collectives that have one.
ROOT = 0


def partner(rank: int, ranks: int) -> int | None:
    """The rank at the other end of send_recv: 0 and 1, 2 and 3, ...; None for the last rank of an odd number."""
    other = rank ^ 1
    return other if other < ranks else None


def carve(
    collective: Collective, place: ResultPlace, first: Any, second: Any, rank: int, ranks: int, count: int
) -> tuple[Any, Any]:
    """Returns x and out of one rank, as parts of the buffers `first` and `second` of `ranks * count` elements.

    Out of place, x is in the first and out in the second; in place both are in the first. A collective without buffers
    has None for both; one that writes to x has None for out.
    """
    if collective.empty:
        return None, None
    extents = {"part": count, "whole": ranks * count}
    x = first[: extents[collective.x]]
    if collective.out is None:
        return x, None
    if place == "out":
        return x, second[: extents[collective.out]]
    if collective.x == collective.out:
        return x, x
    whole = first[: ranks * count]
    part = whole[rank * count : (rank + 1) * count]
    return (x, part) if collective.x == "whole" else (part, whole)
