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
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ddp._files import atomic_write
from ddp.errors import ArgumentError
from ddp.parallel.step_trace import Recorder
from ddp.tracing.chrome_trace import read_parts, trace_events, typical_step
from ddp.tracing.step_picture import draw

__all__ = ["merge", "recording", "start", "stop"]

_running: list[Recorder] = []


def merge(folder: str | os.PathLike[str]) -> str:
    """Merges the parts in that folder into `trace.json` and draws `step.png`. Returns one line that says what it made.

    Ranks that left no part, because they were killed, are left out.
    Raises: ArgumentError if there is no part, or one cannot be read; OSError if the trace cannot be written.
    """
    parts = read_parts(folder)
    path, picture = Path(folder) / "trace.json", Path(folder) / "step.png"
    with atomic_write(path) as file:
        file.write(
            json.dumps({"traceEvents": trace_events(parts), "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
        )
    picture.unlink(missing_ok=True)  # of an older trace
    typical, second = typical_step(parts), ""
    if typical is not None:
        try:
            draw(parts, *typical, picture)
            second = f", {picture}"
        except ImportError:
            second = "; no picture of a step, for matplotlib is not installed (pip install matplotlib)"
    ranks, steps = len(parts), max(len(part.models[0]) for part in parts)
    missing = [str(rank) for rank in range(parts[0].size) if rank not in {part.rank for part in parts}]
    line = f"trace of {ranks} rank{'s' * (ranks != 1)}, {steps} step{'s' * (steps != 1)}: {path}"
    line += f" (open it at ui.perfetto.dev){second}"
    return line + (f"; rank{'s' * (len(missing) > 1)} {', '.join(missing)} left no part" if missing else "")


def start(folder: str | os.PathLike[str]) -> None:
    """Begins to record the steps of all `DataParallel` models of this process, the latest 1,000 of each.

    folder: the same for all ranks; made if it is not there. The parts that an earlier trace left in it are removed
    Raises: ArgumentError if a trace is being recorded already, or the folder cannot be made or written to.
    """
    if _running:
        raise ArgumentError(f"a trace is being recorded to {_running[0].folder} already: call ddp.tracing.stop() first")
    _running.append(Recorder(os.fspath(folder)))


def stop() -> None:
    """Ends recording and writes this process's part; the rank that finds all others' parts there merges them.

    Raises: ArgumentError if no trace is being recorded; OSError if the part cannot be written.
    """
    if not _running:
        raise ArgumentError("no trace is being recorded: call ddp.tracing.start(folder) first")
    running = _running.pop()
    running.stop()
    with contextlib.suppress(ArgumentError):  # no model was wrapped, or another job writes there, too
        parts = read_parts(running.folder)
        if len(parts) == parts[0].size:
            merge(running.folder)


@contextlib.contextmanager
def recording(folder: str | os.PathLike[str]) -> Iterator[None]:
    """`start` and `stop` around a block, also when it raises."""
    start(folder)
    try:
        yield
    finally:
        stop()
