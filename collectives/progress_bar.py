"""Progress of long work, by tqdm: on a terminal a bar, in a log a line now and then; on one rank.

tqdm is imported where a bar is made, since its import takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any, TextIO

from collectives import world

_EVERY = 10.0  # s; between two lines in a log


class _Stream:
    """`file` without its errors: a full disk must not end the work of which a bar tells.

    lines: each state of a bar is a line of its own
    """

    def __init__(self, file: TextIO | None, lines: bool) -> None:
        self._file, self._lines = file, lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __eq__(self, other: object) -> bool:
        return self._file == other  # `tqdm.write` looks for the bars of stderr

    __hash__ = object.__hash__

    def write(self, text: str) -> None:
        if self._lines:
            text = f"{text.strip()}\n" if text.strip() else ""
        with contextlib.suppress(OSError, ValueError):  # the latter of a closed file
            self._file.write(text)  # type: ignore[union-attr]  # without a file the bar is disabled

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()  # type: ignore[union-attr]


@functools.cache
def _bar_class() -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread of its own

    Bar.set_lock(threading.RLock())  # tqdm's own would settle how multiprocessing starts processes
    return Bar


def columns() -> int:
    r"""Width of the terminal on which `\r` repaints a line of stderr: its own, or ddp-launch's; 0 if there is none."""
    if os.environ.get("TERM") == "dumb" or sys.stderr is None:
        return 0
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        # ddp-launch sets both where it has a terminal.
        width = os.environ.get("COLUMNS", "")
        return int(width) if width.isdigit() and world.supervised() and "LINES" in os.environ else 0


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
    place = world.promised() if rank is None else None
    shown = sys.stderr is not None and (place.rank if place is not None else rank or 0) == 0
    options = {"delay": delay, "miniters": 1, **options}  # 1: steps may become slower
    if (width := columns()) or not shown or not log:
        disable = not shown or not width
        dynamic = not disable and sys.stderr.isatty()
        file = _Stream(sys.stderr, lines=False)
        return _bar_class()(steps, file=file, disable=disable, ncols=width - 1, dynamic_ncols=dynamic, **options)
    # Without a delay tqdm would begin with a line that says 0 %.
    options["delay"] = delay or _EVERY
    bar = _bar_class()(steps, file=_Stream(sys.stderr, lines=True), mininterval=_EVERY, **options)
    bar.delay = delay
    return bar
