"""Signals that ask a job to stop: noted, and acted upon by all ranks after the same step.

Slurm sends SIGTERM, or by `--signal` SIGUSR1, before it takes the machine away; a user presses Ctrl-C. Handlers are
there only while a loop of ours runs. A handler that was there before is called as well; one that was told to ignore a
signal, as `nohup` and a shell's background do, goes on ignoring it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from ddp.parallel.wishes import STOP, Wishes

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_TWICE = 0.5  # s; one Ctrl-C may come twice: from the terminal, and from the engine that passes it on


class Signals:
    """A context in which a signal becomes this rank's wish to stop. In a thread that is not the main one, nothing.

    The second Ctrl-C does what it did before, which by default is to raise KeyboardInterrupt.
    """

    def __init__(self, wishes: Wishes) -> None:
        self._wishes = wishes
        self._before: dict[int, Any] = {}
        self._listening = False
        self._interrupted: float | None = None  # when the first Ctrl-C came

    def __enter__(self) -> Signals:
        self._listening = True
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):  # None: a handler of C code, which nobody could put back
                    self._before[number] = before
                    signal.signal(number, self._heard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listening = False
        for number, before in self._before.items():
            if signal.getsignal(number) == self._heard:  # else somebody has put another one there since
                signal.signal(number, before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if not self._listening:  # it was put back by a later context, which was left after this one
            _again(number, frame, before)
            return
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is not None and now - self._interrupted > _TWICE:
                _again(number, frame, before)
                return
            self._interrupted = now if self._interrupted is None else self._interrupted
        self._wishes.mine[STOP] = True
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def _again(number: int, frame: FrameType | None, before: Callable[..., Any] | Any) -> None:
    """Does what would have been done without us."""
    if callable(before):
        before(number, frame)
    else:
        signal.signal(number, before)
        signal.raise_signal(number)
