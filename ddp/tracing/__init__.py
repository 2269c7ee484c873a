"""Records compute, communication and waiting of every rank on one clock, for chrome://tracing and Perfetto.

    with ddp.tracing.recording("trace"):        # every rank
        for batch in loader: ...

Each rank writes its part into the folder. The last rank to finish merges the parts into `trace.json` (open it at
ui.perfetto.dev) and, if matplotlib is installed, draws one typical step of all ranks as `step.png`. `ddp-launch --trace
DIR` does the same without a change to the script. The environment variable DDP_TRACE only makes ranks write their
parts, and `python -m ddp.tracing DIR` merges the parts in a folder.

All times are taken on the host: on a GPU, when the host submitted the work, not when the device did it.
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
    """Merges the parts in a folder into `trace.json`. Draws `step.png` if matplotlib is installed.

    `step.png` is not drawn if no step has a known length. Ranks without a part, as after a crash, are left out.

    Returns: a line that names these files, and the ranks without a part
    Raises: ArgumentError if there is no part, one is invalid, or they are of several jobs; OSError if a file cannot be
    read or written.
    """
    parts = read_parts(folder)
    path = Path(folder) / "trace.json"
    picture = Path(folder) / "step.png"
    trace = {"traceEvents": trace_events(parts), "displayTimeUnit": "ms"}
    with atomic_write(path) as file:
        file.write(json.dumps(trace, separators=(",", ":")).encode())
    picture.unlink(missing_ok=True)  # of an older trace
    typical = typical_step(parts)
    drawn = ""
    if typical is not None:
        try:
            draw(parts, *typical, picture)
            drawn = f", {picture}"
        except ImportError:
            drawn = "; no picture of a step, for matplotlib is not installed (pip install matplotlib)"
    ranks = [part.rank for part in parts]
    steps = max(len(part.models[0]) for part in parts)
    missing = [rank for rank in range(parts[0].size) if rank not in ranks]
    line = f"trace of {len(ranks)} rank{'s' * (len(ranks) != 1)}, {steps} step{'s' * (steps != 1)}: {path}"
    line += f" (open it at ui.perfetto.dev){drawn}"
    if not missing:
        return line
    return f"{line}; rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} left no part"


def start(folder: str | os.PathLike[str]) -> None:
    """Begins to record the steps of all `DataParallel` models of this process, the latest 1,000 of each.

    folder: the same for all ranks; made if it does not exist. The parts of an earlier trace in it are removed
    Raises: ArgumentError if a trace is being recorded already, or the folder cannot be made or written to.
    """
    if _running:
        raise ArgumentError(f"a trace is being recorded to {_running[0].folder} already: call ddp.tracing.stop() first")
    _running.append(Recorder(os.fspath(folder)))


def stop() -> None:
    """Ends recording and writes this process's part. The last rank to do so merges the parts of all ranks.

    Raises: ArgumentError if no trace is being recorded; OSError if a file cannot be read or written.
    """
    if not _running:
        raise ArgumentError("no trace is being recorded: call ddp.tracing.start(folder) first")
    recorder = _running.pop()
    recorder.stop()
    with contextlib.suppress(ArgumentError):  # no model was wrapped, or another job uses the folder, too
        parts = read_parts(recorder.folder)
        if len(parts) == parts[0].size:
            merge(recorder.folder)


@contextlib.contextmanager
def recording(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Calls `start` before a block, and `stop` after it, even if the block raises."""
    start(folder)
    try:
        yield
    finally:
        stop()
