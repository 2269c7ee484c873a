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
from dataclasses import dataclass
from pathlib import Path

from ddp.errors import ArgumentError
from ddp.parallel import step_trace
from ddp.tracing.chrome_trace import chrome_events
from ddp.tracing.step_picture import draw
from ddp.tracing.trace_parts import complete, read_parts, typical_step, write_json

__all__ = ["merge", "recording", "start", "stop"]

_running: list[step_trace.Recorder] = []


@dataclass(frozen=True, kw_only=True)
class MergedTrace:
    """What was made of a folder of parts. trace, picture: paths; no_picture: why there is none

    ranks, steps: how many are in it; missing: the ranks that left no part
    """

    trace: Path
    picture: Path | None
    no_picture: str
    ranks: int
    steps: int
    missing: tuple[int, ...]

    def __str__(self) -> str:
        steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        line = f"trace of {self.ranks} rank{'' if self.ranks == 1 else 's'}, {steps}: {self.trace}"
        line += f" (open it at ui.perfetto.dev), {self.picture}" if self.picture else f"; {self.no_picture}"
        if self.missing:
            missing = ", ".join(map(str, self.missing))
            line += f"; rank{'' if len(self.missing) == 1 else 's'} {missing} left no part"
        return line


def merge(folder: str | os.PathLike[str]) -> MergedTrace:
    """Merges the parts in that folder into `trace.json` and draws `step.png`.

    Ranks that left no part, because they were killed, are left out.
    Raises: ArgumentError if there is no part, or one cannot be read; OSError if the trace cannot be written.
    """
    parts = read_parts(folder)
    path, picture = Path(folder) / "trace.json", Path(folder) / "step.png"
    write_json(path, {"traceEvents": chrome_events(parts), "displayTimeUnit": "ms"})
    picture.unlink(missing_ok=True)  # of an older trace
    step, no_picture = typical_step(parts), ""
    if step is None:
        no_picture = "no picture, for it takes two steps"
    else:
        try:
            draw(step, picture)
        except ImportError:
            no_picture = "no picture of a step, for matplotlib is not installed (pip install matplotlib)"
    return MergedTrace(
        trace=path,
        picture=None if no_picture else picture,
        no_picture=no_picture,
        ranks=len(parts),
        steps=max((len(model) for part in parts for model in part.models), default=0),
        missing=tuple(sorted({*range(parts[0].size)} - {part.rank for part in parts})),
    )


def start(folder: str | os.PathLike[str]) -> None:
    """Begins to record the steps of all `DataParallel` models of this process, the latest 1,000 of each.

    folder: the same for all ranks; made if it is not there, and what an earlier trace left in it is replaced
    Raises: ArgumentError if a trace is being recorded already, or the folder cannot be made or written to.
    """
    if _running:
        raise ArgumentError(f"a trace is being recorded to {_running[0].folder} already: call ddp.tracing.stop() first")
    _running.append(step_trace.start(os.fspath(folder)))


def stop() -> None:
    """Ends recording and writes this process's part; the rank that finds all others' parts there merges them.

    Raises: ArgumentError if no trace is being recorded; OSError if the part cannot be written.
    """
    if not _running:
        raise ArgumentError("no trace is being recorded: call ddp.tracing.start(folder) first")
    running = _running.pop()
    step_trace.stop(running)
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
