"""Status line below everything: `ddp-launch: 4/4 ranks up, step 1200, 8.3 steps/s, 3:05`."""

from __future__ import annotations

import math
import time
from collections import deque

from launcher.console.console import Console, ranges
from launcher.diagnosis.observer import Observer
from launcher.protocol import Message

# A job that is over sooner needs no status (s).
_FIRST = 1.0
# Often enough to look alive, seldom enough to be read (s).
_REPAINT = 0.5
# Where it cannot be repainted but is printed, this often (s).
_PRINT = 10.0
# Steps are counted over so many seconds.
_WINDOW = 10.0


def sentence(
    n: int,
    up: int,
    ended: int,
    step: int | None,
    rate: float | None,
    restarts: int,
    seconds: float,
    debugging: frozenset[int] = frozenset(),
    pause: float | None = None,
) -> str:
    """The status line.

    n: ranks that there are to be; up: those that run; ended: those that have ended
    step: that the slowest has reached; rate: steps/s; None: unknown; restarts: so far; seconds: since the job began
    debugging: ranks in a debugger; pause: seconds until the job starts again, None: it runs

    >>> sentence(n=4, up=4, ended=0, step=1200, rate=8.31, restarts=1, seconds=185.0)
    '4/4 ranks up, step 1200, 8.3 steps/s, 1 restart, 3:05'
    """
    if pause is not None:
        return f"restart {restarts + 1} in {math.ceil(pause)} s, {clock(seconds)}"
    words = [f"{up}/{n} {'rank' if n == 1 else 'ranks'} up"]
    if ended:
        words.append(f"{ended} ended")
    if step is not None:
        words.append(f"step {step}")
    if rate is not None:
        words.append(_rate(rate))
    if debugging:
        words.append(f"{'rank' if len(debugging) == 1 else 'ranks'} {ranges(debugging)} in a debugger")
    if restarts:
        words.append(f"{restarts} {'restart' if restarts == 1 else 'restarts'}")
    return ", ".join([*words, clock(seconds)])


def clock(seconds: float) -> str:
    """
    >>> clock(5.9), clock(185), clock(3600), clock(90061)
    ('0:05', '3:05', '1:00:00', '25:01:01')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _rate(rate: float) -> str:
    if rate >= 100:
        return f"{rate:.0f} steps/s"
    if rate >= 0.1 or rate == 0:
        return f"{rate:.1f} steps/s"
    return f"{1 / rate:.0f} s/step"


class StepRate:
    """Steps per second, over the latest few seconds.

    >>> step_rate = StepRate()
    >>> for second in range(4): step_rate.add(step=100 + 8 * second, now=float(second))
    >>> step_rate.rate
    8.0
    """

    def __init__(self, window: float = _WINDOW) -> None:
        self._window = window
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, step: int, now: float) -> None:
        """`step` had been reached at `now` (s)."""
        if self._samples and step < self._samples[-1][1]:
            self._samples.clear()  # it counts anew
        self._samples.append((now, step))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window:
            self._samples.popleft()

    def clear(self) -> None:
        """What was is no measure any more."""
        self._samples.clear()

    @property
    def rate(self) -> float | None:
        """Steps per second; None while two samples do not exist that are a moment apart."""
        if len(self._samples) < 2:
            return None
        (began, first), (now, last) = self._samples[0], self._samples[-1]
        return (last - first) / (now - began) if now - began >= 0.5 else None


class StatusLine(Observer):
    """Shows the status line on a console, and keeps it up to date."""

    def __init__(self, console: Console, now: float | None = None) -> None:
        self._console = console
        self._began = time.monotonic() if now is None else now
        self._next = self._began + (_FIRST if console.repaints else _PRINT)
        self._every = _REPAINT if console.repaints else _PRINT
        self._restarts = self._n = 0
        self._debugging: frozenset[int] = frozenset()
        self._forget()

    def _forget(self) -> None:
        self._up: set[int] = set()
        self._ended: set[int] = set()
        self._steps: dict[int, int] = {}
        self._step_rate = StepRate()
        self._restart_at: float | None = None

    def attempt_started(self, number: int, n: int) -> None:
        self._restarts, self._n = number, n
        self._forget()

    def rank_started(self, rank: int, hello: Message) -> None:
        self._up.add(rank)

    def rank_ended(self, rank: int, status: int) -> None:
        self._ended.add(rank)
        self._steps.pop(rank, None)

    def heartbeat(self, rank: int, beat: Message, now: float) -> None:
        if beat.get("step") is not None:
            self._steps[rank] = int(beat["step"])
            if rank == min(self._steps):  # one rank's samples are evenly spaced; all ranks take the same steps
                self._step_rate.add(self._steps[rank], now)

    def debugging(self, ranks: frozenset[int]) -> None:
        self._debugging = ranks
        self._step_rate.clear()

    def resumed(self, by: float) -> None:
        self._step_rate.clear()
        if self._restart_at is not None:
            self._restart_at += by

    def restart_pending(self, until: float) -> None:
        self._restart_at = until

    def tick(self, now: float) -> float:
        if now >= self._next:
            self._next = now + self._every
            # When all have ended, what comes is the engine's end, in a moment.
            something = len(self._ended) < self._n or self._restart_at is not None
            self._console.status(f"ddp-launch: {self._sentence(now)}" if something else "")
        return self._next

    def _sentence(self, now: float) -> str:
        return sentence(
            n=self._n,
            up=len(self._up - self._ended),
            ended=len(self._ended),
            step=min(self._steps.values(), default=None),
            rate=self._step_rate.rate,
            restarts=self._restarts,
            seconds=now - self._began,
            debugging=self._debugging,
            pause=None if self._restart_at is None else max(0.0, self._restart_at - now),
        )
