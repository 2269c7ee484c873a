"""When the last rank arrived at each bucket: what a bucket that was launched earlier has waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ddp.parallel.timeline import Step
from ddp.tracing.parts import Part


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The last rank at one bucket. at: when it came, in nanoseconds of rank 0's clock; after: how much later than the
    rank before it"""

    rank: int
    at: int
    after: int


def arrivals(parts: Sequence[Part], model: int) -> dict[int, list[Arrival]]:
    """By the step's number: the last rank at each bucket. Steps that not all ranks have recorded are left out."""
    if any(model >= len(part.models) for part in parts) or len(parts) < parts[0].size or len(parts) == 1:
        return {}
    tables = [{step.number: step for step in part.models[model]} for part in parts]
    found = {}
    for number in tables[0]:
        steps = [table[number] for table in tables if number in table]
        if len(steps) == len(parts) and len({len(step.ready) for step in steps}) == 1:
            found[number] = _last([part.rank for part in parts], steps)
    return found


def _last(ranks: Sequence[int], steps: Sequence[Step]) -> list[Arrival]:
    found = []
    for times in zip(*(accumulate(step.ready, max) for step in steps), strict=True):
        (before, _), (at, rank) = sorted(zip(times, ranks, strict=True))[-2:]
        found.append(Arrival(rank=rank, at=at, after=at - before))
    return found
