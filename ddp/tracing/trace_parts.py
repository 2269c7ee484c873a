"""The parts that ranks have written, read back on one clock, rank 0's; and merged into one trace and one picture."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ddp._files import atomic_write
from ddp.errors import ArgumentError
from ddp.parallel.step_trace import FORMAT, SUFFIX, BucketContents, Step

_WARMUP = 3  # steps that are not like the others: memory is new, and buckets are planned anew


@dataclass(frozen=True, kw_only=True)
class TracePart:
    """What one rank recorded. models: the steps of each model, times in nanoseconds of rank 0's clock.

    host: the rank's machine; size: how many ranks there were; started, written: seconds since 1970
    """

    rank: int
    size: int
    host: str
    started: float
    written: float
    models: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The last rank to complete one bucket. at: when, in nanoseconds of rank 0's clock; after: how much later than the
    rank before it"""

    rank: int
    at: int
    after: int


@dataclass(frozen=True, kw_only=True)
class TypicalStep:
    """One step of all ranks, of median length. number: the step; of: how many were recorded

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


def read_parts(folder: str | os.PathLike[str]) -> list[TracePart]:
    """The parts of the newest job in the folder: those whose ranks ran at the same time.

    Raises: ArgumentError if there is none, or one is not what a rank writes.
    """
    parts = [_read(path) for path in sorted(Path(folder).glob(f"rank-*{SUFFIX}"))]
    if not parts:
        raise ArgumentError(f"there is no trace in {folder}: no rank has written a part (rank-0{SUFFIX}, ...)")
    last = max(parts, key=lambda part: part.written)
    newest = [part for part in parts if part.size == last.size and part.written >= last.started]
    return sorted(newest, key=lambda part: part.rank)


def complete(folder: str | os.PathLike[str]) -> bool:
    """True if every rank of the newest job has written its part."""
    try:
        parts = read_parts(folder)
    except ArgumentError:
        return False
    return len(parts) == parts[0].size


def arrivals(parts: Sequence[TracePart], model: int) -> dict[int, list[Arrival]]:
    """By the step's number: the last rank at each bucket. Steps that not all ranks have recorded are left out."""
    if any(model >= len(part.models) for part in parts) or len(parts) < parts[0].size or len(parts) == 1:
        return {}
    tables = [{step.number: step for step in part.models[model]} for part in parts]
    found: dict[int, list[Arrival]] = {}
    for number in tables[0]:
        steps = [table[number] for table in tables if number in table]
        if len(steps) < len(parts) or len({len(step.ready) for step in steps}) > 1:
            continue
        found[number] = []
        # A rank arrives at a bucket when its gradients, and those of all buckets before it, are complete.
        for times in zip(*(accumulate(step.ready, max) for step in steps), strict=True):
            (before, _), (at, rank) = sorted(zip(times, [part.rank for part in parts], strict=True))[-2:]
            found[number].append(Arrival(rank=rank, at=at, after=at - before))
    return found


def typical_step(parts: Sequence[TracePart], model: int = 0) -> TypicalStep | None:
    """The step of median length; None if there are no two steps in a row that all ranks have recorded."""
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


def write_json(path: Path, document: Any) -> None:
    """Writes a file, whole or not at all. Raises: OSError."""
    with atomic_write(path) as file:
        file.write(json.dumps(document, separators=(",", ":")).encode())


def _read(path: Path) -> TracePart:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}")
        return TracePart(
            rank=int(found["rank"]),
            size=int(found["size"]),
            host=str(found["host"]),
            started=float(found["started"]),
            written=float(found["written"]),
            models=tuple(_steps(model) for model in found["models"]),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ArgumentError(f"{path} is no part of a trace that this version can read: {error}") from None


def _steps(model: dict[str, Any]) -> tuple[Step, ...]:
    offset = model["offset"]
    contents = [
        BucketContents(names=tuple(map(tuple, each["names"])), nbytes=tuple(each["nbytes"]))
        for each in model["contents"]
    ]

    def on_rank_0(value: Any) -> Any:
        """A time, a list of times, or None."""
        if value is None:
            return None
        return value - offset if isinstance(value, int) else tuple(map(on_rank_0, value))

    steps = []
    for step in model["steps"]:
        times = {name: on_rank_0(value) for name, value in step.items() if name not in ("number", "contents")}
        steps.append(Step(number=step["number"], contents=contents[step["contents"]], **times))
    return tuple(steps)
