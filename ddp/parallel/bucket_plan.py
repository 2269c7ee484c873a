"""Bucket plans: which gradients are reduced together, and in which order.

Many small all-reduces cost latency, but a single large one could not start before backward has ended. `plan_buckets`
splits gradients by size. The first bucket is small, so that communication starts early; the others are as large as the
cap allows. `end_of` predicts when a plan ends, from the times when gradients are ready and the cost of an all-reduce.
`choose_cap` returns the cap whose plan ends first. All three are pure functions.

Source: Li et al. 2020, arXiv:2006.15704, §3.2.3 and §4.2; the cost of an all-reduce as in Shi et al. 2019, MG-WFBP,
arXiv:1811.11141.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.errors import align_columns
from ddp.errors import ParallelError

_MIB = 1 << 20
# Plans whose predicted ends differ by less than this fraction count as equally good: the times of steps vary by more.
_TOLERANCE = 0.005
# A bucket is large enough if latency is at most this fraction of the time to send its bytes. Larger buckets are not
# better: on a real network many small transfers follow each other more evenly than a few large ones
# (benchmarks/overlap.py).
_LATENCY = 0.02
# The caps that are tried, in bytes.
_CAPS = [1 << power for power in range(16, 31)]


@dataclass(frozen=True, kw_only=True)
class Link:
    """The time of an all-reduce of n bytes: alpha + beta * n. alpha: seconds; beta: seconds per byte."""

    alpha: float
    beta: float


def end_of(
    plan: Sequence[Sequence[int]],
    nbytes: Sequence[int],
    ready: Sequence[float],
    link: Link,
    backward: float,
) -> float:
    """Predicts when a plan ends (seconds after backward began). Buckets are reduced one at a time, in the plan's order.

    plan: the gradients of each bucket, in launch order
    nbytes, ready: the size of each gradient, and when it is complete (seconds after backward began)
    backward: seconds of the computation alone
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
    """The cap (bytes, a power of two) whose plan `cut(cap)` is predicted to end first. Arguments: as in `end_of`.

    Among equally good caps, it takes the smallest for which latency does not matter (`_LATENCY`). If there is none, it
    takes the largest.
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
    cap: maximum bytes of a bucket; a gradient that is larger gets a bucket of its own
    first: the cap of the first bucket; None: `cap`
    kinds: gradients of different kinds (dtypes) never share a bucket; None: all are of one kind
    order: the gradients to put into buckets, in the order in which they are complete; None: all, the last first
    Returns: for each bucket, the indices of its gradients; `plan_buckets([4, 4, 8], cap=8) == [[2], [1, 0]]`
    """
    plan: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    order = list(reversed(range(len(nbytes)))) if order is None else order
    positions = {index: position for position, index in enumerate(order)}
    for index in order:
        kind = None if kinds is None else kinds[index]
        limit = first if first is not None and not plan else cap
        if kind in open_ and filled[kind] + nbytes[index] > limit:
            plan.append(open_.pop(kind))
        if kind not in open_:
            open_[kind] = []
            filled[kind] = 0
        open_[kind].append(index)
        filled[kind] += nbytes[index]
    # Open buckets are launched in the order in which their last gradients are complete.
    return plan + sorted(open_.values(), key=lambda bucket: positions[bucket[-1]])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which gradients DataParallel reduces together, and in which order.

    buckets: the parameters' names, bucket by bucket in launch order; nbytes: of each bucket
    origin: how the plan was made, in words
    """

    buckets: tuple[tuple[str, ...], ...]
    nbytes: tuple[int, ...]
    origin: str

    def state(self) -> dict[str, Any]:
        """The plan as a JSON value, for a checkpoint: `DataParallel(net, plan=state)` keeps to this plan."""
        return {"buckets": [list(bucket) for bucket in self.buckets], "nbytes": list(self.nbytes), "from": self.origin}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Plan:
        """Makes a plan from what `state` returned. Raises: ParallelError for another value."""
        try:
            buckets = tuple(tuple(map(str, bucket)) for bucket in state["buckets"])
            nbytes = tuple(map(int, state["nbytes"]))
            origin = str(state["from"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ParallelError("plan: expected what `model.plan` or `model.plan.state()` gave") from None
        if len(nbytes) != len(buckets) or not all(buckets):
            raise ParallelError(f"plan: {len(buckets)} buckets with {len(nbytes)} sizes, or one that is empty")
        return cls(buckets=buckets, nbytes=nbytes, origin=origin)

    def __str__(self) -> str:
        """A table with a row for each bucket."""
        count = len(self.buckets)
        total = sum(self.nbytes) / _MIB
        title = f"{count} bucket{'' if count == 1 else 's'}, {total:.2f} MiB, {self.origin}"
        rows = [("bucket", "MiB", "gradients", "first ... last")]
        for number, (names, nbytes) in enumerate(zip(self.buckets, self.nbytes, strict=True)):
            ends = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            rows.append((str(number), f"{nbytes / _MIB:.2f}", str(len(names)), ends))
        return "\n".join([title, *align_columns(rows, right=range(3))])
