"""Merges the records that the ranks have written into one trace: Chrome trace events, on the clock of rank 0.

Source: "Trace Event Format", the Chromium project; Perfetto reads it too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ddp.errors import ArgumentError
from ddp.parallel.step_trace import SUFFIX, Step

Event = dict[str, Any]
# Rows of the first model in the trace. Bucket k has row _BUCKETS + k.
_COMPUTE = 1
_CONTROL = 2
_BUCKETS = 10
# The distance between the rows of two models.
_ROWS = 10_000
# Waits for a late rank that are shorter than this (ns) are not drawn.
_NOTICED = 20_000
# How many steps at the beginning are not typical: memory is allocated, and buckets are planned.
_WARMUP = 3
# Microseconds in a nanosecond.
_US = 1e-3


@dataclass(frozen=True, kw_only=True)
class TracePart:
    """The record of one rank. size: number of ranks

    job: a number that all ranks of a job share. Times would not identify a job: the clocks of hosts differ, and may be
        set back
    models: for each model, its steps by number
    """

    rank: int
    size: int
    host: str
    job: int
    models: list[dict[int, Step]]


def read_parts(folder: str | os.PathLike[str]) -> list[TracePart]:
    """Reads the parts in a folder, in rank order.

    Raises: ArgumentError if there is none, they belong to several jobs, or one is not a part of a trace; OSError if one
    cannot be read.
    """
    parts = [_read(path) for path in sorted(Path(folder).glob(f"rank-*{SUFFIX}"))]
    if not parts:
        raise ArgumentError(f"there is no trace in {folder}: no rank has written a part (rank-0{SUFFIX}, ...)")
    if len({part.job for part in parts}) > 1:
        jobs = ", ".join(f"rank {part.rank} of job {part.job:x}" for part in parts)
        raise ArgumentError(f"the parts in {folder} are of several jobs ({jobs}): keep those of one")
    return sorted(parts, key=lambda part: part.rank)


def _read(path: Path) -> TracePart:
    try:
        part = json.loads(path.read_text(encoding="utf-8"))
        part["models"] = [{step["number"]: Step(**step) for step in steps} for steps in part["models"]]
        return TracePart(**part)
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"{path} is no part of a trace that this version can read: {error!r}") from None


def step_of_ranks(parts: Sequence[TracePart], number: int, model: int = 0) -> list[Step]:
    """The records of one step, in rank order. An empty list if any rank has no record of it."""
    tables = [part.models[model] for part in parts if model < len(part.models)]
    steps = [table[number] for table in tables if number in table]
    return steps if len(steps) == parts[0].size else []


def last_arrivals(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """For each bucket: (time at which the last rank arrived, that rank). Empty if the ranks' numbers of buckets differ.

    A rank arrives at a bucket when its gradients of this bucket and of all earlier buckets are complete.
    steps: of all ranks
    """
    if len({len(step.ready) for step in steps}) > 1:
        return []
    arrivals = zip(*(accumulate(step.ready, max) for step in steps), strict=True)
    return [max((time, rank) for rank, time in enumerate(times)) for times in arrivals]


def waits(step: Step, rank: int, last: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """For each bucket that waited for a late rank: (end of the wait, that rank). last: see `last_arrivals`"""
    waited = {}
    for bucket, (times, (arrival, late_rank)) in enumerate(zip(step.times, last, strict=False)):
        if times is not None and late_rank != rank:
            end = min(arrival, times[1])
            if end - times[0] > _NOTICED:
                waited[bucket] = end, late_rank
    return waited


def trace_events(parts: Sequence[TracePart]) -> list[Event]:
    """Returns all events, with times from 0 us on.

    Each model on each rank has a row for compute, one for control messages and one for every bucket.
    """
    events = []
    for part in parts:
        events.append(_label("process_name", part.rank, 0, f"rank {part.rank} ({part.host})"))
        for model, steps in enumerate(part.models):
            prefix = f"model {model}: " if len(part.models) > 1 else ""
            rows = {_COMPUTE: "compute", _CONTROL: "control message"}
            rows |= {_BUCKETS + k: f"bucket {k}" for k in range(max((len(s.ready) for s in steps.values()), default=0))}
            events += [_label("thread_name", part.rank, model * _ROWS + row, prefix + rows[row]) for row in rows]
            for number, step in steps.items():
                late = waits(step, part.rank, last_arrivals(step_of_ranks(parts, number, model)))
                for row, name, begin, end, args in _spans(step, late):
                    event = {
                        "name": name,
                        "cat": "ddp",
                        "pid": part.rank,
                        "tid": model * _ROWS + row,
                        "ts": begin,
                        "args": {"step": number, **args},
                    }
                    event |= {"ph": "i", "s": "t"} if end is None else {"ph": "X", "dur": (end - begin) * _US}
                    events.append(event)
    zero = min((event["ts"] for event in events if event["ph"] != "M"), default=0)
    return [{**event, "ts": max(0, event["ts"] - zero) * _US} for event in events]


def _label(field: str, rank: int, row: int, name: str) -> Event:
    return {"ph": "M", "ts": 0, "pid": rank, "tid": row, "name": field, "args": {"name": name}}


def _spans(step: Step, late: dict[int, tuple[int, int]]) -> Iterator[tuple[int, str, int, int | None, dict[str, Any]]]:
    """Yields the events of a step: (row, name, begin, end, arguments). The end of an instant event is None.

    late: see `waits`
    """
    for phase in step.phases():
        yield _COMPUTE, *phase, {}
    if step.control is not None:
        yield _CONTROL, "control message", *step.control, {}
    for bucket, (ready, times, (names, nbytes)) in enumerate(zip(step.ready, step.times, step.contents, strict=True)):
        row = _BUCKETS + bucket
        args = {"MiB": nbytes / (1 << 20), "parameters": names}
        yield row, f"bucket {bucket} ready", ready, None, args
        if times is not None:
            yield row, f"bucket {bucket}", *times, args
            if bucket in late:
                end, rank = late[bucket]
                yield row, f"waiting for rank {rank}", times[0], end, {"rank": rank}


def typical_step(parts: Sequence[TracePart]) -> tuple[int, int] | None:
    """The first model's step of median length on the first rank: (its number, the number of steps that all ranks have).

    The first three steps are left out if there are others. None if no step has a known length.
    """
    steps = parts[0].models[0]
    common = sorted(number for number in steps if all(number in part.models[0] for part in parts))
    lengths = {number: steps[number].ended - steps[number].since for number in common if steps[number].since}
    numbers = list(lengths)[_WARMUP:] or list(lengths)
    numbers.sort(key=lambda number: (lengths[number], number))
    return (numbers[(len(numbers) - 1) // 2], len(common)) if numbers else None
