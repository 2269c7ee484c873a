"""Who follows a job besides the loop that runs it: log files, events, the status line, the judge of hangs.

The loop tells every observer the same facts in the same order; observers never wait, and know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.judging.stopping import Stop
from launcher.judging.verdict import Fact
from launcher.wire import Message


class Observer:
    """Follows a job. Every method does nothing until overridden; all are called in the one loop, and none may block."""

    def attempt(self, number: int, n: int) -> None:
        """Start `number` of the job (0 first) begins, with `n` ranks."""

    def up(self, rank: int, hello: Message) -> None:
        """A rank's keeper has come. hello: what it says of itself (see `launcher.keeper`)."""

    def said(self, rank: int, stream: str, data: bytes) -> None:
        """What a rank wrote. stream: "out" or "err"; data: as it came, not cut into lines"""

    def noted(self, rank: int, name: str, data: bytes) -> None:
        """What a library of a rank wrote to a file of its own. name: "nccl"; data: as it came, not cut into lines"""

    def beat(self, rank: int, beat: Message, now: float) -> None:
        """A keeper's word on how its rank does, once a second. now: monotonic, s"""

    def joining(self, rank: int, waits: bool) -> None:
        """A rank waits in `collectives.init` for all others, or no longer."""

    def stacks(self, rank: int, text: str) -> None:
        """The Python stacks of a rank, which somebody had asked for."""

    def ended(self, rank: int, status: int) -> None:
        """A rank has ended. status: its exit code, or minus the signal that killed it"""

    def failed(self, fact: Fact) -> None:
        """Something went wrong."""

    def stopped(self, stop: Stop) -> None:
        """The attempt is over, since it was asked to stop, and has."""

    def ending(self) -> None:
        """The attempt is being ended, for whatever reason: ranks that end from now on were told to."""

    def debugging(self, ranks: frozenset[int]) -> None:
        """These ranks are in a debugger now: while there are any, no clock runs."""

    def moved(self, by: float) -> None:
        """The launcher itself stood still for `by` seconds, and with it the job: they do not count."""

    def waiting(self, until: float) -> None:
        """The attempt has failed; the next one starts at `until` (monotonic, s)."""

    def turn(self, now: float) -> float:
        """Called whenever the loop turns; returns by when it wants to be called again (monotonic, s; inf: never)."""
        return float("inf")

    def over(self, code: int, text: str) -> None:
        """The job has ended. code: its exit code; text: the sentence that explains it, "" if it went well"""

    def close(self) -> None:
        """Nothing follows."""


class Observers(Observer):
    """Several, as one."""

    def __init__(self, each: Sequence[Observer] = ()) -> None:
        self._each = list(each)

    def attempt(self, number: int, n: int) -> None:
        for observer in self._each:
            observer.attempt(number, n)

    def up(self, rank: int, hello: Message) -> None:
        for observer in self._each:
            observer.up(rank, hello)

    def said(self, rank: int, stream: str, data: bytes) -> None:
        for observer in self._each:
            observer.said(rank, stream, data)

    def noted(self, rank: int, name: str, data: bytes) -> None:
        for observer in self._each:
            observer.noted(rank, name, data)

    def beat(self, rank: int, beat: Message, now: float) -> None:
        for observer in self._each:
            observer.beat(rank, beat, now)

    def joining(self, rank: int, waits: bool) -> None:
        for observer in self._each:
            observer.joining(rank, waits)

    def stacks(self, rank: int, text: str) -> None:
        for observer in self._each:
            observer.stacks(rank, text)

    def ended(self, rank: int, status: int) -> None:
        for observer in self._each:
            observer.ended(rank, status)

    def failed(self, fact: Fact) -> None:
        for observer in self._each:
            observer.failed(fact)

    def stopped(self, stop: Stop) -> None:
        for observer in self._each:
            observer.stopped(stop)

    def ending(self) -> None:
        for observer in self._each:
            observer.ending()

    def debugging(self, ranks: frozenset[int]) -> None:
        for observer in self._each:
            observer.debugging(ranks)

    def moved(self, by: float) -> None:
        for observer in self._each:
            observer.moved(by)

    def waiting(self, until: float) -> None:
        for observer in self._each:
            observer.waiting(until)

    def turn(self, now: float) -> float:
        return min((observer.turn(now) for observer in self._each), default=float("inf"))

    def over(self, code: int, text: str) -> None:
        for observer in self._each:
            observer.over(code, text)

    def close(self) -> None:
        for observer in self._each:
            observer.close()
