"""Bucket plans: many small all-reduces cost latency; one large one cannot start before backward has ended.

`plan_buckets` cuts gradients by size: the first bucket is small, so that communication starts early, the others are as
large as the cap allows. `end_of` says when such a plan ends, given when gradients are ready and what an all-reduce
costs, and `choose_cap` takes the cap whose plan ends first. All are functions of their arguments alone.

Source: Li et al. 2020, arXiv:2006.15704, §3.2.3 and §4.2; the cost of an all-reduce as in Shi et al. 2019, MG-WFBP,
arXiv:1811.11141.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp.errors import ParallelError

_MIB = 1 << 20
# Plans whose ends differ by less are equally good: ready times and costs are measured, and steps vary by more.
_TOLERANCE = 0.005
# A bucket is large enough if its latency is no more than this part of its time. On a real wire many small transfers
# follow each other more evenly than a few large ones do (benchmarks/overlap.py).
_LATENCY = 0.02
_CAPS = [1 << power for power in range(16, 31)]  # bytes; those that are tried


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one all-reduce of n bytes takes: alpha + beta * n. alpha: seconds; beta: seconds per byte."""

    alpha: float
    beta: float


def end_of(
    plan: Sequence[Sequence[int]],
    nbytes: Sequence[int],
    ready: Sequence[float],
    link: Link,
    backward: float,
) -> float:
    """When a plan should end, seconds after backward began. Buckets go in the plan's order, one at a time on the wire.

    plan: the gradients of each bucket, in launch order; nbytes, ready: bytes of each gradient, and seconds after
    backward began when it is complete
    backward: seconds that the computation takes alone
    """
    last = free = 0.0
    for members in plan:
        last = max(last, *(ready[index] for index in members))
        free = max(last, free) + link.alpha + link.beta * sum(nbytes[index] for index in members)
    return max(backward, free)


def choose_cap(
    cut: Callable[[int], Sequence[Sequence[int]]],
    nbytes: Sequence[int],
    ready: Sequence[float],
    link: Link,
    backward: float,
) -> int:
    """The cap, a power of two of bytes, whose plan `cut(cap)` should end first. Arguments: as in `end_of`.

    Of caps that are equally good: the largest whose latency still matters (`_LATENCY`), or the one next above.
    """
    ends = {cap: end_of(cut(cap), nbytes, ready, link, backward) for cap in _CAPS}
    limit = min(ends.values()) * (1 + _TOLERANCE)
    good = [cap for cap, end in ends.items() if end <= limit]
    enough = link.alpha / (_LATENCY * link.beta) if link.beta > 0 else float("inf")
    return next((cap for cap in good if cap >= enough), good[-1])


def plan_buckets(
    nbytes: Sequence[int],
    cap: int,
    first: int | None = None,
    kinds: Sequence[Hashable] | None = None,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Splits gradients into buckets, in the order in which the buckets are to be launched.

    nbytes: each gradient's size, in the order of the forward pass: backward makes the last one first
    cap: bytes that a bucket holds at most; one gradient that is larger gets a bucket alone
    first: the cap of the first bucket; None: the same
    kinds: gradients of different kinds (dtypes) never share a bucket; None: all are alike
    order: the gradients in the order in which they come; None: the last first
    Returns: the gradients' indices, every one once; `plan_buckets([4, 4, 8], cap=8) == [[2], [1, 0]]`
    """
    plan: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    order = list(reversed(range(len(nbytes)))) if order is None else order
    turn = {index: turn for turn, index in enumerate(order)}
    for index in order:
        kind = None if kinds is None else kinds[index]
        limit = first if first is not None and not plan else cap
        if kind in open_ and filled[kind] + nbytes[index] > limit:
            plan.append(open_.pop(kind))
        if kind not in open_:
            open_[kind], filled[kind] = [], 0
        open_[kind].append(index)
        filled[kind] += nbytes[index]
    # What is still open is complete when its last gradient is.
    return plan + sorted(open_.values(), key=lambda bucket: turn[bucket[-1]])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which gradients DataParallel reduces together, and in which order.

    buckets: the parameters' names, bucket by bucket in launch order; nbytes: of each bucket
    origin: where it comes from, in words
    """

    buckets: tuple[tuple[str, ...], ...]
    nbytes: tuple[int, ...]
    origin: str

    def state(self) -> dict[str, Any]:
        """The plan as a JSON value, for a checkpoint: `DataParallel(net, plan=state)` pins it."""
        return {"buckets": [list(bucket) for bucket in self.buckets], "nbytes": list(self.nbytes), "from": self.origin}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Plan:
        """A plan from what `state` returned. Raises: ParallelError if it is nothing of the kind."""
        try:
            buckets = tuple(tuple(map(str, bucket)) for bucket in state["buckets"])
            nbytes, origin = tuple(map(int, state["nbytes"])), str(state["from"])
        except (KeyError, TypeError, ValueError):
            raise ParallelError("plan: expected what `model.plan` or `model.plan.state()` gave") from None
        if len(nbytes) != len(buckets) or not all(buckets):
            raise ParallelError(f"plan: {len(buckets)} buckets with {len(nbytes)} sizes, or one that is empty")
        return cls(buckets=buckets, nbytes=nbytes, origin=origin)

    def __str__(self) -> str:
        """A table, one line a bucket."""
        count, total = len(self.buckets), sum(self.nbytes) / _MIB
        lines = [f"{count} bucket{'' if count == 1 else 's'}, {total:.2f} MiB, {self.origin}"]
        lines.append(f"{'bucket':>6} {'MiB':>8} {'gradients':>9}  first ... last")
        for number, (names, nbytes) in enumerate(zip(self.buckets, self.nbytes, strict=True)):
            ends = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            lines.append(f"{number:>6} {nbytes / _MIB:>8.2f} {len(names):>9}  {ends}")
        return "\n".join(lines)
