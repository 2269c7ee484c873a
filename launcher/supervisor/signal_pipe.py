"""Signals to the launcher arrive in its event loop, as bytes on a pipe."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from launcher.diagnosis.failures import signal_name
from launcher.linux import FORWARDED_SIGNALS

#: Ctrl-Z, which suspends the ranks and the launcher.
SUSPENDING = signal.SIGTSTP
# These signals only wake the event loop. After SIGCONT the launcher may be in the foreground again. After SIGWINCH its
# terminal has another size.
_WAKING = (signal.SIGCONT, signal.SIGWINCH)


def name_of(number: int) -> str:
    """The name of a signal that ends the job, in messages to the user."""
    return "Ctrl-C" if number == signal.SIGINT else signal_name(number, hint=False)


def stop_until_continued() -> float:
    """Stops this process until SIGCONT. Returns: for how long it was stopped (s)"""
    start = time.monotonic()
    os.kill(os.getpid(), signal.SIGSTOP)
    return time.monotonic() - start


class SignalPipe:
    """A context manager that gives a file descriptor, on which the number of each signal arrives as a byte.

    If it is entered outside the main thread, no signal arrives: Python handles signals only in the main thread.
    """

    def __enter__(self) -> int:
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        self._handlers: dict[int, Any] = {}
        self._wakeup: int | None = None
        if threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            for number in (*FORWARDED_SIGNALS, SUSPENDING, *_WAKING):
                # Signals that this process ignores stay ignored (nohup, a shell's background job).
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, lambda number, frame: None)
        return self._read

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)
