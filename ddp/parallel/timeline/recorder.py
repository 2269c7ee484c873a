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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from collectives.world import TRACE
from ddp._files import atomic_write
from ddp.errors import ArgumentError
from ddp.parallel.timeline.steps import Contents, Step

if TYPE_CHECKING:
    from ddp.parallel.timeline.timeline import Timeline

FORMAT = "ddp-trace 1"
SUFFIX = ".steps.json"
_KEPT = 1000

_lock = threading.Lock()
_active: list[Recorder] = []
_asked = False  # DDP_TRACE has been looked at


@dataclass(kw_only=True)
class _Track:
    """The steps of one model, each with its clock's offset from rank 0's as it was known then."""

    rank: int
    size: int
    steps: deque[tuple[Step, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))


class Recorder:
    """Keeps the steps of all models in this process from `start` to `stop`. folder: where its parts are written."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._started = time.time()
        self._tracks: list[_Track] = []
        self._track_of: WeakKeyDictionary[Timeline, _Track] = WeakKeyDictionary()

    def track(self, timeline: Timeline) -> _Track:
        """The place of that model's steps; a model that never makes one is part of the trace, too."""
        track = self._track_of.get(timeline)
        if track is None:
            track = _Track(rank=timeline.rank, size=timeline.size)
            with _lock:  # ranks may be threads
                self._tracks.append(track)
                self._track_of[timeline] = track
        return track

    def write(self) -> list[str]:
        """Writes the part of each rank in this process, and returns their paths. Raises: OSError."""
        paths = []
        for rank in sorted({track.rank for track in self._tracks}):
            tracks = [track for track in self._tracks if track.rank == rank]
            part = {
                "format": FORMAT,
                "rank": rank,
                "size": max(track.size for track in tracks),
                "host": socket.gethostname(),
                "started": self._started,
                "written": time.time(),
                "models": [_as_json(track) for track in tracks],
            }
            paths.append(os.path.join(self.folder, f"rank-{rank}{SUFFIX}"))
            with atomic_write(paths[-1]) as file:
                file.write(json.dumps(part, separators=(",", ":")).encode())
        return paths


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


def stop(recorder: Recorder) -> list[str]:
    """Ends recording and writes this process's parts; returns their paths. Raises: OSError."""
    with _lock:
        if recorder in _active:
            _active.remove(recorder)
    return recorder.write()


def opened(timeline: Timeline) -> None:
    """A model was wrapped. The first one starts what DDP_TRACE asks for; raises ArgumentError if that cannot be."""
    global _asked
    with _lock:
        folder, first, _asked = os.environ.get(TRACE, ""), not _asked, True
    if first and folder:
        mine, me = start(folder), os.getpid()
        # A child that this process forks is not the rank.
        atexit.register(lambda: _leave(mine) if os.getpid() == me else None)
    for recorder in _active:
        recorder.track(timeline)


def note(timeline: Timeline, step: Step) -> None:
    """A step has ended."""
    for recorder in _active:
        recorder.track(timeline).steps.append((step, timeline.offset()))


def _leave(recorder: Recorder) -> None:
    try:
        stop(recorder)
    except OSError as error:
        print(f"ddp: the trace of this rank could not be written to {recorder.folder}: {error}", file=sys.stderr)


def _as_json(track: _Track) -> dict[str, Any]:
    contents: list[Contents] = []
    steps = []
    for step, offset in track.steps:
        if not contents or contents[-1] is not step.contents:
            contents.append(step.contents)
        steps.append(
            {
                "number": step.number,
                "contents": len(contents) - 1,
                "offset": offset,
                "forward": step.forward,
                "begun": step.begun,
                "computed": step.computed,
                "ended": step.ended,
                "control": step.control,
                "ready": list(step.ready),
                "times": list(step.times),
            }
        )
    return {"contents": [{"names": each.names, "nbytes": each.nbytes} for each in contents], "steps": steps}
