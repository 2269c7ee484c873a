"""Steps as a trace keeps them: in memory while training runs, written when recording stops.

Each rank writes a part of its own, `rank-0.steps.json` and so on; `ddp.tracing` merges them. Nothing is written while
training runs, which would show in the trace, and memory is bounded: the latest 1,000 steps of each model are kept. A
rank that is killed leaves no part.

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
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from collectives.world import TRACE
from ddp._files import atomic_write
from ddp.errors import ArgumentError
from ddp.parallel.buckets import Buckets

SUFFIX = ".steps.json"
_KEPT = 1000
_FIELDS = ("number", "forward", "begun", "computed", "ended", "control", "ready", "times")

_lock = threading.Lock()  # ranks may be threads
_active: list[Recorder] = []
_asked = False  # DDP_TRACE has been read


@dataclass(frozen=True, kw_only=True)
class BucketContents:
    """What the buckets of one plan hold. names: of each bucket's parameters; nbytes: of each bucket's memory."""

    names: tuple[tuple[str, ...], ...] = ()
    nbytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, buckets: Buckets) -> BucketContents:
        """What these buckets hold."""
        return cls(
            names=tuple(tuple(buckets.names[index] for index in members) for members in buckets.members),
            nbytes=tuple(int(buffer.nbytes) for buffer in buckets.memory.buffers),
        )


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
    contents: what the buckets hold; since: when the step before ended, 0 if that is not known; table: the timestamps
    of all ranks, None until they have arrived. `Timeline` writes these three.
    """

    number: int
    begun: int
    computed: int
    ended: int
    ready: Sequence[int]
    times: Sequence[tuple[int, int] | None]
    control: tuple[int, int] | None = None
    forward: tuple[int, int] | None = None
    contents: BucketContents = BucketContents()
    since: int = 0
    table: Any = None


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
            mine = {timeline: steps for timeline, steps in self._steps.items() if timeline.rank == rank}
            part = {
                "rank": rank,
                "size": max(timeline.size for timeline in mine),
                "host": socket.gethostname(),
                "started": self._started,
                "written": time.time(),
                "models": [_encoded(timeline.offset(), steps) for timeline, steps in mine.items()],
            }
            with atomic_write(os.path.join(self.folder, f"rank-{rank}{SUFFIX}")) as file:
                file.write(json.dumps(part, separators=(",", ":")).encode())


def _encoded(offset: int, steps: Sequence[Step]) -> dict[str, Any]:
    """The steps of one model as JSON values. offset: nanoseconds that this rank's clock is ahead of rank 0's"""
    contents = list(dict.fromkeys(step.contents for step in steps))
    rows = [
        {**{name: getattr(step, name) for name in _FIELDS}, "contents": contents.index(step.contents)} for step in steps
    ]
    return {"offset": offset, "contents": [asdict(each) for each in contents], "steps": rows}


def register(timeline: Any) -> None:
    """A model was wrapped. The first one starts what DDP_TRACE asks for; raises ArgumentError if that cannot be."""
    global _asked
    with _lock:
        folder, first, _asked = os.environ.get(TRACE, ""), not _asked, True
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
