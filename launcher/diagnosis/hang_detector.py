"""Hang detector: follows the heartbeats, warns at half the limit, and ends a job that makes no progress.

`launcher.diagnosis.liveness` decides what counts as progress, `launcher.diagnosis.hang_diagnosis` which ranks are to
blame; here is when to report it, and how the ranks' stacks are collected before they end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from launcher.diagnosis.failures import Failure, HeartbeatLost, Hung, duration, may_follow_a_loss, name_ranks
from launcher.diagnosis.job_clock import JobClock
from launcher.diagnosis.liveness import SILENCE, Liveness, RankState
from launcher.diagnosis.observer import Observer
from launcher.protocol import Message, to_bytes

if TYPE_CHECKING:
    from pathlib import Path

# A rank that has not written its stacks by then (s) is stopped, or does not handle signals.
_STACKS_LIMIT = 2.0
# Lines of a stack, the innermost ones, where there is no log folder to put the whole into.
_LINES = 15
_NEVER = float("inf")


class ConsoleLike(Protocol):
    """What the hang detector needs of a console."""

    @property
    def backlogged(self) -> bool:
        """The launcher reads nothing from ranks, because its own output is not read."""

    def say(self, text: str, quoted: str = "") -> None:
        """Prints a sentence of the launcher's own, and what it quotes."""


class AttemptLike(Protocol):
    """What the hang detector needs of an attempt to run the job: see `launcher.supervisor.attempt.Attempt`."""

    def ask_stacks(self) -> None: ...
    def fail(self, failure: Failure) -> None: ...
    def stopped_engine(self) -> str: ...


