"""The trace of all ranks, made of the records that they have written: Chrome trace events on rank 0's clock.

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
# Rows of a model in the trace, and how many rows each model has; its buckets have the rows from _BUCKETS on.
_COMPUTE, _CONTROL, _BUCKETS, _ROWS = 1, 2, 10, 10_000
_NOTICED = 20_000  # ns; a rank that comes later than the others by less was not waited for
_WARMUP = 3  # steps that are not like the others: memory is new, and buckets are planned anew
_US = 1e-3  # microseconds in a nanosecond


@dataclass(frozen=True, kw_only=True)
class TracePart:
    """What one rank of `size` recorded.

    job: a number that all ranks of a job have in common. The times at which parts were written would not tell jobs
        apart: the clocks of hosts differ, and may be set back
    models: the steps of each by number
    """

    rank: int
    size: int
    host: str
    job: int
    models: list[dict[int, Step]]


def read_parts(folder: str | os.PathLike[str]) -> list[TracePart]:
    """The parts in the folder, in rank order.

    Raises: ArgumentError if there is none, they are not of one job, or one is not what a rank writes.
    """
    parts = [_read(path) for path in sorted(Path(folder).glob(f"rank-*{SUFFIX}"))]
    if not parts:
        raise ArgumentError(f"there is no trace in {folder}: no rank has written a part (rank-0{SUFFIX}, ...)")
    if len({part.job for part in parts}) > 1:
        found = ", ".join(f"rank {part.rank} of job {part.job:x}" for part in parts)
        raise ArgumentError(f"the parts in {folder} are of several jobs ({found}): keep those of one")
    return sorted(parts, key=lambda part: part.rank)


def _read(path: Path) -> TracePart:
    try:
        part = json.loads(path.read_text(encoding="utf-8"))
        part["models"] = [{step["number"]: Step(**step) for step in steps} for steps in part["models"]]
        return TracePart(**part)
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"{path} is no part of a trace that this version can read: {error!r}") from None


def step_of_ranks(parts: Sequence[TracePart], number: int, model: int = 0) -> list[Step]:
    """One step in rank order; empty if a rank has none of that number, or left no part."""
    tables = [part.models[model] for part in parts if model < len(part.models)]
    found = [table[number] for table in tables if number in table]
    return found if len(found) == parts[0].size else []


def last_arrivals(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """For each bucket: when the last rank arrived, and which one. steps: of all ranks; if their buckets differ, empty.

    A rank arrives at a bucket when its gradients, and those of all buckets before it, are complete.
    """
    if len({len(step.ready) for step in steps}) > 1:
        return []
    arrived = zip(*(accumulate(step.ready, max) for step in steps), strict=True)
    return [max((at, rank) for rank, at in enumerate(each)) for each in arrived]


def waits(step: Step, rank: int, last: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Of the buckets that waited for a later rank: until when, and for which. last: see `last_arrivals`"""
    found = {}
    for bucket, (times, (at, late)) in enumerate(zip(step.times, last, strict=False)):
        if times is not None and late != rank and min(at, times[1]) - times[0] > _NOTICED:
            found[bucket] = min(at, times[1]), late
    return found


def trace_events(parts: Sequence[TracePart]) -> list[Event]:
    """All events: a row for compute, one for control messages, one for each bucket. Times: us after the first one."""
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
                    kind = {"ph": "i", "s": "t"} if end is None else {"ph": "X", "dur": (end - begin) * _US}
                    where = {"ts": begin, "pid": part.rank, "tid": model * _ROWS + row, "cat": "ddp"}
                    events.append({**kind, **where, "name": name, "args": {"step": number, **args}})
    zero = min((event["ts"] for event in events if event["ph"] != "M"), default=0)
    return [{**event, "ts": max(0, event["ts"] - zero) * _US} for event in events]


def _label(what: str, rank: int, row: int, name: str) -> Event:
    return {"ph": "M", "ts": 0, "pid": rank, "tid": row, "name": what, "args": {"name": name}}


def _spans(step: Step, late: dict[int, tuple[int, int]]) -> Iterator[tuple[int, str, int, int | None, dict[str, Any]]]:
    """(row, name, begin, end, arguments) of what one step did; no end: an instant, when a bucket was ready."""
    for phase in step.phases():
        yield _COMPUTE, *phase, {}
    if step.control is not None:
        yield _CONTROL, "control message", *step.control, {}
    for bucket, (ready, times, (names, nbytes)) in enumerate(zip(step.ready, step.times, step.contents, strict=True)):
        row, args = _BUCKETS + bucket, {"MiB": nbytes / (1 << 20), "parameters": names}
        yield row, f"bucket {bucket} ready", ready, None, args
        if times is not None:
            yield row, f"bucket {bucket}", *times, args
            if bucket in late:
                until, rank = late[bucket]
                yield row, f"waiting for rank {rank}", times[0], until, {"rank": rank}


def typical_step(parts: Sequence[TracePart]) -> tuple[int, int] | None:
    """(number, of how many): the first model's step of median length; None unless all ranks have two steps."""
    mine = parts[0].models[0]
    common = sorted(number for number in mine if all(number in part.models[0] for part in parts))
    lengths = {number: mine[number].ended - mine[number].since for number in common if mine[number].since}
    whole = list(lengths)[_WARMUP:] or list(lengths)
    whole.sort(key=lambda number: (lengths[number], number))
    return (whole[(len(whole) - 1) // 2], len(common)) if whole else None
