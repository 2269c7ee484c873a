r"""Rank 0's terminal: lines on stdout, and below them on stderr one that says how far the run is.

The bar is `\r` and spaces only, which `ddp-launch` repaints on its own terminal; where stderr is none, there is no bar.
"""

from __future__ import annotations

import sys
import time


class Screen:
    """shown: this is rank 0; bar: stderr is a terminal, in the end; steps: how many `step`s make the whole."""

    def __init__(self, *, shown: bool, bar: bool, steps: int = 1) -> None:
        self._shown = shown
        self._bar = shown and bar
        self._steps = steps
        self._done = 0
        self._start = time.monotonic()
        self._text = ""

    def lines(self, texts: list[str]) -> None:
        """Prints them above the bar."""
        if not self._shown or not texts:
            return
        self._paint("")
        print("\n".join(texts), flush=True)

    def doing(self, what: str) -> None:
        """Says what is measured now."""
        if self._bar:
            self._paint(progress(self._done, self._steps, time.monotonic() - self._start, what))

    def step(self) -> None:
        """One more is done."""
        self._done += 1

    def close(self) -> None:
        """Leaves nothing of the bar."""
        self._paint("")

    def _paint(self, text: str) -> None:
        if self._bar and text != self._text:
            sys.stderr.write("\r" + text.ljust(len(self._text)) + ("" if text else "\r"))
            sys.stderr.flush()
            self._text = text


def progress(done: int, steps: int, seconds: float, what: str) -> str:
    """`progress(3, 12, 6.0, "reduce 1024 B") == "[=====               ]  25%  18 s left  reduce 1024 B"`."""
    full = 20 * done // steps
    left = f"{seconds / done * (steps - done):.0f} s left" if done else "starting"
    return f"[{'=' * full:<20}] {100 * done // steps:3d}%  {left}  {what}"
