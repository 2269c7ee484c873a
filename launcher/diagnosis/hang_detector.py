"""Hang detector: follows the heartbeats, warns at half the limit, and ends a job that makes no progress.

`launcher.diagnosis.liveness` decides what counts as progress, `launcher.diagnosis.hang_diagnosis` which ranks are to
blame; here is when to say so, and how the ranks' stacks are collected before they end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from launcher.diagnosis.failures import Failure, HeartbeatLost, Hung, duration, may_follow_a_loss, name_rank, name_ranks
from launcher.diagnosis.liveness import SILENCE, Liveness, RankSnapshot
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

    def say(self, text: str) -> None:
        """Prints the launcher's own words."""


class AttemptLike(Protocol):
    """What the hang detector needs of an attempt to run the job: see `launcher.supervisor.attempt.Attempt`."""

    def ask_stacks(self) -> None: ...
    def fail(self, failure: Failure) -> None: ...
    def stopped_engine(self) -> str: ...


class HangDetector(Observer):
    """Watches over a job of `n` ranks.

    limit: seconds without motion after which the job hangs
    heartbeat: seconds without a word of a rank's agent after which that rank is lost
    folder: says where stacks are written; None: the culprits' go to the console, shortened
    attempt: that which runs now
    """

    def __init__(
        self,
        n: int,
        limit: float,
        heartbeat: float,
        console: ConsoleLike,
        folder: Callable[[], Path | None],
        attempt: Callable[[], AttemptLike],
    ) -> None:
        self._limit, self._heartbeat = limit, heartbeat
        self._console = console
        self._folder = folder
        self._attempt = attempt
        self._now: float | None = None  # of the last turn
        self._standstill = 0.0  # s that did not count
        self._debugging = False
        self._begin(n)

    def _begin(self, n: int) -> None:
        self._liveness = Liveness(n, self._at(self._now or 0.0))
        self._over = False
        self._news: list[Callable[[float], None]] = []  # of this turn; the next one knows what time it is
        self._spoken: set[int] = set()
        self._next = 0.0  # when to look again
        self._warned: float | None = None  # since when nothing moved, once that has been said
        self._missed: set[int] = set()  # ranks whose silence has been mentioned
        self._asked: float | None = None  # when the ranks were asked for their stacks, after
        self._quiet = 0.0  # seconds without motion
        self._snapshots: list[RankSnapshot] = []
        self._stacks: dict[int, str] = {}

    # -- what happens

    def attempt_started(self, number: int, n: int) -> None:
        self._debugging = False
        self._begin(n)

    def rank_started(self, rank: int, hello: Message) -> None:
        self._news.append(lambda at: self._liveness.rank_started(rank, hello, at))

    def rank_ended(self, rank: int, status: int) -> None:
        self._news.append(lambda at: self._liveness.rank_ended(rank, at))

    def output(self, rank: int, stream: str, data: bytes) -> None:
        self._spoken.add(rank)

    def heartbeat(self, rank: int, beat: Message, now: float) -> None:
        self._news.append(lambda at: self._liveness.heartbeat(rank, beat, at))

    def joining(self, rank: int, waits: bool) -> None:
        self._news.append(lambda at: self._liveness.joining(rank, waits, at))

    def stacks(self, rank: int, text: str) -> None:
        self._stacks[rank] = text

    def failed(self, failure: Failure) -> None:
        if not self._over and self._now is not None and may_follow_a_loss(failure):
            self._lose(0.0, self._at(self._now))
        self._over = True  # it will be ended

    def ending(self) -> None:
        self._over = True

    def job_ended(self, code: int, text: str) -> None:
        self._over = True

    def debugging(self, ranks: frozenset[int]) -> None:
        self._debugging = bool(ranks)

    def resumed(self, by: float) -> None:
        if not self._still():  # else it is counted already
            self._standstill += by

    # -- the clock

    def _at(self, now: float) -> float:
        return now - self._standstill

    def _still(self) -> bool:
        """True while time does not count: in a debugger, and while the launcher reads nothing from ranks."""
        return self._debugging or self._console.backlogged

    def tick(self, now: float) -> float:
        if self._now is not None and self._still():
            self._standstill += now - self._now
        self._now = now
        if self._over:
            return _NEVER
        at = self._at(now)
        news, self._news = self._news, []
        for tell in news:
            tell(at)
        for rank in self._spoken:
            self._liveness.output(rank, at)
        self._spoken.clear()
        if self._asked is not None:
            return self._gather(now)
        if now >= self._next:
            self._next = now + self._look(at)
        return self._next

    # -- what is made of it

    def _look(self, at: float) -> float:
        """Judges; returns in how many seconds to look again."""
        self._mention_silence(at)
        self._lose(self._heartbeat, at)
        if self._over:
            return _NEVER
        quiet = self._liveness.quiet(at)
        if quiet >= self._limit:
            # To be asked for its stacks wakes a rank that sleeps: what counts is what was seen before.
            self._asked, self._quiet, self._snapshots = self._now, quiet, self._liveness.snapshots(at)
            self._say(f"nothing has moved for {duration(quiet)}")
            self._attempt().ask_stacks()
            return 0.0
        half = self._limit / 2
        if quiet < half:
            if self._warned is not None:
                self._say(f"it moves again, after {duration(at - quiet - self._warned)}")
                self._warned = None
            return min(half - quiet, 1.0)
        if self._warned is None:
            from launcher.diagnosis.hang_diagnosis import diagnose_hang  # here, because few jobs come to this

            self._warned = at - quiet
            text = diagnose_hang(self._liveness.snapshots(at), self._attempt().stopped_engine()).text
            left = duration(self._limit - quiet)
            self._say(f"nothing has moved for {duration(quiet)}: {text}; ending the job in {left} (--hang-timeout)")
        return min(self._limit - quiet, 1.0)

    def _mention_silence(self, at: float) -> None:
        snapshots = self._liveness.snapshots(at)
        several_hosts = len({snapshot.host for snapshot in snapshots}) > 1
        for snapshot in snapshots:
            if not snapshot.silent:
                self._missed.discard(snapshot.rank)
            elif snapshot.rank not in self._missed:
                self._missed.add(snapshot.rank)
                who = name_rank(snapshot.rank, snapshot.pid, snapshot.host if several_hosts else "")
                self._say(f"{who}: its agent (pid {snapshot.agent}) has said nothing for {SILENCE:g} s; is it stopped?")

    def _lose(self, limit: float, at: float) -> None:
        """Ends the job if agents have been silent for `limit` seconds, 0: for long enough to be mentioned."""
        snapshots = self._liveness.snapshots(at)
        silent = [snapshot for snapshot in snapshots if snapshot.silent and snapshot.silence >= limit]
        if not silent:
            return
        self._over = True
        alive = {snapshot.host for snapshot in snapshots if not snapshot.silent}
        lost = [snapshot for snapshot in silent if snapshot.host not in alive]
        several_hosts = len({snapshot.host for snapshot in snapshots}) > 1
        hosts = tuple(dict.fromkeys(snapshot.host for snapshot in lost)) if several_hosts else ()
        named = lost if hosts else silent
        ranks, seconds = tuple(snapshot.rank for snapshot in named), max(snapshot.silence for snapshot in named)
        assert self._now is not None
        self._attempt().fail(HeartbeatLost(at=self._now, ranks=ranks, hosts=hosts, seconds=seconds, limit=limit > 0.0))

    def _gather(self, now: float) -> float:
        """Waits for the ranks' stacks, for a while."""
        assert self._asked is not None
        left = {snapshot.rank for snapshot in self._liveness.snapshots(self._at(now))}
        snapshots, until = self._snapshots, self._asked + _STACKS_LIMIT
        able = {snapshot.rank for snapshot in snapshots if not (snapshot.stopped or snapshot.silent)} & left
        if now < until and not able <= self._stacks.keys():
            return until
        self._over = True
        if not left:
            return _NEVER  # no rank is left to report on
        from launcher.diagnosis.hang_diagnosis import diagnose_hang, table

        diagnosis = diagnose_hang(snapshots, self._attempt().stopped_engine())
        self._console.say(table(snapshots, diagnosis.ranks or diagnosis.samples))
        if not self._written():
            self._show(diagnosis.samples)
        message = f"nothing has moved for {duration(self._quiet)}: {diagnosis.text}"
        self._attempt().fail(Hung(at=now, ranks=diagnosis.ranks, message=message))
        return _NEVER

    def _written(self) -> bool:
        """Puts all stacks into the log folder, if there is one."""
        folder = self._folder()
        if folder is None or not self._stacks:
            return False
        try:
            for rank, text in self._stacks.items():
                path = folder / f"stacks-rank-{rank}.txt"
                path.write_bytes(to_bytes(text))
        except OSError as error:
            self._say(f"the stacks cannot be written: {error}")
            return False
        self._say(f"the stacks of {name_ranks(sorted(self._stacks))} are in {folder}/stacks-rank-*.txt")
        return True

    def _show(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            if rank in self._stacks:
                self._say(f"rank {rank} stands here, innermost first:\n{innermost(self._stacks[rank])}")

    def _say(self, text: str) -> None:
        self._console.say(f"ddp-launch: {text}")


def innermost(stacks: str, lines: int = _LINES) -> str:
    """The innermost `lines` lines of the main thread, in what `faulthandler` writes of all threads.

    It comes last there, since that is the oldest thread.
    """
    threads = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x[0-9a-f]+)", stacks)
    frames = [line for line in threads[-1].splitlines() if line.startswith("  ")]
    more = f"\n  and {len(frames) - lines} more" if len(frames) > lines else ""
    return "\n".join(frames[:lines]) + more if frames else stacks.strip()
