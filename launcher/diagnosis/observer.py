"""Observers of a job: log files, events, the hang detector.

The event loop tells every observer the same events in the same order. Observers never wait, and do not know each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launcher.diagnosis.failures import Failure, Stop
from launcher.protocol import Message


class Observer:
    """Follows a job. Every method does nothing until overridden; all are called in the one loop, and none may block."""

    def attempt_started(self, number: int, n: int) -> None:
        """Start `number` of the job (0 first) begins, with `n` ranks."""

    def rank_started(self, rank: int, hello: Message) -> None:
        """A rank's agent has connected. hello: its first message (see `launcher.agent.main`)."""

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """What a rank wrote. stream: "out" or "err"; data: any piece of it, not cut into lines"""

    def heartbeat(self, rank: int, beat: Message, now: float) -> None:
        """An agent's word on how its rank does, once a second. now: monotonic, s"""

    def joining(self, rank: int, waits: bool) -> None:
        """A rank waits in `collectives.init` for all others, or no longer."""

    def stacks(self, rank: int, text: str) -> None:
        """The Python stacks of a rank, as requested."""

    def rank_ended(self, rank: int, status: int) -> None:
        """A rank has ended. status: its exit code, or minus the signal that killed it"""

    def failed(self, failure: Failure) -> None:
        """Something went wrong."""

    def stopped(self, stop: Stop) -> None:
        """The attempt is over, since it was asked to stop, and has."""

    def ending(self) -> None:
        """The attempt is being ended, for whatever reason: ranks that end from now on were asked to."""

    def debugging(self, ranks: frozenset[int]) -> None:
        """These ranks are in a debugger now: while there are any, no clock runs."""

    def resumed(self, by: float) -> None:
        """The launcher itself stood still for `by` seconds, and with it the job: they do not count."""

    def tick(self, now: float) -> float:
        """Called whenever the loop turns; returns by when it wants to be called again (monotonic, s; inf: never)."""
        return float("inf")

    def job_ended(self, code: int, text: str) -> None:
        """The job has ended. code: its exit code; text: the sentence that explains it, "" if it went well"""

    def close(self) -> None:
        """Nothing follows."""


class Observers(Observer):
    """Several observers as one: forwards every call to each of them, in order."""

    def __init__(self, each: Sequence[Observer] = ()) -> None:
        self._each = list(each)

    def tick(self, now: float) -> float:
        return min((observer.tick(now) for observer in self._each), default=float("inf"))


def _forwarded(name: str) -> Callable[..., None]:
    def forward(self: Observers, *args: Any) -> None:
        for observer in self._each:
            getattr(observer, name)(*args)

    return forward


for _method in vars(Observer):
    if not _method.startswith("_") and _method != "tick":
        setattr(Observers, _method, _forwarded(_method))
