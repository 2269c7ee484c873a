"""Signals that ask a job to stop: SIGTERM from Slurm, or SIGUSR1 with its option `--signal`; Ctrl-C from a user.

A handler that the program has installed before is called as well. A signal that is ignored, as under `nohup` or in a
shell's background job, stays ignored."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

from collectives.time_limit import peer_failed
from ddp.parallel.control import STOP, PendingRequests

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A second SIGINT within this time (s) counts as the same Ctrl-C: the terminal and the launching engine both send one.
_TWICE = 0.5


class StopSignals:
    """A context in which each of `SIGNALS` sets this rank's request to stop.

    It has no effect outside the main thread. A second Ctrl-C is handled by the earlier handler, which by default raises
    KeyboardInterrupt. After another rank has failed, the signal with which the launcher ends this rank goes to the
    earlier handler alone.
    """

    def __init__(self, requests: PendingRequests) -> None:
        self._requests = requests
        self._previous: dict[int, Any] = {}  # the earlier handlers, by signal
        self._active = False
        self._interrupted: float | None = None  # time of the first Ctrl-C

    def __enter__(self) -> StopSignals:
        self._active = True
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                previous = signal.getsignal(number)
                if previous not in (signal.SIG_IGN, None):  # None: a handler of C code, which cannot be restored
                    self._previous[number] = previous
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self._active = False
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:  # otherwise the program has installed another one meanwhile
                signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number, signal.SIG_DFL)
        second = False
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
            second = now - self._interrupted > _TWICE
        # Not active: this context was left before a newer one, which then installed this handler again.
        # A peer has failed: a stop waits for the end of the current step, which will not come.
        if not self._active or peer_failed() or second:
            if callable(previous):
                previous(number, frame)
            else:
                signal.signal(number, previous)
                signal.raise_signal(number)
            return
        self._requests.requested[STOP] = True
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
