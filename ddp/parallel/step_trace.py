"""The record of a step, which statistics and traces are made of, and the recorder that writes it to a file.

Each rank writes a part of its own, `rank-0.steps.json` and so on: the records of its steps, which `ddp.tracing` makes
one trace of. Nothing is written while training runs, which would show in the trace, and memory is bounded: the latest
1,000 steps of each model are kept. A rank that is killed leaves no part.

The environment variable DDP_TRACE names a folder, and is what `ddp-launch --trace` sets: recording starts when the
first model is wrapped, and stops at exit. It changes no numbers.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.world import TRACE
from ddp._files import atomic_write
from ddp.errors import ArgumentError

SUFFIX = ".steps.json"
_KEPT = 1000
_TIMES = ("since", "begun", "computed", "ended", "ready", "times", "control", "forward")

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

    def phases(self) -> Iterator[tuple[str, int, int]]:
        """What the computing thread did: (name, begin, end), one after the other."""
        ends = [("backward", self.computed), ("wait for communication", self.ended)]
        start = self.begun
        if self.forward is not None and self.forward[1] <= self.begun:
            ends = [("forward", self.forward[1]), ("loss", self.begun), *ends]
            start = self.forward[0]
        # Times never go back: a forward may have begun in the step before.
        at = self.since or start
        for name, end in [("other: data, optimizer, logging", start), *ends]:
            if end > at:
                yield name, at, end
                at = end

    def communication(self) -> tuple[float, float] | None:
        """Nanoseconds in which some bucket was under way, and those of them in which backward computed."""
        spans = [span for span in self.times if span is not None]
        hidden = [(begin, min(end, self.computed)) for begin, end in spans]
        return (covered(spans), covered(hidden)) if spans else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time that these intervals cover, each instant counted once. `covered([(0, 2), (1, 4), (9, 10)]) == 5`"""
    total, at = 0.0, 0.0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, at))
        at = max(at, end)
    return total


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
        # Parts of an earlier job. No rank of this one has left its part yet: that takes a step, and a step all ranks.
        for part in Path(folder).glob(f"rank-*{SUFFIX}"):
            part.unlink(missing_ok=True)
        self.folder = folder
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
                "host": socket.gethostname(),
                "job": min(timeline.job for timeline, _ in models),
                "models": [[_saved(step, timeline.offset()) for step in steps] for timeline, steps in models],
            }
            with atomic_write(os.path.join(self.folder, f"rank-{rank}{SUFFIX}")) as file:
                file.write(json.dumps(part, separators=(",", ":")).encode())


def _saved(step: Step, offset: int) -> dict[str, Any]:
    """The record as JSON, its times on rank 0's clock. offset: nanoseconds that this rank's clock is ahead of that"""

    def shifted(times: Any) -> Any:
        if times is None or isinstance(times, int):
            return times and times - offset
        return [shifted(each) for each in times]

    times = {name: shifted(getattr(step, name)) for name in _TIMES}
    return {"number": step.number, "contents": step.contents, **times}


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
