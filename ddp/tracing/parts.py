"""The parts that ranks have written, read back on one clock: rank 0's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp.errors import ArgumentError
from ddp.parallel.timeline import Contents, Step
from ddp.parallel.timeline.recorder import FORMAT, SUFFIX

_SETTLED = 64  # steps after which the offset of a clock is known as well as it will be


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank recorded. models: the steps of each model, times in nanoseconds of rank 0's clock.

    host: the rank's machine; size: how many ranks there were; started, written: seconds since 1970
    """

    rank: int
    size: int
    host: str
    started: float
    written: float
    models: tuple[tuple[Step, ...], ...]


def read_parts(folder: Path) -> list[Part]:
    """The parts of the newest job in that folder, in rank order. Parts that an older one has left are not taken.

    Raises: ArgumentError if there is none, or one is not what a rank writes.
    """
    parts = [_read(path) for path in sorted(folder.glob(f"rank-*{SUFFIX}"))]
    if not parts:
        raise ArgumentError(f"there is no trace in {folder}: no rank has written a part (rank-0{SUFFIX}, ...)")
    return sorted(newest(parts), key=lambda part: part.rank)


def newest(parts: Sequence[Part]) -> list[Part]:
    """Those of one job: its ranks ran at the same time, so none had ended before another began."""
    last = max(parts, key=lambda part: part.written)
    return [part for part in parts if part.size == last.size and part.written >= last.started]


def _read(path: Path) -> Part:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}")
        return Part(
            rank=int(found["rank"]),
            size=int(found["size"]),
            host=str(found["host"]),
            started=float(found["started"]),
            written=float(found["written"]),
            models=tuple(_steps(model) for model in found["models"]),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ArgumentError(f"{path} is no part of a trace that this version can read: {error}") from None


def _steps(model: dict[str, Any]) -> tuple[Step, ...]:
    contents = [
        Contents(names=tuple(map(tuple, each["names"])), nbytes=tuple(each["nbytes"])) for each in model["contents"]
    ]
    offsets = [step["offset"] for step in model["steps"]]
    steps = []
    for place, step in enumerate(model["steps"]):
        # Before enough messages were heard the offset was known badly, or not at all.
        offset = offsets[min(max(place, _SETTLED), len(offsets) - 1)]

        def moved(times: Any, offset: int = offset) -> Any:
            return None if times is None else (times[0] - offset, times[1] - offset)

        steps.append(
            Step(
                number=step["number"],
                forward=moved(step["forward"]),
                begun=step["begun"] - offset,
                computed=step["computed"] - offset,
                ended=step["ended"] - offset,
                control=moved(step["control"]),
                ready=[time - offset for time in step["ready"]],
                times=[moved(times) for times in step["times"]],
                contents=contents[step["contents"]],
            )
        )
    return tuple(steps)
