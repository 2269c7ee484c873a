"""One step that stands for all: of those that every rank has recorded, the one of median length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp.parallel.timeline import Step
from ddp.tracing.arrivals import Arrival, arrivals
from ddp.tracing.parts import Part

_WARMUP = 3  # steps that are not like the others: memory is new, and buckets are planned anew


@dataclass(frozen=True, kw_only=True)
class TypicalStep:
    """One step of all ranks. number: the step; of: how many were recorded

    ranks: the ranks, in order; befores, steps: the step before and the step itself, of each
    last: the last rank at each bucket, empty if that is not known
    """

    number: int
    of: int
    ranks: tuple[int, ...]
    befores: tuple[Step, ...]
    steps: tuple[Step, ...]
    last: tuple[Arrival, ...]

    @property
    def length(self) -> int:
        """Nanoseconds from the end of the step before to the end of this one, on the first rank."""
        return self.steps[0].ended - self.befores[0].ended


def typical_step(parts: Sequence[Part], model: int = 0) -> TypicalStep | None:
    """The step of median length; None if no rank has two steps in a row that all have recorded."""
    parts = [part for part in parts if model < len(part.models) and part.models[model]]
    if not parts:
        return None
    tables = [{step.number: step for step in part.models[model]} for part in parts]
    numbers = sorted(set.intersection(*(set(table) for table in tables)))
    whole = [number for number in numbers if all(number - 1 in table for table in tables)]
    whole = whole[_WARMUP:] or whole
    if not whole:
        return None
    whole.sort(key=lambda number: (tables[0][number].ended - tables[0][number - 1].ended, number))
    number = whole[(len(whole) - 1) // 2]
    return TypicalStep(
        number=number,
        of=len(numbers),
        ranks=tuple(part.rank for part in parts),
        befores=tuple(table[number - 1] for table in tables),
        steps=tuple(table[number] for table in tables),
        last=tuple(arrivals(parts, model).get(number, ())),
    )
