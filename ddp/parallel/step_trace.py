"""What a trace is made of: the steps of all models in this process, kept in memory and written when recording stops.

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
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from collectives.world import TRACE
from ddp._files import atomic_write
from ddp.errors import ArgumentError
from ddp.parallel.buckets import Buckets

FORMAT = "ddp-trace 2"
SUFFIX = ".steps.json"
_KEPT = 1000
_FIELDS = ("number", "forward", "begun", "computed", "ended", "control", "ready", "times")

_lock = threading.Lock()
_active: list[Recorder] = []
_asked = False  # DDP_TRACE has been looked at


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


@dataclass(kw_only=True)
class _Track:
    """The steps of one model. offset: nanoseconds that this rank's clock is ahead of rank 0's, as known at last"""

    rank: int
    size: int
    offset: int = 0
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def to_json(self) -> dict[str, Any]:
        contents: list[BucketContents] = []
        steps = []
        for step in self.steps:
            if not contents or contents[-1] is not step.contents:
                contents.append(step.contents)
            values = {name: getattr(step, name) for name in _FIELDS}
            steps.append({**values, "contents": len(contents) - 1})
        listed = [{"names": each.names, "nbytes": each.nbytes} for each in contents]
        return {"offset": self.offset, "contents": listed, "steps": steps}


class Recorder:
    """Keeps the steps of all models in this process from `start` to `stop`. folder: where its parts are written."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._started = time.time()
        self._tracks: list[_Track] = []
        self._track_of: WeakKeyDictionary[Any, _Track] = WeakKeyDictionary()

    def track(self, timeline: Any) -> _Track:
        """The record of that model's steps; a model that never makes one is part of the trace, too."""
        track = self._track_of.get(timeline)
        if track is None:
            track = _Track(rank=timeline.rank, size=timeline.size)
            with _lock:  # ranks may be threads
                self._tracks.append(track)
                self._track_of[timeline] = track
        return track

    def write(self) -> None:
        """Writes the part of each rank in this process. Raises: OSError."""
        for rank in sorted({track.rank for track in self._tracks}):
            tracks = [track for track in self._tracks if track.rank == rank]
            part = {
                "format": FORMAT,
                "rank": rank,
                "size": max(track.size for track in tracks),
                "host": socket.gethostname(),
                "started": self._started,
                "written": time.time(),
                "models": [track.to_json() for track in tracks],
            }
            with atomic_write(os.path.join(self.folder, f"rank-{rank}{SUFFIX}")) as file:
                file.write(json.dumps(part, separators=(",", ":")).encode())


def start(folder: str) -> Recorder:
    """Begins to record all models of this process. Raises: ArgumentError if the folder cannot be made or written to."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"the trace's folder {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ArgumentError(f"the trace's folder {folder} cannot be written to")
    recorder = Recorder(folder)
    with _lock:
        _active.append(recorder)
    return recorder


def stop(recorder: Recorder) -> None:
    """Ends recording and writes this process's parts. Raises: OSError."""
    with _lock:
        if recorder in _active:
            _active.remove(recorder)
    recorder.write()


def register(timeline: Any) -> None:
    """A model was wrapped. The first one starts what DDP_TRACE asks for; raises ArgumentError if that cannot be."""
    global _asked
    with _lock:
        folder, first, _asked = os.environ.get(TRACE, ""), not _asked, True
    if first and folder:
        mine, me = start(folder), os.getpid()
        # A child that this process forks is not the rank.
        atexit.register(lambda: _stop_at_exit(mine) if os.getpid() == me else None)
    for recorder in _active:
        recorder.track(timeline)


def record(timeline: Any, step: Step) -> None:
    """A step has ended."""
    for recorder in _active:
        track = recorder.track(timeline)
        track.steps.append(step)
        track.offset = timeline.offset()


def _stop_at_exit(recorder: Recorder) -> None:
    try:
        stop(recorder)
    except OSError as error:
        print(f"ddp: the trace of this rank could not be written to {recorder.folder}: {error}", file=sys.stderr)
