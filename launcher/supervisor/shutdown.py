"""How a job ends: signals, deadlines, and the order in which ranks are asked to end and then killed."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from typing import Any

from launcher.diagnosis.failures import signal_name
from launcher.diagnosis.observer import Observer
from launcher.protocol import Message
from launcher.supervisor.rank_table import RankTable

# Killed ranks are reported within milliseconds, unless their agent is stopped or gone: then the reaper ends everything.
_KILL_LIMIT = 0.5
# s; one wish may come twice: `timeout` of the coreutils signals its child, and then its child's whole group.
_TWICE = 0.1


class Shutdown:
    """Ends a job. The deadline "kill" is when to call `kill`, "sweep" when the job counts as over, whatever is heard.

    begun: it ends; killed: there is no more asking; stopped: the signal by which the user ended it, else 0
    order: the message for ranks that start late
    """

    def __init__(self, ranks: RankTable, deadlines: Deadlines, observers: Observer) -> None:
        self.begun = self.killed = False
        self.stopped = 0
        self._stopped_at = -math.inf
        self.order: Message | None = None
        self._ranks, self._deadlines, self._observers = ranks, deadlines, observers

    def stop(self, number: int, now: float, grace: float) -> None:
        """The user ends the job by this signal; SIGPIPE: by not reading on."""
        self.stopped, self._stopped_at = number, now
        self.begin(number if number != signal.SIGPIPE else signal.SIGTERM, now, grace)

    def is_same_wish(self, now: float) -> bool:
        """Whether a signal that comes now is the one by which the user has ended the job, once more."""
        return now - self._stopped_at <= _TWICE

    def begin(self, number: int, now: float, grace: float) -> None:
        """The ranks are asked to end, by a signal, and have `grace` seconds for it."""
        if not self.begun:
            self._observers.ending()
        self.begun = True
        self.order = {"signal": number}
        self._deadlines.clear()
        self._deadlines.put("kill", now, grace)
        # A rank that raised or exits is on its way out, through its exit handlers.
        self._ranks.tell(self.order, lambda process: not process.over and not process.leaving)

    def kill(self, now: float, limit: float = _KILL_LIMIT) -> None:
        """No more asking. limit: seconds until the job counts as over, whatever agents report"""
        self.begun = self.killed = True
        self.order = {"kill": True}
        self._deadlines.clear()
        self._deadlines.put("sweep", now, limit)
        self._ranks.tell(self.order, lambda process: not process.over)


# Limits of the job, which do not run while a rank is in a debugger. The others end a job that is over.
_HELD = ("start", "limit", "joining", "stopping")


class Deadlines:
    """What happens when its time comes, by name. Times are monotonic, in seconds.

    stood: for how long the job has stood still
    """

    def __init__(self) -> None:
        self.stood = 0.0
        self._at: dict[str, float] = {}
        self._left: dict[str, float] = {}  # of those that do not run now
        self._held: float | None = None  # since when they do not

    def put(self, name: str, now: float, seconds: float) -> None:
        """So many seconds from now."""
        if self._held is not None and name in _HELD:
            self._left[name] = seconds
        else:
            self._at[name] = now + seconds

    def begin(self, name: str, now: float, seconds: float) -> None:
        """The same, unless it runs already."""
        if name not in self._at and name not in self._left:
            self.put(name, now, seconds)

    def drop(self, name: str) -> None:
        """It matters no more."""
        self._at.pop(name, None)
        self._left.pop(name, None)

    def clear(self) -> None:
        """None of them matters any more."""
        self._at, self._left = {}, {}

    def due(self, now: float) -> set[str]:
        """The names whose time is over."""
        return {name for name, at in self._at.items() if at <= now}

    @property
    def next(self) -> float:
        """When the next one is due; inf if there is none."""
        return min(self._at.values(), default=float("inf"))

    def move(self, by: float) -> None:
        """The job stood still for so long."""
        self._at = {name: at + by for name, at in self._at.items()}
        self.stood += by
        if self._held is not None:
            self._held += by  # or it would count twice

    def hold(self, now: float) -> None:
        """Suspends the limits of the job: a rank is in a debugger."""
        self._held = now
        self._left = {name: self._at.pop(name) - now for name in _HELD if name in self._at}

    def release(self, now: float) -> None:
        """Resumes the limits of the job."""
        assert self._held is not None
        self.stood += now - self._held
        self._held = None
        for name, left in self._left.items():
            self._at[name] = now + left
        self._left = {}


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

    A job that is started outside the main thread hears of none: Python delivers signals only there.
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
