"""Observers of a job: console, log files, events, hang detector and others.

The event loop reports the same events to every observer, in the same order. Observers never block. Some print by means
of the console, which is an observer itself, and the metrics server reads the figures of `Status`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launcher.diagnosis.failures import Failure, Stop
from launcher.protocol import Message


class Observer:
    """Follows a job. Every method does nothing until it is overridden. The event loop calls them; none may block."""

    def attempt_started(self, number: int, n: int) -> None:
        """An attempt to run the job begins. number: 0 for the first; n: its number of ranks"""

    def rank_started(self, rank: int, hello: Message) -> None:
        """A rank's agent has connected. hello: its first message (see `launcher.agent.main`)."""

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """A rank has written something. stream: "out" or "err"; data: as it was read, not split into lines"""

    def heartbeat(self, rank: int, beat: Message, now: float) -> None:
        """An agent has sent a heartbeat: it sends one a second. beat: see `RankReader.heartbeat`; now: monotonic, s"""

    def joining(self, rank: int, waits: bool) -> None:
        """A rank begins to wait for all others in `collectives.init`, or no longer waits."""

    def stacks(self, rank: int, text: str) -> None:
        """A rank has sent its Python stacks, as it was asked to."""

    def rank_ended(self, rank: int, status: int) -> None:
        """A rank has ended. status: its exit code, or minus the signal that killed it"""

    def failed(self, failure: Failure) -> None:
        """Something went wrong."""

    def stopped(self, stop: Stop) -> None:
        """The attempt is over, because the job was asked to stop. stop: how it stopped"""

    def ending(self) -> None:
        """The launcher begins to end the attempt, for whatever reason. Ranks that end from now on have not failed."""

    def debugging(self, ranks: frozenset[int]) -> None:
        """The set of ranks in a debugger has changed. The job's clock is stopped while `ranks` is not empty."""

    def resumed(self, seconds: float) -> None:
        """The launcher and the job were stopped for the last `seconds`. They do not count as job time."""

    def tick(self, now: float) -> float:
        """Called before each wait for events. Returns: when it must be called again at the latest (monotonic, s)"""
        return float("inf")

    def job_ended(self, code: int, text: str) -> None:
        """The job has ended. code: its exit code; text: the sentence that explains it, "" if it succeeded"""

    def close(self) -> None:
        """Releases what the observer holds. No other call follows."""


class Observers(Observer):
    """Several observers as one: forwards every call to each of them, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def tick(self, now: float) -> float:
        return min((observer.tick(now) for observer in self._observers), default=float("inf"))


def _forwarded(name: str) -> Callable[..., None]:
    def forward(self: Observers, *args: Any) -> None:
        for observer in self._observers:
            getattr(observer, name)(*args)

    return forward


for _method in vars(Observer):
    if not _method.startswith("_") and _method != "tick":
        setattr(Observers, _method, _forwarded(_method))
