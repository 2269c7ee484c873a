"""Signals that ask a job to stop: Slurm sends SIGTERM, or by `--signal` SIGUSR1, a user presses Ctrl-C.

A handler that was there before is called as well; a signal that was ignored, as `nohup` and a shell's background do,
stays ignored."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from collectives.time_limit import peer_failed
from ddp.parallel.control import STOP, PendingRequests

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_TWICE = 0.5  # s; one Ctrl-C may come twice: from the terminal, and from the engine that passes it on


class StopSignals:
    """A context in which a signal becomes this rank's request to stop. In a thread that is not the main one, nothing.

    The second Ctrl-C does what it did before, which by default is to raise KeyboardInterrupt. So does the signal with
    which the launcher ends this rank because another one has failed.
    """

    def __init__(self, requests: PendingRequests) -> None:
        self._requests = requests
        self._before: dict[int, Any] = {}
        self._active = False
        self._interrupted: float | None = None  # when the first Ctrl-C came

    def __enter__(self) -> StopSignals:
        self._active = True
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):  # None: a handler of C code, which cannot be put back
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._active = False
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:  # else another one was installed since
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before, now = self._before.get(number, signal.SIG_DFL), time.monotonic()
        first = self._interrupted
        if number == signal.SIGINT and first is None:
            self._interrupted = now
        again = number == signal.SIGINT and first is not None and now - first > _TWICE
        # Not active: this handler was put back by a later context, which was left after this one.
        # A peer has failed: this step, after which the rank would stop, will not come to its end.
        if not self._active or peer_failed() or again:
            if callable(before):
                before(number, frame)
            else:
                signal.signal(number, before)
                signal.raise_signal(number)
            return
        self._requests.mine[STOP] = True
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
