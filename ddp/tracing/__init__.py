"""A trace of training: what every rank computed, sent and waited for, on one clock, for chrome://tracing and Perfetto.

    with ddp.tracing.recording("trace"):        # every rank
        for batch in loader: ...

Each rank writes its own part into the folder; the last one to finish merges them into `trace.json` (open it at
ui.perfetto.dev) and draws one typical step of all ranks, `step.png`, where matplotlib is installed. `ddp-launch --trace
DIR` does the same without a change to the script. The environment variable DDP_TRACE makes ranks leave their parts, and
`python -m ddp.tracing DIR` merges what parts there are.

All times are host times: on a GPU, when the host asked for the work, not when the device did it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ddp.errors import ArgumentError
from ddp.parallel.timeline import recorder
from ddp.tracing.merging import complete, merge

__all__ = ["merge", "recording", "start", "stop"]

_running: list[recorder.Recorder] = []


def start(folder: str | os.PathLike[str]) -> None:
    """Begins to record the steps of all `DataParallel` models of this process, the latest 1,000 of each.

    folder: the same for all ranks; made if it is not there, and what an earlier trace left in it is replaced
    Raises: ArgumentError if a trace is being recorded already, or the folder cannot be made or written to.
    """
    if _running:
        raise ArgumentError(f"a trace is being recorded to {_running[0].folder} already: call ddp.tracing.stop() first")
    _running.append(recorder.start(os.fspath(folder)))


def stop() -> None:
    """Ends recording and writes this process's part; the rank that finds all others' parts there merges them.

    Raises: ArgumentError if no trace is being recorded; OSError if the part cannot be written.
    """
    if not _running:
        raise ArgumentError("no trace is being recorded: call ddp.tracing.start(folder) first")
    running = _running.pop()
    recorder.stop(running)
    if complete(running.folder):
        merge(running.folder)


@contextlib.contextmanager
def recording(folder: str | os.PathLike[str]) -> Iterator[None]:
    """`start` and `stop` around a block, also when it raises."""
    start(folder)
    try:
        yield
    finally:
        stop()
