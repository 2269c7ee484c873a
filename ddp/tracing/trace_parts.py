"""The parts that ranks have written, read back on one clock, rank 0's, and what is found in them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ddp.errors import ArgumentError
from ddp.parallel.step_trace import SUFFIX, BucketContents, Step

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


def common_steps(parts: Sequence[TracePart], model: int = 0) -> dict[int, list[Step]]:
    """By number: the steps of one model that all parts have, a step of each part."""
    tables = [{step.number: step for step in part.models[model]} for part in parts if model < len(part.models)]
    numbers = tables[0] if len(tables) == len(parts) else ()
    return {number: [table[number] for table in tables] for number in numbers if all(number in t for t in tables)}


def last_arrivals(steps: Sequence[Step], size: int) -> list[tuple[int, int]]:
    """For each bucket: when the last rank arrived, and which one. Empty unless the steps are those of all `size` ranks.

    A rank arrives at a bucket when its gradients, and those of all buckets before it, are complete.
    """
    if size == 1 or len(steps) < size or len({len(step.ready) for step in steps}) > 1:
        return []
    times = zip(*(accumulate(step.ready, max) for step in steps), strict=True)
    return [max((at, rank) for rank, at in enumerate(each)) for each in times]


def typical_step(parts: Sequence[TracePart]) -> int | None:
    """The number of the first model's step of median length; None unless all ranks have two steps in a row."""
    steps = common_steps(parts)
    whole = [number for number in sorted(steps) if number - 1 in steps]
    whole = whole[_WARMUP:] or whole
    whole.sort(key=lambda number: (steps[number][0].ended - steps[number - 1][0].ended, number))
    return whole[(len(whole) - 1) // 2] if whole else None


def phases(step: Step, before: int | None) -> Iterator[tuple[str, int, int]]:
    """What the computing thread did: (name, begin, end), one after the other. before: when the step before ended"""
    ends = [("backward", step.computed), ("wait for communication", step.ended)]
    start = step.begun
    if step.forward is not None and step.forward[1] <= step.begun:
        ends = [("forward", step.forward[1]), ("loss", step.begun), *ends]
        start = step.forward[0]
    # Times never go back: a forward may have begun in the step before, and clocks of other nodes are only followed.
    at = start if before is None else before
    for name, end in [("other: data, optimizer, logging", start), *ends]:
        if end > at:
            yield name, at, end
            at = end


def _read(path: Path) -> TracePart:
    try:
        part = json.loads(path.read_text(encoding="utf-8"))
        return TracePart(**{**part, "models": tuple(_steps(**model) for model in part["models"])})
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ArgumentError(f"{path} is no part of a trace that this version can read: {error}") from None


def _steps(offset: int, contents: Sequence[Any], steps: Sequence[dict[str, Any]]) -> tuple[Step, ...]:
    plans = [BucketContents(names=tuple(map(tuple, each["names"])), nbytes=tuple(each["nbytes"])) for each in contents]

    def on_rank_0(value: Any) -> Any:
        """A time, a list of times, or None."""
        if isinstance(value, list):
            return tuple(map(on_rank_0, value))
        return None if value is None else value - offset

    def decoded(number: int, contents: int, **times: Any) -> Step:
        return Step(number=number, contents=plans[contents], **{name: on_rank_0(at) for name, at in times.items()})

    return tuple(decoded(**step) for step in steps)
