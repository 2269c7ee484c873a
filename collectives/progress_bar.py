"""Progress of long work, shown by tqdm: a bar on a terminal, a line now and then in a log; on one rank only.

tqdm is imported when the first bar is made, since the import takes a tenth of a second.
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

# Seconds between two lines in a log.
_LOG_INTERVAL = 10.0


class _Stream:
    """A wrapper of `file` that ignores write errors: a full disk must not end the work whose progress is shown.

    lines: write each state of a bar as a line of its own
    """

    def __init__(self, file: TextIO | None, lines: bool) -> None:
        self._file = file
        self._lines = lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __eq__(self, other: object) -> bool:
        return self._file == other  # `tqdm.write` finds the bars on stderr by `==`.

    __hash__ = object.__hash__

    def write(self, text: str) -> None:
        if self._lines:
            text = f"{text.strip()}\n" if text.strip() else ""
        with contextlib.suppress(OSError, ValueError):  # ValueError: the file is closed.
            self._file.write(text)  # type: ignore[union-attr]  # Without a file the bar is disabled.

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()  # type: ignore[union-attr]


@functools.cache
def _bar_class() -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # tqdm starts no monitor thread.

    Bar.set_lock(threading.RLock())  # tqdm's default lock would fix the start method of multiprocessing.
    return Bar


def columns() -> int:
    r"""The line width of the terminal that shows stderr; 0 if there is none, or if `\r` does not repaint its lines.

    The terminal is stderr itself, or that of ddp-launch. Then the width excludes the prefix that ddp-launch prints.
    """
    if os.environ.get("TERM") == "dumb" or sys.stderr is None:
        return 0
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        # ddp-launch sets COLUMNS and LINES if it has a terminal.
        width = os.environ.get("COLUMNS", "")
        return int(width) if width.isdigit() and world.supervised() and "LINES" in os.environ else 0


def progress_bar(
    steps: Iterable[Any] | None = None, *, rank: int | None = None, log: bool = True, delay: float = 0.0, **options: Any
) -> Any:
    """A tqdm bar over `steps`, or over `total=` units that `update(n)` counts; shown on rank 0, on stderr.

    rank: this process's rank; None: the one that its engine gave it, 0 without an engine
    log: what to print if no terminal shows stderr. True: a line at most every 10 s and, unless `leave=False`, one at
        the end; False: nothing
    delay: seconds before anything is shown; with a delay, a log gets no lines for work that takes less than 10 s
    options: passed on to tqdm

        with progress_bar(loader, unit="step") as bar:
            for x, y in bar:
                bar.set_postfix(loss=train(x, y), refresh=False)
    """
    expected = world.world_from_env() if rank is None else None
    visible = sys.stderr is not None and (expected.rank if expected is not None else rank or 0) == 0
    options = {"delay": delay, "miniters": 1, **options}  # miniters=1: later steps may be slower than the first.
    if (width := columns()) or not visible or not log:
        disable = not visible or not width
        dynamic = not disable and sys.stderr.isatty()
        file = _Stream(sys.stderr, lines=False)
        return _bar_class()(steps, file=file, disable=disable, ncols=width - 1, dynamic_ncols=dynamic, **options)
    # Without a delay tqdm would begin with a line at 0 %.
    options["delay"] = delay or _LOG_INTERVAL
    bar = _bar_class()(steps, file=_Stream(sys.stderr, lines=True), mininterval=_LOG_INTERVAL, **options)
    bar.delay = delay
    return bar
