"""Supervises a job from its first start to its end: the reports for the user, and restarts."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from collectives.world import STOPPED
from launcher import engines
from launcher.console.console import Console
from launcher.diagnosis import failure_report
from launcher.diagnosis.failures import NotStarted, RankFailed, TimeLimit, root_cause, signal_name
from launcher.diagnosis.observer import Observer, Observers
from launcher.errors import UsageError
from launcher.job import Job
from launcher.linux import fill_standard_streams, many_files, stat_of
from launcher.network import Host, ranks_by_host
from launcher.supervisor.attempt import STOOD_STILL, Attempt, AttemptOutcome
from launcher.supervisor.environment import ranks_environment
from launcher.supervisor.shutdown import ENDING, SUSPENDING, SignalPipe, name_of, stand_still
from launcher.supervisor.stdin import StdinForwarder

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.console.logs import Logs


def launch(job: Job, *, observers: Sequence[Observer] = (), explain: bool = True) -> int:
    """Runs a job to its end and returns its exit code.

    0 if every rank ended with 0; else that of the first rank that failed: 128 + N if signal N killed it, 1 if it
    raised; 75 if ranks were asked to stop, and have saved their state; 124 after `job.timeout`; 130 after Ctrl-C, 143
    after SIGTERM.
    observers: hear of everything; explain: says, too, why a rank failed or that time is over
    Raises: UsageError if no MPI is there to start more than one rank, or too few files may be opened for so many.
    """
    fill_standard_streams()
    if not stat_of(os.getpid()).state:
        raise UsageError("there is nothing in /proc, by which ranks are watched: mount -t proc proc /proc")
    environ = dict(os.environ)
    job = engines.resolve_size(job, environ)
    if job.trace is not None:
        from launcher import tracing  # here, because few jobs want it

        job = replace(job, trace=tracing.prepare(job.trace))
    with many_files(job.size) as files, SignalPipe() as wakeup:
        code = _Watch(job, wakeup, environ, files, observers, explain).run()
    if job.trace is not None:
        _say(tracing.merge(job.trace))
    return code


def _say(text: str) -> None:
    """Says something when the console is closed."""
    try:
        print(f"ddp-launch: {text}", file=sys.stderr)
    except OSError:
        pass  # stderr is closed


class _Watch:
    """All starts of one job."""

    def __init__(
        self,
        job: Job,
        wakeup: int,
        environ: dict[str, str],
        files: tuple[int, int],
        observers: Sequence[Observer],
        explain: bool,
    ) -> None:
        self.job = job
        self.wakeup = wakeup
        self.environ = environ
        self.files = files
        self.console = Console(
            job.size,
            prefix=job.prefix,
            ranks=job.ranks,
            status=job.status,
            hosts=[host.name for host in job.hosts],
            asking=_asking(job),
        )
        self._explain = explain
        self.stdin = StdinForwarder(job.debug_rank, typed=self.console.typed)
        self.logs: Logs | None = None
        if job.log_dir is not None:
            from launcher.console.logs import Logs

            self.logs = Logs(job.log_dir, self.console, sys.argv)
        size = self.console.columns()
        self.tail = failure_report.Tail(_hidden(job), *(size[1:] if size else ()))
        self.attempt: Attempt | None = None  # the one that runs
        followers = [*_followers(job, self.console, self.logs), *self._judge()]
        self.observers = Observers([self.console, self.tail, *followers, *observers])
        self.until = float("inf") if job.timeout is None else time.monotonic() + job.timeout

    def run(self) -> int:
        """Starts the job as often as it takes; returns the exit code."""
        try:
            code, text = self._run()
            self.observers.job_ended(code, text)
            return code
        except UsageError as error:  # what a start needs was not there, or is there no more
            self.observers.job_ended(2, str(error))
            raise
        finally:
            self.observers.close()

    def _run(self) -> tuple[int, str]:
        number = failed_in_a_row = 0
        while True:
            self.observers.attempt_started(number, self.job.size)
            started = time.monotonic()
            environ = {**self.environ, **ranks_environment(self.job, number)}
            limit = self.until - started
            attempt = Attempt(
                self.job, self.console, self.stdin, self.observers, self.wakeup, environ, limit, self.files
            )
            self.attempt = attempt
            try:
                outcome = attempt.run()
                self.until = outcome.until
                code, text = self._report(outcome)
                again = self._again(outcome, number)
                if again is None:
                    self.console.finish()
                    attempt.drain()
                    return (code, text) if code or not self.console.unwritable else (1, self.console.unwritable)
            finally:
                attempt.close()
            failed_in_a_row = count_in_a_row(failed_in_a_row, time.monotonic() - started)
            number += 1
            delay = restart_delay(failed_in_a_row)
            in_a_while = f" in {delay:g} s" if delay else ""
            self.console.say(f"ddp-launch: restart {number} of {self.job.max_restarts}{in_a_while}{self._fewer(again)}")
            self._take(again)
            if (end := self._wait(delay)) is not None:
                return end

    def _judge(self) -> list[Observer]:
        """Who ends an attempt that hangs, or loses a host, if anybody does."""
        never = float("inf")
        limit, heartbeat = (
            never if seconds is None else seconds for seconds in (self.job.hang_timeout, self.job.heartbeat_timeout)
        )
        if limit == heartbeat == never:
            return []
        from launcher.diagnosis.hang_detector import HangDetector

        def folder() -> Path | None:
            return None if self.logs is None else self.logs.folder

        def attempt() -> Attempt:
            assert self.attempt is not None
            return self.attempt

        return [HangDetector(self.job.size, limit, heartbeat, self.console, folder, attempt)]

    def _again(self, outcome: AttemptOutcome, number: int) -> Job | None:
        """What to start next; None if that was the end."""
        if outcome.asked or not outcome.failures or any(isinstance(failure, TimeLimit) for failure in outcome.failures):
            return None
        if number >= self.job.max_restarts:
            return None
        if number == 0 and any(isinstance(failure, NotStarted) and failure.code == 2 for failure in outcome.failures):
            return None  # wrong use: it would go wrong the next time, too
        lost = lost_hosts(self.job.hosts, self.job.size, outcome.gone)
        again = smaller(self.job, lost)
        if again is None:
            names = ", ".join(host.name for host in lost)
            self.console.say(f"ddp-launch: no restart: without {names} too few ranks are left")
        return again

    def _take(self, again: Job) -> None:
        """What is started next: with fewer ranks others may be shown, or have the standard input."""
        self.job = again
        self.stdin.rank = again.debug_rank
        self.console.choose(again.ranks, _asking(again))
        self.tail.hidden = _hidden(again)

    def _fewer(self, again: Job) -> str:
        lost = [host.name for host in self.job.hosts if host not in again.hosts]
        return f", without {', '.join(lost)}: {again.size} rank{'s' * (again.size != 1)}" if lost else ""

    def _wait(self, seconds: float) -> tuple[int, str] | None:
        """Lets time pass before a restart; if that ends the job: its exit code, and the sentence that explains it."""
        until = time.monotonic() + seconds
        self.observers.restart_pending(until)
        while (now := time.monotonic()) < min(until, self.until):
            waiting = self.console.waiting_for
            wait = max(0.0, min(until, self.until, self.observers.tick(now)) - now)
            poll = select.poll()
            poll.register(self.wakeup, select.POLLIN)
            if waiting is not None:
                poll.register(waiting, select.POLLOUT)
            poll.poll(1000 * wait)
            if (stood := time.monotonic() - now - wait) > STOOD_STILL:  # this process was stopped
                until += stood
                self._move(stood)
            self.console.flush()
            for number in _pending(self.wakeup):
                if number in ENDING:
                    self.console.say(f"ddp-launch: {name_of(number)}: the job does not start again")
                    return 128 + number, f"ended by {signal_name(number, hint=False)}"
                if number == SUSPENDING:
                    self.console.hide()
                    stood = stand_still()
                    until += stood
                    self._move(stood)
        if self.until > now:
            return None
        failure = TimeLimit(at=now, seconds=self.job.timeout or 0.0)
        self.observers.failed(failure)
        return self._report(AttemptOutcome(0, [failure], None, b"", frozenset(), False, self.until))

    def _move(self, by: float) -> None:
        """The job stood still for so long while it waited, which does not count."""
        self.until += by
        self.observers.resumed(by)

    def _report(self, outcome: AttemptOutcome) -> tuple[int, str]:
        """Says what went wrong, if anything did; returns the exit code, and the sentence that explains it."""
        if outcome.stop is not None:
            self.console.say(f"ddp-launch: {outcome.stop}")
        if outcome.asked == signal.SIGPIPE and self.console.unwritable:
            return 1, self.console.unwritable
        if outcome.asked:
            return 128 + outcome.asked, f"ended by {signal_name(outcome.asked, hint=False)}"
        if not outcome.failures:
            return (0, "") if outcome.stop is None else (STOPPED, str(outcome.stop))
        found = failure_report.explain(outcome.failures, outcome.engine_output, self.tail, outcome.several_hosts)
        if self._explain or not isinstance(root_cause(outcome.failures, outcome.engine_output), RankFailed | TimeLimit):
            for block in found.blocks:
                self.console.say(block)
        return found.code, found.sentence


def _hidden(job: Job) -> frozenset[int]:
    """Ranks that the console does not show."""
    return frozenset() if job.ranks is None else frozenset(range(job.size)) - {*job.ranks}


def _asking(job: Job) -> list[int]:
    """Ranks whose prompts a user may answer."""
    return [job.debug_rank] if os.isatty(0) else []


def _followers(job: Job, console: Console, logs: Logs | None) -> list[Observer]:
    """Who keeps a record of the job, or shows how it goes; imported by the jobs that want them alone."""
    found: list[Observer] = [] if logs is None else [logs]
    if job.events is not None:
        from launcher.console.events import Events

        found.append(Events(job, console, sys.argv))
    if console.shows_status:
        from launcher.console.status import StatusLine

        found.append(StatusLine(console))
    return found


def _pending(wakeup: int) -> bytes:
    try:
        return os.read(wakeup, 512)
    except BlockingIOError:
        return b""


_LONGEST = 60.0  # s
# A job that ran for so long (s) before it failed is not failing again and again.
_SETTLED = 600.0


def restart_delay(in_a_row: int) -> float:
    """Seconds to wait before a restart. in_a_row: failures without a long run between them, this one included

    The first restart comes at once, since most failures are of the kind that does not come back; then 1, 2, 4, ... 60.

    >>> [restart_delay(number) for number in (1, 2, 3, 4, 9)]
    [0.0, 1.0, 2.0, 4.0, 60.0]
    """
    return 0.0 if in_a_row == 1 else min(2.0 ** min(in_a_row - 2, 6), _LONGEST)


def count_in_a_row(before: int, ran: float) -> int:
    """How many failures came one after the other, after one more. before: so far; ran: s that the attempt ran"""
    return 1 if ran >= _SETTLED else before + 1


def lost_hosts(hosts: Sequence[Host], n: int, gone: Collection[int]) -> list[Host]:
    """The hosts of which no rank is left, of a job of `n`. gone: ranks that cannot be reached

    None if that is true of all hosts, which says nothing about any of them.

    >>> lost_hosts([Host("a", 2), Host("b", 2)], 4, gone={2, 3})
    [Host(name='b', slots=2)]
    """
    used = [(host, ranks) for host, ranks in ranks_by_host(hosts, n) if ranks]
    lost = [host for host, ranks in used if all(rank in gone for rank in ranks)]
    return [] if len(lost) == len(used) else lost


def smaller(job: Job, lost: Collection[Host]) -> Job | None:
    """The job on the hosts that are left; None if these take fewer than `job.min_ranks` ranks, or all are needed."""
    if not lost:
        return job
    left = tuple(host for host in job.hosts if host not in lost)
    slots = sum(host.slots for host in left)
    n = min(job.size, slots)
    if job.min_ranks is None or n < job.min_ranks:
        return None
    shown = None if job.ranks is None else tuple(rank for rank in job.ranks if rank < n) or None
    return replace(job, hosts=left, n=n, ranks=shown, debug_rank=job.debug_rank if job.debug_rank < n else 0)
