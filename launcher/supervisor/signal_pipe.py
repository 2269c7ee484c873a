"""Signals to the launcher: they arrive in its event loop as bytes on a pipe."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from launcher.diagnosis.failures import signal_name

#: What ends a job, and is passed on to its ranks.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: What the user means for the ranks alone.
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
#: Ctrl-Z, after which the job stands still as the launcher does.
SUSPENDING = signal.SIGTSTP
# Back in the foreground, or in another window: time to look again.
_WAKING = (signal.SIGCONT, signal.SIGWINCH)


def name_of(number: int) -> str:
    """What the user calls a signal that ends a job."""
    return "Ctrl-C" if number == signal.SIGINT else signal_name(number, hint=False)


def stand_still() -> float:
    """Stops this process until SIGCONT; returns for how long that was (s)."""
    before = time.monotonic()
    os.kill(os.getpid(), signal.SIGSTOP)
    return time.monotonic() - before


class SignalPipe:
    """While entered, each signal's number arrives as a byte on the descriptor that `with` gives.

    A job that is started outside the main thread gets none: Python delivers signals only there.
    """

    def __enter__(self) -> int:
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            for number in (*ENDING, *FORWARDED, SUSPENDING, *_WAKING):
                # What is ignored (nohup, a shell's background job) stays ignored.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, lambda number, frame: None)
        return self._read

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._handlers:
            signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)
