"""The record of a step, from which statistics and traces are made, and the recorder that writes records to a file.

Each rank writes the records of its steps to a file of its own, `rank-0.steps.json` and so on; `ddp.tracing` merges them
into one trace. Files are written at the end, since writing during training would show in the trace. To bound memory,
only the latest 1,000 steps of each model are kept. A rank that is killed writes nothing.

`ddp-launch --trace` sets the environment variable DDP_TRACE to the folder for the files. Recording then starts when the
first model is wrapped, and stops at exit. It does not change the results of training.
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

# Ranks may be threads of one process.
_lock = threading.Lock()
_active: list[Recorder] = []
_environment_read = False


@dataclass(slots=True, kw_only=True)
class Step:
    """One synchronized backward on this rank. All times are host times, `time.monotonic_ns()`.

    On a GPU they say when the host launched the work, not when the device did it.

    number: how many synchronized backwards came before, the same on every rank
    forward: begin and end of the last forward before this backward; None if there was none since the previous backward
    begun, computed: when backward began, and when its last node had run
    ended: when all buckets were reduced
    control: when the control message was launched, and when it arrived; None if that is not known
    ready: when the last gradient of each bucket was complete; equal to `begun` if backward reached none of them
    times: when each bucket was launched, and when it was reduced; None if that is not known
    contents: (parameters' names, bytes) of each bucket; since: when the step before ended, 0 if that is not known
    table: the timestamps of all ranks, None until they have arrived
    `Timeline` sets `contents`, `since` and `table`.
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
        """Yields (name, begin, end) for each phase of the computing thread, in order."""
        ends = [("backward", self.computed), ("wait for communication", self.ended)]
        start = self.begun
        if self.forward is not None and self.forward[1] <= self.begun:
            ends = [("forward", self.forward[1]), ("loss", self.begun), *ends]
            start = self.forward[0]
        # A forward may have begun in the step before. Its phase begins when that step has ended.
        begin = self.since or start
        for name, end in [("other: data, optimizer, logging", start), *ends]:
            if end > begin:
                yield name, begin, end
                begin = end

    def communication(self) -> tuple[float, float] | None:
        """(time in which some bucket was being reduced, the part of it in which backward computed), in nanoseconds.

        None if it is not known.
        """
        spans = [span for span in self.times if span is not None]
        hidden = [(begin, min(end, self.computed)) for begin, end in spans]
        return (covered(spans), covered(hidden)) if spans else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time that these intervals cover, overlaps counted once. `covered([(0, 2), (1, 4), (9, 10)]) == 5`"""
    total = 0.0
    covered_to = 0.0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, covered_to))
        covered_to = max(covered_to, end)
    return total


class Recorder:
    """Keeps the latest steps of all models of this process. `stop` writes them, to one file for each rank.

    Raises: ArgumentError if the folder cannot be made or written to.
    """

    def __init__(self, folder: str) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"the trace's folder {folder} cannot be made: {error.strerror}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ArgumentError(f"the trace's folder {folder} cannot be written to")
        # Existing files are of an earlier job: in this job no rank writes a file before all ranks have made a step.
        for part in Path(folder).glob(f"rank-*{SUFFIX}"):
            part.unlink(missing_ok=True)
        self.folder = folder
        self._steps: dict[Any, deque[Step]] = {}  # by the model's Timeline
        with _lock:
            _active.append(self)

    def add(self, timeline: Any, *steps: Step) -> None:
        """Keeps steps of a model. Without steps, it only makes the model part of the trace."""
        with _lock:
            self._steps.setdefault(timeline, deque(maxlen=_KEPT)).extend(steps)

    def stop(self) -> None:
        """Ends recording, and writes the file of each rank in this process. Raises: OSError if it cannot be written."""
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
    """The record as JSON, its times converted to rank 0's clock. offset: nanoseconds that this rank's clock is ahead"""

    def shifted(times: Any) -> Any:
        if times is None or isinstance(times, int):
            return times and times - offset
        return [shifted(time) for time in times]

    times = {name: shifted(getattr(step, name)) for name in _TIMES}
    return {"number": step.number, "contents": step.contents, **times}


def register(timeline: Any) -> None:
    """Called when a model is wrapped. The first time, starts recording if DDP_TRACE is set.

    Raises: ArgumentError as `Recorder`.
    """
    global _environment_read
    with _lock:
        folder = os.environ.get(TRACE, "")
        first = not _environment_read
        _environment_read = True
    if first and folder:
        recorder = Recorder(folder)
        pid = os.getpid()
        # Forked children inherit this function, but must not write the files of the rank.
        atexit.register(lambda: _stop_at_exit(recorder) if os.getpid() == pid else None)
    record(timeline)


def record(timeline: Any, *steps: Step) -> None:
    """Adds steps that have ended to all recorders."""
    for recorder in _active:
        recorder.add(timeline, *steps)


def _stop_at_exit(recorder: Recorder) -> None:
    try:
        recorder.stop()
    except OSError as error:
        print(f"ddp: the trace of this rank could not be written to {recorder.folder}: {error}", file=sys.stderr)
