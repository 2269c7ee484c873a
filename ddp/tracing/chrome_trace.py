"""Steps as events of the Chrome trace format, which Perfetto reads too.

A process for each rank. Its rows: what it computed and waited for; the control messages; one row for each bucket, with
an instant where its last gradient was ready, and a slice from its launch until it was done, in which lies another while
a rank was waited for. Arrows lead from backward to the buckets. Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddp.parallel.step_trace import Step
from ddp.tracing.trace_parts import Arrival, TracePart, arrivals

Event = dict[str, Any]
_MIB = 1 << 20
_COMPUTE, _CONTROL, _BUCKETS = 1, 2, 10  # rows of a model
_ROWS = 10_000  # of each model
_NOTICED = 20_000  # ns; who comes later than the others by less was not waited for


def chrome_events(parts: Sequence[TracePart]) -> list[Event]:
    """All events of these parts. Times are microseconds after the first of them."""
    steps = [step for part in parts for model in part.models for step in model]
    zero = min((min((step.begun, *(step.forward or ()))) for step in steps), default=0)
    last = {model: arrivals(parts, model) for model in range(max((len(part.models) for part in parts), default=0))}
    events: list[Event] = []
    for part in parts:
        events += _named(part)
        for model, mine in enumerate(part.models):
            row = model * _ROWS
            ended: int | None = None
            for step in mine:
                events += _computing(part.rank, row, step, ended, last[model].get(step.number, []))
                events += _communicating(part.rank, row, step, last[model].get(step.number, []))
                ended = step.ended
    for event in events:
        event["ts"] = (event["ts"] - zero) / 1000 if event["ph"] != "M" else 0
        if "dur" in event:
            event["dur"] /= 1000
    return events


def _named(part: TracePart) -> Iterator[Event]:
    """What the ranks and their rows are called."""

    def metadata(what: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "ts": 0, "pid": part.rank, "tid": tid, "name": what, "args": args}

    yield metadata("process_name", 0, name=f"rank {part.rank} ({part.host})")
    yield metadata("process_sort_index", 0, sort_index=part.rank)
    for model, steps in enumerate(part.models):
        rows = {_COMPUTE: "compute", _CONTROL: "control message"}
        rows |= {
            _BUCKETS + bucket: f"bucket {bucket}" for bucket in range(max((len(s.ready) for s in steps), default=0))
        }
        before = f"model {model}: " if len(part.models) > 1 else ""
        for row, name in rows.items():
            yield metadata("thread_name", model * _ROWS + row, name=before + name)
            yield metadata("thread_sort_index", model * _ROWS + row, sort_index=model * _ROWS + row)


def _slice(rank: int, row: int, name: str, begin: int, end: int, **args: Any) -> Event:
    assert end >= begin
    return {
        "ph": "X",
        "ts": begin,
        "dur": end - begin,
        "pid": rank,
        "tid": row,
        "name": name,
        "cat": "ddp",
        "args": args,
    }


def _computing(rank: int, row: int, step: Step, ended: int | None, last: Sequence[Arrival]) -> Iterator[Event]:
    """One row, one slice after the other. ended: when the step before did."""
    row += _COMPUTE
    at, number = ended, step.number
    if step.forward is not None and step.forward[1] <= step.begun:
        # A forward that began before the backward before it had ended is drawn from that end on.
        begin, end = (time if at is None else max(time, at) for time in step.forward)
        if at is not None and begin > at:
            yield _slice(rank, row, "other: data, optimizer, logging", at, begin, step=number)
        if end > begin:
            yield _slice(rank, row, "forward", begin, end, step=number)
        if step.begun > end:
            yield _slice(rank, row, "loss", end, step.begun, step=number)
    elif at is not None and step.begun > at:
        yield _slice(rank, row, "other: data, optimizer, logging", at, step.begun, step=number)
    # Clocks of other nodes are followed, so that one step may seem to begin microseconds before the last had ended.
    begun = step.begun if at is None else max(step.begun, at)
    computed = max(step.computed, begun)
    yield _slice(rank, row, "backward", begun, computed, step=number)
    waited = {"last rank": last[-1].rank, "later than the others by ms": last[-1].after / 1e6} if last else {}
    yield _slice(rank, row, "wait for communication", computed, max(step.ended, computed), **waited, step=number)


def _communicating(rank: int, row: int, step: Step, last: Sequence[Arrival]) -> Iterator[Event]:
    if step.control is not None:
        yield _slice(rank, row + _CONTROL, "control message", *step.control, step=step.number)
    for bucket, (ready, times) in enumerate(zip(step.ready, step.times, strict=True)):
        tid = row + _BUCKETS + bucket
        place = {"pid": rank, "tid": tid, "cat": "ddp"}
        args = {
            "step": step.number,
            "MiB": step.contents.nbytes[bucket] / _MIB,
            "parameters": list(step.contents.names[bucket]),
        }
        if last:
            late = last[bucket]
            args |= {"last rank": late.rank, "later than the others by ms": late.after / 1e6}
        yield {"ph": "i", "ts": ready, "s": "t", "name": f"bucket {bucket} ready", "args": args, **place}
        if times is None:
            continue
        launched, done = times
        yield _slice(rank, tid, f"bucket {bucket}", launched, done, **args)
        if last and late.rank != rank and min(late.at, done) - launched > _NOTICED:
            yield _slice(rank, tid, f"waiting for rank {late.rank}", launched, min(late.at, done), step=step.number)
        if step.begun <= ready <= step.computed:
            arrow = {"cat": "ddp", "name": "launch", "id": f"{rank}.{row}.{step.number}.{bucket}"}
            yield {"ph": "s", "ts": ready, "pid": rank, "tid": row + _COMPUTE, **arrow}
            yield {"ph": "f", "bp": "e", "ts": launched, "pid": rank, "tid": tid, **arrow}
