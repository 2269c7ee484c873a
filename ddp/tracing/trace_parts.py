"""The parts that ranks have written, read back and joined: lists of Chrome trace events on rank 0's clock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ddp.errors import ArgumentError
from ddp.parallel.step_trace import BUCKETS, COMPUTE, ROWS, SUFFIX, Event

_NOTICED = 20.0  # us; a rank that comes later than the others by less was not waited for
_WARMUP = 3  # steps that are not like the others: memory is new, and buckets are planned anew


@dataclass(frozen=True, kw_only=True)
class TracePart:
    """What one rank of `size` recorded. started, written: seconds since 1970."""

    rank: int
    size: int
    started: float
    written: float
    traceEvents: list[Event]

    def by_step(self, model: int = 0) -> dict[int, list[Event]]:
        """The events of one model by the number of their step."""
        found: dict[int, list[Event]] = {}
        for event in self.traceEvents:
            if event["ph"] != "M" and event["tid"] // ROWS == model:
                found.setdefault(event["args"]["step"], []).append(event)
        return found


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


def _read(path: Path) -> TracePart:
    try:
        return TracePart(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"{path} is no part of a trace that this version can read: {error}") from None


def joined(parts: Sequence[TracePart]) -> list[Event]:
    """All events, with a slice where a bucket waited for a late rank. Times: microseconds after the first event."""
    events = [{**event} for part in parts for event in part.traceEvents]
    if 1 < parts[0].size == len(parts):
        events += waits(parts)
    zero = min((event["ts"] for event in events if event["ph"] != "M"), default=0.0)
    for event in events:
        event["ts"] = 0.0 if event["ph"] == "M" else event["ts"] - zero
    return events


def waits(parts: Sequence[TracePart]) -> Iterator[Event]:
    """The slices in which buckets waited for another rank. parts: of all ranks"""
    for model in {event["tid"] // ROWS for event in parts[0].traceEvents}:
        tables = [part.by_step(model) for part in parts]
        for number in tables[0]:
            ranks = [table.get(number, []) for table in tables]
            last = last_arrivals(ranks)
            for rank, events in enumerate(ranks if last else ()):
                for event in events:
                    if event["ph"] == "X" and event["tid"] % ROWS >= BUCKETS:
                        arrived, late = last[event["tid"] % ROWS - BUCKETS]
                        length = min(arrived - event["ts"], event["dur"])
                        if late != rank and length > _NOTICED:
                            name, args = f"waiting for rank {late}", {"step": number, "rank": late}
                            yield {**event, "name": name, "dur": length, "args": args}


def last_arrivals(events: Sequence[Sequence[Event]]) -> list[tuple[float, int]]:
    """For each bucket: when the last rank arrived, and which one. events: of one step, of each rank

    A rank arrives at a bucket when its gradients, and those of all buckets before it, are complete.
    Empty if the ranks' buckets are not the same, as where one has no such step.
    """
    ready = [[event["ts"] for event in mine if event["ph"] == "i"] for mine in events]
    if len({len(each) for each in ready}) > 1:
        return []
    return [
        max((at, rank) for rank, at in enumerate(each))
        for each in zip(*(accumulate(r, max) for r in ready), strict=True)
    ]


def typical_step(parts: Sequence[TracePart]) -> tuple[int, int] | None:
    """(number, of how many): the first model's step of median length; None unless all ranks have two steps."""
    tables = [part.by_step() for part in parts]
    common = sorted(number for number in tables[0] if all(number in table for table in tables))
    lengths = {number: extent(tables[0][number]) for number in common[1:]}  # the first begins with its forward
    whole = list(lengths)[_WARMUP:] or list(lengths)
    whole.sort(key=lambda number: (lengths[number][1] - lengths[number][0], number))
    return (whole[(len(whole) - 1) // 2], len(common)) if whole else None


def extent(events: Sequence[Event]) -> tuple[float, float]:
    """When the computing thread began and ended one step."""
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] % ROWS == COMPUTE]
    return min(begin for begin, _ in spans), max(end for _, end in spans)