class HangDetector(Observer):
    """Watches over a job of `n` ranks.

    limit: seconds without progress after which the job hangs
    heartbeat: seconds without a message of a rank's agent after which that rank is lost
    folder: returns where stacks are written; None: those of the culprits go to the console, shortened
    attempt: returns that which runs now; clock: monotonic, s
    """

    def __init__(
        self,
        n: int,
        limit: float,
        heartbeat: float,
        console: ConsoleLike,
        folder: Callable[[], Path | None],
        attempt: Callable[[], AttemptLike],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._heartbeat = limit, heartbeat
        self._console = console
        self._folder = folder
        self._attempt = attempt
        self._clock = clock
        self._job_clock = JobClock()
        self._debugging = False
        self._begin(n)

    def _begin(self, n: int) -> None:
        self._liveness = Liveness(n, self._at)
        self._over = False
        self._next = 0.0  # when to look again
        self._warned: float | None = None  # since when nothing moved, once that has been reported
        self._hung: list[RankState] = []  # the ranks when the job was found to hang
        self._hung_for = 0.0  # s
        self._asked_at = 0.0  # when they were asked for their stacks
        self._stacks: dict[int, str] = {}

    @property
    def _at(self) -> float:
        """The time without that in which the job stood still."""
        return self._job_clock.at(self._clock())

    # -- events

    def attempt_started(self, number: int, n: int) -> None:
        self._debugging = False
        self._begin(n)

    def rank_started(self, rank: int, hello: Message) -> None:
        self._liveness.rank_started(rank, hello, self._at)

    def rank_ended(self, rank: int, status: int) -> None:
        self._liveness.rank_ended(rank, self._at)

    def output(self, rank: int, stream: str, data: bytes) -> None:
        self._liveness.output(rank, self._at)

    def heartbeat(self, rank: int, beat: Message, now: float) -> None:
        self._liveness.heartbeat(rank, beat, self._at)

    def joining(self, rank: int, waits: bool) -> None:
        self._liveness.joining(rank, waits, self._at)

    def stacks(self, rank: int, text: str) -> None:
        self._stacks[rank] = text

    def failed(self, failure: Failure) -> None:
        if not self._over and may_follow_a_loss(failure):
            self._report_lost(SILENCE)
        self._over = True  # it will be ended

    def ending(self) -> None:
        self._over = True

    def job_ended(self, code: int, text: str) -> None:
        self._over = True

    def debugging(self, ranks: frozenset[int]) -> None:
        self._debugging = bool(ranks)

    def resumed(self, by: float) -> None:
        self._job_clock.skip(by)

    def tick(self, now: float) -> float:
        if self._debugging or self._console.backlogged:
            self._job_clock.hold(now)
        else:
            self._job_clock.release(now)
        if self._over:
            return _NEVER
        if self._hung:
            return self._gather_stacks(now)
        if now >= self._next:
            self._next = now + self._look()
        return self._next

    # -- what is made of them

    def _look(self) -> float:
        """Looks for lost ranks and for a hang; returns in how many seconds to look again."""
        self._report_lost(self._heartbeat)
        if self._over:
            return _NEVER
        at = self._at
        quiet, half = self._liveness.quiet(at), self._limit / 2
        if quiet >= self._limit:
            # To be asked for its stacks wakes a rank that sleeps: what counts is what was seen before.
            self._hung, self._hung_for, self._asked_at = self._liveness.ranks(at), quiet, self._clock()
            self._console.say(f"nothing has moved for {duration(quiet)}")
            self._attempt().ask_stacks()
            return 0.0
        if quiet < half:
            if self._warned is not None:
                self._console.say(f"it moves again, after {duration(at - quiet - self._warned)}")
                self._warned = None
            return min(half - quiet, 1.0)
        if self._warned is None:
            from launcher.diagnosis.hang_diagnosis import diagnose_hang  # here, because few jobs come to this

            self._warned = at - quiet
            text = diagnose_hang(self._liveness.ranks(at), self._attempt().stopped_engine()).text
            left = duration(self._limit - quiet)
            self._console.say(
                f"nothing has moved for {duration(quiet)}: {text}; ending the job in {left} (--hang-timeout)"
            )
        return min(self._limit - quiet, 1.0)

    def _report_lost(self, limit: float) -> None:
        """Ends the job if agents have been silent for `limit` seconds."""
        ranks = self._liveness.ranks(self._at)
        silent = [each for each in ranks if each.silent and each.silence >= limit]
        if not silent:
            return
        self._over = True
        alive = {each.host for each in ranks if not each.silent}
        lost = [each for each in silent if each.host not in alive]
        several_hosts = len({each.host for each in ranks}) > 1
        hosts = tuple(dict.fromkeys(each.host for each in lost)) if several_hosts else ()
        named = lost if hosts else silent
        self._attempt().fail(
            HeartbeatLost(
                at=self._clock(),
                ranks=tuple(each.rank for each in named),
                hosts=hosts,
                seconds=max(each.silence for each in named),
                limit=limit > SILENCE,
            )
        )

    def _gather_stacks(self, now: float) -> float:
        """Waits for the ranks' stacks, for a while, and ends the job; returns when to look again."""
        left = {each.rank for each in self._liveness.ranks(self._at)}
        able = {each.rank for each in self._hung if not (each.stopped or each.silent)} & left
        if now < self._asked_at + _STACKS_LIMIT and not able <= self._stacks.keys():
            return self._asked_at + _STACKS_LIMIT
        self._over = True
        if not left:
            return _NEVER  # no rank is left to report on
        from launcher.diagnosis.hang_diagnosis import diagnose_hang, table

        diagnosis = diagnose_hang(self._hung, self._attempt().stopped_engine())
        self._console.say("", table(self._hung, diagnosis.ranks or diagnosis.samples))
        if not self._write_stacks():
            for rank in diagnosis.samples:
                if rank in self._stacks:
                    self._console.say(f"rank {rank} stands here, innermost first:", innermost(self._stacks[rank]))
        message = f"nothing has moved for {duration(self._hung_for)}: {diagnosis.text}"
        self._attempt().fail(Hung(at=now, ranks=diagnosis.ranks, message=message))
        return _NEVER

    def _write_stacks(self) -> bool:
        """Writes all stacks to the log folder, if there is one."""
        folder = self._folder()
        if folder is None or not self._stacks:
            return False
        try:
            for rank, text in self._stacks.items():
                (folder / f"stacks-rank-{rank}.txt").write_bytes(to_bytes(text))
        except OSError as error:
            self._console.say(f"the stacks cannot be written: {error}")
            return False
        self._console.say(f"the stacks of {name_ranks(sorted(self._stacks))} are in {folder}/stacks-rank-*.txt")
        return True


def innermost(stacks: str, lines: int = _LINES) -> str:
    """The innermost `lines` lines of the main thread, in what `faulthandler` writes of all threads.

    It comes last there, since that is the oldest thread.
    """
    threads = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x[0-9a-f]+)", stacks)
    frames = [line for line in threads[-1].splitlines() if line.startswith("  ")]
    more = f"\n  and {len(frames) - lines} more" if len(frames) > lines else ""
    return "\n".join(frames[:lines]) + more if frames else stacks.strip()
