"""Hang detector: follows the heartbeats, warns at half the time limit, ends a job without progress or heartbeats.

`launcher.diagnosis.liveness` decides what counts as progress, `launcher.diagnosis.hang_diagnosis` which ranks are to
blame. This module decides when to report a hang. It collects the ranks' stacks before it ends the job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from collectives.errors import name_ranks
from launcher.diagnosis.failures import Failure, HeartbeatLost, Hung, duration, may_follow_host_loss
from launcher.diagnosis.job_clock import JobClock
from launcher.diagnosis.liveness import SILENCE, Liveness, RankState
from launcher.diagnosis.observer import Observer
from launcher.protocol import Message, to_bytes

if TYPE_CHECKING:
    from pathlib import Path

# For how long to wait for the ranks' stacks (s). An agent answers within about 1 s, even if its rank writes no stacks.
_STACKS_LIMIT = 2.0
# Number of innermost lines of a stack that are printed. If there is a log folder, it gets all lines instead.
_LINES = 15
# Longest time between two checks (s).
_CHECK_INTERVAL = 1.0
_NEVER = float("inf")


class ConsoleLike(Protocol):
    """What the hang detector needs of a console."""

    @property
    def backlogged(self) -> bool:
        """Whether the launcher has stopped reading from ranks, because nothing reads its own output."""

    def say(self, text: str, quoted: str = "") -> None:
        """Prints a sentence of the launcher, and the text that it quotes."""


class AttemptLike(Protocol):
    """What the hang detector needs of an attempt to run the job: see `launcher.supervisor.attempt.Attempt`."""

    def request_stacks(self) -> None: ...
    def fail(self, failure: Failure) -> None: ...
    def stopped_engine(self) -> str: ...


class HangDetector(Observer):
    """Watches a job of `n` ranks.

    hang_timeout: seconds without progress after which the job hangs
    heartbeat_timeout: a rank is lost if its agent sends no output and no heartbeat for this many seconds, and for more
        than SILENCE
    folder: returns the folder for files of stacks. If that is None, or the files cannot be written, the console shows
        the stacks of `HangDiagnosis.samples`
    attempt: returns the attempt that runs now
    clock: monotonic, s
    """

    def __init__(
        self,
        n: int,
        hang_timeout: float,
        heartbeat_timeout: float,
        console: ConsoleLike,
        folder: Callable[[], Path | None],
        attempt: Callable[[], AttemptLike],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hang_timeout = hang_timeout
        self._heartbeat_timeout = heartbeat_timeout
        self._console = console
        self._folder = folder
        self._attempt = attempt
        self._clock = clock
        self._job_clock = JobClock()
        self.attempt_started(0, n)

    @property
    def _job_time(self) -> float:
        return self._job_clock.at(self._clock())

    # -- events

    def attempt_started(self, number: int, n: int) -> None:
        self._debugging = False
        self._liveness = Liveness(n, self._job_time)
        self._over = False  # The attempt is being ended, or has ended.
        self._next_check = 0.0
        self._warned_at: float | None = None  # Job time of the last progress if the user has been warned; else None.
        self._hung: list[RankState] = []  # The ranks' states when the job was found to hang.
        self._hung_for = 0.0  # s
        self._stacks_deadline = 0.0
        self._stacks: dict[int, str] = {}

    def rank_started(self, rank: int, hello: Message) -> None:
        self._liveness.rank_started(rank, hello, self._job_time)

    def rank_ended(self, rank: int, status: int) -> None:
        self._liveness.rank_ended(rank, self._job_time)

    def output(self, rank: int, stream: str, data: bytes) -> None:
        self._liveness.output(rank, self._job_time)

    def heartbeat(self, rank: int, beat: Message, now: float) -> None:
        self._liveness.heartbeat(rank, beat, self._job_time)

    def joining(self, rank: int, waits: bool) -> None:
        self._liveness.joining(rank, waits, self._job_time)

    def stacks(self, rank: int, text: str) -> None:
        self._stacks[rank] = text

    def failed(self, failure: Failure) -> None:
        if not self._over and may_follow_host_loss(failure):
            self._report_lost(SILENCE)
        self._over = True

    def ending(self) -> None:
        self._over = True

    def job_ended(self, code: int, text: str) -> None:
        self._over = True

    def debugging(self, ranks: frozenset[int]) -> None:
        self._debugging = bool(ranks)

    def resumed(self, seconds: float) -> None:
        self._job_clock.skip(seconds)

    def tick(self, now: float) -> float:
        if self._debugging or self._console.backlogged:
            self._job_clock.hold(now)
        else:
            self._job_clock.release(now)
        if self._over:
            return _NEVER
        if self._hung:
            return self._collect_stacks(now)
        if now >= self._next_check:
            self._next_check = now + self._check()
        return self._next_check

    # -- decisions

    def _check(self) -> float:
        """Reports lost ranks, a hang, half the hang timeout without progress, and progress after that.

        Returns: seconds until the next check
        """
        self._report_lost(self._heartbeat_timeout)
        if self._over:
            return _NEVER
        now = self._job_time
        quiet = self._liveness.quiet(now)
        if quiet >= self._hang_timeout:
            # Saves the states before the stacks are requested: a sleeping rank wakes up to write its stacks.
            self._hung = self._liveness.ranks(now)
            self._hung_for = quiet
            self._stacks_deadline = self._clock() + _STACKS_LIMIT
            self._console.say(f"nothing has moved for {duration(quiet)}")
            self._attempt().request_stacks()
            return 0.0
        until_end = self._hang_timeout - quiet
        until_warning = self._hang_timeout / 2 - quiet
        if until_warning > 0:
            if self._warned_at is not None:
                self._console.say(f"it moves again, after {duration(now - quiet - self._warned_at)}")
                self._warned_at = None
            return min(until_warning, _CHECK_INTERVAL)
        if self._warned_at is None:
            from launcher.diagnosis.hang_diagnosis import diagnose_hang  # Imported late: few jobs seem to hang.

            self._warned_at = now - quiet
            text = diagnose_hang(self._liveness.ranks(now), self._attempt().stopped_engine()).text
            ending = f"ending the job in {duration(until_end)} (--hang-timeout)"
            self._console.say(f"nothing has moved for {duration(quiet)}: {text}; {ending}")
        return min(until_end, _CHECK_INTERVAL)

    def _report_lost(self, timeout: float) -> None:
        """Ends the job if agents have been silent for `timeout` seconds, and for more than SILENCE."""
        states = self._liveness.ranks(self._job_time)
        lost = [state for state in states if state.silent and state.silence >= timeout]
        if not lost:
            return
        self._over = True
        alive = {state.host for state in states if not state.silent}
        on_lost_hosts = [state for state in lost if state.host not in alive]
        hosts: tuple[str, ...] = ()
        if on_lost_hosts and len({state.host for state in states}) > 1:
            lost = on_lost_hosts
            hosts = tuple(dict.fromkeys(state.host for state in lost))
        seconds = max(state.silence for state in lost)
        self._attempt().fail(
            HeartbeatLost(
                noticed_at=self._clock(),
                ranks=tuple(state.rank for state in lost),
                hosts=hosts,
                seconds=seconds,
                more_time_helps=seconds >= self._heartbeat_timeout,
            )
        )

    def _collect_stacks(self, now: float) -> float:
        """Waits for the ranks' stacks. Then reports the hang and ends the job, if any rank still runs.

        Returns: the time of the next call.
        """
        running = {state.rank for state in self._liveness.ranks(self._job_time)}
        awaited = {state.rank for state in self._hung if not state.unresponsive} & running
        if now < self._stacks_deadline and not awaited <= self._stacks.keys():
            return self._stacks_deadline
        self._over = True
        if not running:
            return _NEVER
        from launcher.diagnosis.hang_diagnosis import diagnose_hang, table

        diagnosis = diagnose_hang(self._hung, self._attempt().stopped_engine())
        self._console.say("", table(self._hung, diagnosis.ranks or diagnosis.samples))
        if not self._write_stacks():
            for rank in diagnosis.samples:
                if rank in self._stacks:
                    self._console.say(f"rank {rank} stands here, innermost first:", innermost(self._stacks[rank]))
        message = f"nothing has moved for {duration(self._hung_for)}: {diagnosis.text}"
        self._attempt().fail(Hung(noticed_at=now, ranks=diagnosis.ranks, message=message))
        return _NEVER

    def _write_stacks(self) -> bool:
        """Writes all stacks to the log folder. Returns: False if there is no folder, no stacks, or an error."""
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
    """The innermost `lines` lines of the main thread's stack. stacks: of all threads, as `faulthandler` writes them"""
    # The main thread comes last, because `faulthandler` begins with the newest thread.
    *_, main_thread = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x[0-9a-f]+)", stacks)
    frames = [line for line in main_thread.splitlines() if line.startswith("  ")]
    if not frames:
        return stacks.strip()
    text = "\n".join(frames[:lines])
    return f"{text}\n  and {len(frames) - lines} more" if len(frames) > lines else text
