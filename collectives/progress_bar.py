"""Progress of long work, by tqdm: on a terminal a bar, in a log a line now and then; on one rank.

tqdm is imported where a bar is made, since its import takes a tenth of a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from collectives import world

_EVERY = 10.0  # s; between two lines in a log


class _Lines:
    """`file`, which gets each state of a bar as a line of its own."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        if state := text.strip():
            self._file.write(f"{state}\n")


def columns() -> int:
    r"""Width of the terminal on which `\r` repaints a line of stderr: its own, or ddp-launch's; 0 if there is none."""
    if os.environ.get("TERM") == "dumb":
        return 0
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        # ddp-launch sets both where it has a terminal.
        return int(os.environ["COLUMNS"]) if world.supervised() and "LINES" in os.environ else 0


def progress_bar(
    steps: Iterable[Any] | None = None, *, rank: int | None = None, log: bool = True, delay: float = 0.0, **options: Any
) -> Any:
    """tqdm's bar over `steps`, or over `total=` units that `update(n)` counts, on rank 0; it writes to stderr.

    rank: this process's; None: what the engine that started it says
    log: where stderr is no terminal: a line every 10 s and, unless `leave=False`, at the end; False: nothing
    delay: seconds during which nothing is shown; a log has no lines of work that takes less than 10 s then
    options: tqdm's others

        with progress_bar(loader, unit="step") as bar:
            for x, y in bar:
                bar.set_postfix(loss=train(x, y), refresh=False)
    """
    from tqdm import tqdm

    place = world.promised() if rank is None else None
    shown = (place.rank if place is not None else rank or 0) == 0
    options = {"delay": delay, "miniters": 1, **options}  # 1: steps may become slower
    if (width := columns()) or not shown or not log:
        disable, dynamic = not shown or not width, sys.stderr.isatty()
        return tqdm(steps, disable=disable, ncols=width - 1, dynamic_ncols=dynamic, **options)
    # Without a delay tqdm would begin with a line that says 0 %.
    bar = tqdm(steps, file=_Lines(sys.stderr), mininterval=_EVERY, **{**options, "delay": delay or _EVERY})
    bar.delay = delay
    return bar
