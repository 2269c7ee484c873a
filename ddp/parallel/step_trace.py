"""Steps as a trace keeps them: in memory while training runs, written as Chrome trace events when recording stops.

Each rank writes a part of its own, `rank-0.steps.json` and so on; `ddp.tracing` merges them. Nothing is written while
training runs, which would show in the trace, and memory is bounded: the latest 1,000 steps of each model are kept. A
rank that is killed leaves no part.

The environment variable DDP_TRACE names a folder, and is what `ddp-launch --trace` sets: recording starts when the
first model is wrapped, and stops at exit. It changes no numbers.

Source: "Trace Event Format", the Chromium project; Perfetto reads it too.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.world import TRACE
from ddp._files import atomic_write
from ddp.errors import ArgumentError

Event = dict[str, Any]
SUFFIX = ".steps.json"
#: Rows of a model in the trace, and how many rows each model has; its buckets have the rows from BUCKETS on.
COMPUTE, CONTROL, BUCKETS, ROWS = 1, 2, 10, 10_000
_KEPT = 1000
_MIB = 1 << 20
_US = 1e-3  # microseconds in a nanosecond

_lock = threading.Lock()  # ranks may be threads
_active: list[Recorder] = []
_environment_read = False


@dataclass(slots=True, kw_only=True)
class Step:
    """One synchronized backward on this rank. All times are host times, `time.monotonic_ns()`.

    On a GPU they say when the host asked for the work, not when the device did it.

    number: how many synchronized backwards came before, the same on every rank
    forward: begin and end of the last forward before it; None if there was none
    begun, computed: backward began, and its last node ran; ended: all buckets were reduced
    control: the control message was launched, and had arrived; None if that is not known
    ready: of each bucket, when its last gradient was complete (begun, if nothing of it was to come)
    times: of each bucket, when it was launched and done; None if that is not known
    contents: (parameters' names, bytes) of each bucket; since: when the step before ended, 0 if that is not known
    table: the timestamps of all ranks, None until they have arrived. `Timeline` writes these three.
    """

    number: int
    begun: int
    computed: int
    ended: int
    ready: Sequence[int]
    times: Sequence[tuple[int, int] | None]
    control: tuple[int, int] | None = None
    forward: tuple[int, int] | None = None
    contents: tuple[tuple[tuple[str, ...], int], ...] = ()
    since: int = 0
    table: Any = None

    def phases(self, before: int | None) -> Iterator[tuple[str, int, int]]:
        """What the computing thread did: (name, begin, end), one after the other. before: when the last step ended"""
        ends = [("backward", self.computed), ("wait for communication", self.ended)]
        start = self.begun
        if self.forward is not None and self.forward[1] <= self.begun:
            ends = [("forward", self.forward[1]), ("loss", self.begun), *ends]
            start = self.forward[0]
        # Times never go back: a forward may have begun in the step before.
        at = start if before is None else before
        for name, end in [("other: data, optimizer, logging", start), *ends]:
            if end > at:
                yield name, at, end
                at = end


class Recorder:
    """Keeps the steps of all models of this process until `stop`, which writes the parts of its ranks to a folder.

    Raises: ArgumentError if the folder cannot be made or written to.
    """

    def __init__(self, folder: str) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"the trace's folder {folder} cannot be made: {error.strerror}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ArgumentError(f"the trace's folder {folder} cannot be written to")
        self.folder = folder
        self._started = time.time()
        self._steps: dict[Any, deque[Step]] = {}  # by the model's Timeline
        with _lock:
            _active.append(self)

    def add(self, timeline: Any, *steps: Step) -> None:
        """Keeps steps of a model; a model that never makes one is part of the trace, too."""
        with _lock:
            self._steps.setdefault(timeline, deque(maxlen=_KEPT)).extend(steps)

    def stop(self) -> None:
        """Ends recording and writes the part of each rank in this process. Raises: OSError."""
        with _lock:
            if self in _active:
                _active.remove(self)
        for rank in sorted({timeline.rank for timeline in self._steps}):
            models = [(timeline, steps) for timeline, steps in self._steps.items() if timeline.rank == rank]
            part = {
                "rank": rank,
                "size": max(timeline.size for timeline, _ in models),
                "started": self._started,
                "written": time.time(),
                "traceEvents": list(_events(rank, models)),
            }
            with atomic_write(os.path.join(self.folder, f"rank-{rank}{SUFFIX}")) as file:
                file.write(json.dumps(part, separators=(",", ":")).encode())


def _events(rank: int, models: Sequence[tuple[Any, Sequence[Step]]]) -> Iterator[Event]:
    """The steps of one rank on rank 0's clock: a row for compute, one for control messages, one for each bucket."""
    yield _label("process_name", rank, 0, f"rank {rank} ({socket.gethostname()})")
    for model, (timeline, steps) in enumerate(models):
        base, offset = model * ROWS, timeline.offset()
        rows = {COMPUTE: "compute", CONTROL: "control message"}
        rows |= {BUCKETS + k: f"bucket {k}" for k in range(max((len(step.ready) for step in steps), default=0))}
        for row, name in rows.items():
            yield _label("thread_name", rank, base + row, f"model {model}: {name}" if len(models) > 1 else name)
        before = None
        for step in steps:
            for event in _step_events(step, before):
                yield {**event, "ts": (event["ts"] - offset) * _US, "pid": rank, "tid": base + event["tid"]}
            before = step.ended


def _label(what: str, rank: int, row: int, name: str) -> Event:
    return {"ph": "M", "ts": 0, "pid": rank, "tid": row, "name": what, "args": {"name": name}}


def _step_events(step: Step, before: int | None) -> Iterator[Event]:
    """One step, begin times in nanoseconds of this rank's clock; of a bucket the instant when it was ready, too."""
    for name, begin, end in step.phases(before):
        yield _span(COMPUTE, name, begin, end, step=step.number)
    if step.control is not None:
        yield _span(CONTROL, "control message", *step.control, step=step.number)
    for bucket, (ready, times, (names, nbytes)) in enumerate(zip(step.ready, step.times, step.contents, strict=True)):
        row = BUCKETS + bucket
        args: dict[str, Any] = {"step": step.number, "MiB": nbytes / _MIB, "parameters": names}
        yield {"ph": "i", "ts": ready, "s": "t", "tid": row, "name": f"bucket {bucket} ready", "args": args}
        if times is not None:
            yield _span(row, f"bucket {bucket}", *times, **args)


def _span(row: int, name: str, begin: int, end: int, **args: Any) -> Event:
    return {"ph": "X", "ts": begin, "dur": (end - begin) * _US, "tid": row, "name": name, "cat": "ddp", "args": args}


def register(timeline: Any) -> None:
    """A model was wrapped. The first one starts what DDP_TRACE asks for; raises ArgumentError if that cannot be."""
    global _environment_read
    with _lock:
        folder, first, _environment_read = os.environ.get(TRACE, ""), not _environment_read, True
    if first and folder:
        mine, me = Recorder(folder), os.getpid()
        # A child that this process forks is not the rank.
        atexit.register(lambda: _stop_at_exit(mine) if os.getpid() == me else None)
    record(timeline)


def record(timeline: Any, *steps: Step) -> None:
    """Gives steps that have ended to all recorders."""
    for recorder in _active:
        recorder.add(timeline, *steps)


def _stop_at_exit(recorder: Recorder) -> None:
    try:
        recorder.stop()
    except OSError as error:
        print(f"ddp: the trace of this rank could not be written to {recorder.folder}: {error}", file=sys.stderr)
