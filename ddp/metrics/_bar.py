"""A progress bar for rank 0: tqdm's where that is installed, a plain line otherwise, under tqdm's names.

`ddp-launch` repaints rank 0's bar on its own terminal, so a bar is drawn there though the rank's output is a pipe.
Where nobody repaints, as in the log file of a batch job, its last state alone is printed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ddp.metrics._values import plain, writes

KEEPER = "DDP_KEEPER"  # which a rank of `ddp-launch` finds in its environment
_INTERVAL = 0.1  # seconds between two states of a bar


class ProgressBar:
    """`for batch in ProgressBar(loader, rank=rank)`, or `update()` after each step. Rank 0 draws it, on stderr.

    iterable: what is iterated, on every rank
    total: how many steps there will be; None: the iterable's length, if it has one
    desc, unit: what stands before the numbers, and what is counted; initial: steps that were done before
    rank, comm: this process's rank, or a communicator that has it; one of the two
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        total: int | None = None,
        desc: str = "",
        unit: str = "step",
        initial: int = 0,
        *,
        rank: int | None = None,
        comm: Any = None,
    ) -> None:
        self._iterable = iterable
        self._bar: Any = None
        if writes("ProgressBar", rank, comm):
            if total is None:
                try:
                    total = len(iterable)  # type: ignore[arg-type]  # if it has one
                except TypeError:
                    pass  # there is none, or, as with a loader of a stream, none that is known
            self._bar = _drawn(total, desc, unit, initial)

    def __iter__(self) -> Iterator[Any]:
        try:
            for each in () if self._iterable is None else self._iterable:
                yield each
                self.update()
        finally:
            self.close()

    def update(self, n: int = 1) -> None:
        """`n` more steps are done."""
        if self._bar is not None:
            self._bar.update(n)

    def set_postfix(self, **values: Any) -> None:
        """What stands behind the numbers from now on: `loss=0.25`; tensors and arrays of one element are numbers."""
        if self._bar is not None:
            self._bar.set_postfix({name: plain(value) for name, value in values.items()}, refresh=False)

    def close(self) -> None:
        """Draws the last state, and ends the line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _drawn(total: int | None, desc: str, unit: str, initial: int) -> Any:
    repainted = sys.stderr.isatty() or KEEPER in os.environ
    if repainted:
        try:
            from tqdm import tqdm  # type: ignore[import-untyped,import-not-found,unused-ignore]  # optional, no types
        except ImportError:
            pass  # then a line of our own, below
        else:
            return tqdm(total=total, desc=desc or None, unit=unit, initial=initial, file=sys.stderr)
    return _Line(total, desc, unit, initial, repainted)


class _Line:
    """What a bar needs of tqdm, in one line. repainted: it is drawn as it goes, and not at the end alone."""

    def __init__(self, total: int | None, desc: str, unit: str, initial: int, repainted: bool) -> None:
        self._total, self._desc, self._unit, self._repainted = total, desc, unit, repainted
        self._initial = self._done = initial
        self._begin = self._drawn = time.monotonic()
        self._postfix = ""
        self._width = 0

    def update(self, n: int) -> None:
        self._done += n
        if self._repainted and time.monotonic() - self._drawn >= _INTERVAL:
            self._draw("\r", "")

    def set_postfix(self, values: dict[str, Any], refresh: bool) -> None:
        self._postfix = "".join(
            f", {name}={value:.3g}" if isinstance(value, float) else f", {name}={value}"
            for name, value in values.items()
        )

    def close(self) -> None:
        self._draw("\r" if self._repainted else "", "\n")

    def _draw(self, before: str, after: str) -> None:
        self._drawn = time.monotonic()
        passed = self._drawn - self._begin
        text = state(self._desc, self._initial, self._done, self._total, self._unit, passed) + self._postfix
        sys.stderr.write(before + text.ljust(self._width) + after)
        sys.stderr.flush()
        self._width = len(text)


def state(desc: str, initial: int, done: int, total: int | None, unit: str, seconds: float) -> str:
    """
    >>> state("train", 0, 30, 120, "step", 15.0)
    'train: 30/120 steps (25 %) in 0:15, 2.0 steps/s, 0:45 left'
    >>> state("", 100, 130, None, "step", 60.0)
    '130 steps in 1:00, 0.5 steps/s'
    """
    rate = (done - initial) / seconds if seconds > 0 else 0.0
    parts = [f"{done}/{total} {unit}s ({100 * done // total} %)" if total else f"{done} {unit}s"]
    text = f"{desc}: {parts[0]}" if desc else parts[0]
    text += f" in {_clock(seconds)}, {rate:.1f} {unit}s/s"
    return text + (f", {_clock((total - done) / rate)} left" if total and rate and done < total else "")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
