"""The parts of all ranks become one trace and one picture."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp._files import atomic_write
from ddp.errors import ArgumentError
from ddp.tracing.events import chrome_events
from ddp.tracing.parts import Part, read_parts
from ddp.tracing.picture import draw
from ddp.tracing.typical import typical_step

TRACE, PICTURE = "trace.json", "step.png"


@dataclass(frozen=True, kw_only=True)
class Merged:
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


def complete(folder: str | os.PathLike[str]) -> bool:
    """True if every rank of the newest job has written its part."""
    try:
        parts = read_parts(Path(folder))
    except ArgumentError:
        return False
    return len(parts) == parts[0].size


def merge(folder: str | os.PathLike[str]) -> Merged:
    """Merges the parts in that folder into `trace.json` and draws `step.png`.

    Ranks that left no part, because they were killed, are left out.
    Raises: ArgumentError if there is no part, or one cannot be read; OSError if the trace cannot be written.
    """
    folder = Path(folder)
    parts = read_parts(folder)
    trace = folder / TRACE
    document = {"traceEvents": chrome_events(parts), "displayTimeUnit": "ms"}
    with atomic_write(trace) as file:
        file.write(json.dumps(document, separators=(",", ":")).encode())
    there = {part.rank for part in parts}
    no_picture = _draw(parts, folder / PICTURE)
    return Merged(
        trace=trace,
        picture=None if no_picture else folder / PICTURE,
        no_picture=no_picture,
        ranks=len(parts),
        steps=max((len(model) for part in parts for model in part.models), default=0),
        missing=tuple(rank for rank in range(parts[0].size) if rank not in there),
    )


def _draw(parts: Sequence[Part], path: Path) -> str:
    """Draws one step; says why there is no picture, or nothing."""
    path.unlink(missing_ok=True)  # of an older trace
    step = typical_step(parts)
    if step is None:
        return "no picture, for it takes two steps"
    try:
        draw(step, path)
    except ImportError:
        return "no picture of a step, for matplotlib is not installed (pip install matplotlib)"
    return ""
