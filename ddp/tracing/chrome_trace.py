"""Steps as events of the Chrome trace format, which Perfetto reads too.

A process for each rank. Its rows: what it computed and waited for; the control messages; one row for each bucket, with
an instant where its last gradient was ready, and a slice from its launch until it was done, in which lies another while
a rank was waited for. Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddp.parallel.step_trace import Step
from ddp.tracing.trace_parts import TracePart, common_steps, last_arrivals, phases

Event = dict[str, Any]
_MIB = 1 << 20
_COMPUTE, _CONTROL, _BUCKETS = 1, 2, 10  # rows of a model
_ROWS = 10_000  # of each model
_NOTICED = 20_000  # ns; who comes later than the others by less was not waited for


def chrome_events(parts: Sequence[TracePart]) -> list[Event]:
    """All events of these parts. Times are microseconds after the first of them."""
    steps = [step for part in parts for model in part.models for step in model]
    zero = min((min((step.begun, *(step.forward or ()))) for step in steps), default=0)
    events: list[Event] = []
    for part in parts:
        events.append(_metadata("process_name", part.rank, 0, f"rank {part.rank} ({part.host})"))
        for model, mine in enumerate(part.models):
            base, common = model * _ROWS, common_steps(parts, model)
            prefix = f"model {model}: " if len(part.models) > 1 else ""
            rows = {_COMPUTE: "compute", _CONTROL: "control message"}
            rows |= {
                _BUCKETS + bucket: f"bucket {bucket}" for bucket in range(max((len(s.ready) for s in mine), default=0))
            }
            events += [_metadata("thread_name", part.rank, base + row, prefix + name) for row, name in rows.items()]
            before = None
            for step in mine:
                for name, begin, end in phases(step, before):
                    events.append(_slice(part.rank, base + _COMPUTE, name, begin, end, step=step.number))
                events += _communication(part.rank, base, step, last_arrivals(common.get(step.number, ()), part.size))
                before = step.ended
    for event in events:
        event["ts"] = (event["ts"] - zero) / 1000 if event["ph"] != "M" else 0
        if "dur" in event:
            event["dur"] /= 1000
    return events


def _metadata(what: str, rank: int, row: int, name: str) -> Event:
    return {"ph": "M", "ts": 0, "pid": rank, "tid": row, "name": what, "args": {"name": name}}


def _slice(rank: int, row: int, name: str, begin: int, end: int, **args: Any) -> Event:
    span = {"ts": begin, "dur": end - begin}
    return {"ph": "X", **span, "pid": rank, "tid": row, "name": name, "cat": "ddp", "args": args}


def _communication(rank: int, base: int, step: Step, last: Sequence[tuple[int, int]]) -> Iterator[Event]:
    """The control message and the buckets of one step. last: see `last_arrivals`"""
    if step.control is not None:
        yield _slice(rank, base + _CONTROL, "control message", *step.control, step=step.number)
    for bucket, (ready, times) in enumerate(zip(step.ready, step.times, strict=True)):
        row, name = base + _BUCKETS + bucket, f"bucket {bucket}"
        size, names = step.contents.nbytes[bucket] / _MIB, list(step.contents.names[bucket])
        args = {"step": step.number, "MiB": size, "parameters": names}
        yield {"ph": "i", "ts": ready, "s": "t", "pid": rank, "tid": row, "name": f"{name} ready", "args": args}
        if times is None:
            continue
        launched, done = times
        yield _slice(rank, row, name, launched, done, **args)
        at, late = last[bucket] if last else (launched, rank)
        if late != rank and min(at, done) - launched > _NOTICED:
            yield _slice(rank, row, f"waiting for rank {late}", launched, min(at, done), step=step.number)
