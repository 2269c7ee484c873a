"""Supervises a job from its first start to its end: the reports for the user, and restarts."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from collectives.world import STOPPED
from launcher import engines
from launcher.console.console import Console
from launcher.console.status import Status
from launcher.console.terminal import one_line
from launcher.diagnosis import failure_report
from launcher.diagnosis.failures import NotStarted, RankFailed, TimeLimit, root_cause, signal_name
from launcher.diagnosis.job_clock import JobClock
from launcher.diagnosis.observer import Observer, Observers
from launcher.errors import UsageError
from launcher.job import STDIN, Job
from launcher.linux import fill_standard_streams, many_files, stat_of
from launcher.network import Host, ranks_by_host
from launcher.protocol import FILES
from launcher.supervisor.attempt import Attempt
from launcher.supervisor.environment import StateMemory, ranks_environment
from launcher.supervisor.resizing import Resizing, with_ranks
from launcher.supervisor.signal_pipe import SignalPipe, name_of
from launcher.supervisor.stdin import StdinForwarder

if TYPE_CHECKING:
    from launcher.console.logs import Logs


def launch(job: Job, *, observers: Sequence[Observer] = (), explain: bool = True) -> int:
    """Runs a job to its end and returns its exit code.

    0 if every rank ended with 0; else that of the first rank that failed: 128 + N if signal N killed it, 1 if it
    raised; 75 if ranks were asked to stop, and have saved their state; 124 after `job.timeout`; 130 after Ctrl-C; 143
    after SIGTERM, unless all ranks have saved their state.
    observers: see every event; explain: prints, too, why a rank failed or that time is over
    Raises: UsageError if no MPI is there to start more than one rank, or too few files may be opened for so many.
    """
    fill_standard_streams()
    if not stat_of(os.getpid()).state:
        raise UsageError("there is nothing in /proc, by which ranks are watched: mount -t proc proc /proc")
    job = engines.resolve_size(job, os.environ)
    if job.trace is not None:
        from launcher import tracing  # here, because few jobs want it

        job = replace(job, trace=tracing.prepare(job.trace))
    program = None
    if job.script == STDIN:
        with open(0, "rb", closefd=False) as stdin:
            program = stdin.read()
    with many_files(job.size) as before, SignalPipe() as wakeup:
        environ = {**os.environ, FILES: str(before)}
        code = _Supervisor(job, wakeup, environ, observers, explain, program).run()
    if job.trace is not None:
        _print(tracing.merge(job.trace))
    return code


def _print(text: str) -> None:
    """Prints a line when the console is closed."""
    try:
        print(f"ddp-launch: {one_line(text)}", file=sys.stderr)
    except OSError:
        pass  # stderr is closed


class _Supervisor:
    """All attempts of one job."""

    def __init__(
        self,
        job: Job,
        wakeup: int,
        environ: dict[str, str],
        observers: Sequence[Observer],
        explain: bool,
        program: bytes | None,
    ) -> None:
        self.job = job
        self.wakeup = wakeup
        self.environ = environ
        self.console = Console(
            job.size,
            prefix=job.prefix,
            ranks=job.ranks,
            hosts=[host.name for host in job.hosts],
            asking=_asking(job),
        )
        self._explain = explain
        self.stdin = StdinForwarder(job.debug_rank, typed=self.console.typed, program=program)
        self.tail = failure_report.Tail(_hidden(job))
        self.observers = Observers([self.console, self.tail, *self._optional_observers(), *observers])
        self.memory = StateMemory(job.size if job.max_restarts else 0)
        self.resizing = Resizing(self.memory)
        self.clock = JobClock()
        self.until = math.inf if job.timeout is None else self.clock.at(time.monotonic()) + job.timeout

    def _optional_observers(self) -> list[Observer]:
        """Figures; and metrics, log files, events and the hang detector, imported by the jobs that want them alone."""
        job, console = self.job, self.console
        status = Status(job)
        found: list[Observer] = [status]
        if job.metrics_port is not None:
            from launcher.console.metrics_server import MetricsServer

            found.append(MetricsServer(job.metrics_port, status))
        logs: Logs | None = None
        if job.log_dir is not None:
            from launcher.console.logs import Logs

            found.append(logs := Logs(job.log_dir, console, sys.argv))
        if job.events is not None:
            from launcher.console.events import Events

            found.append(Events(job, console, sys.argv))
        hang, heartbeat = (math.inf if each is None else each for each in (job.hang_timeout, job.heartbeat_timeout))
        if min(hang, heartbeat) < math.inf:
            from launcher.diagnosis.hang_detector import HangDetector

            folder = lambda: None if logs is None else logs.folder  # noqa: E731  # a restart has another
            found.append(HangDetector(job.size, hang, heartbeat, console, folder, lambda: self.attempt))
        return found

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
            self.resizing.close()
            self.memory.close()
            self.observers.close()

    def _run(self) -> tuple[int, str]:
        number = restarts = failed_in_a_row = 0
        while True:
            self.observers.attempt_started(number, self.job.size)
            started = time.monotonic()
            environ = {**self.environ, **ranks_environment(self.job, number, self.memory.variable)}
            self.attempt = attempt = Attempt(
                self.job,
                self.console,
                self.stdin,
                self.observers,
                self.wakeup,
                environ,
                self.clock,
                self.until,
                resizing=self.resizing,
            )
            try:
                attempt.run()
                resized = self._after_resize()
                if resized is None:
                    code, text = self._report()
                    lost = self._lost_hosts(number, restarts)
                    if lost is None:
                        self.console.finish()
                        attempt.drain()
                        return (code, text) if code or not self.console.unwritable else (1, self.console.unwritable)
            finally:
                # Ranks on other hosts cannot reach the memory of this process.
                on_disk = attempt.ranks.several_hosts() and attempt.ranks.max_ranks is not None
                attempt.close()
            number += 1
            if resized is not None:
                failed_in_a_row = 0
                self._take(resized)
                continue
            assert lost is not None
            failed_in_a_row = count_in_a_row(failed_in_a_row, time.monotonic() - started)
            restarts += 1
            left = smaller(self.job, lost)
            # A host that was lost is hardly back at once.
            delay = restart_delay(failed_in_a_row + (left is None))
            in_a_while = f" in {delay:g} s" if delay else ""
            where = describe_hosts(lost, left)
            if on_disk:
                where += ", from the newest checkpoint on disk"
            self.console.say(f"restart {restarts} of {self.job.max_restarts}{in_a_while}{where}")
            self._take(left or self.job)
            attempt.wait(delay)
            if attempt.stopped or attempt.failures:
                return self._report()

    def _after_resize(self) -> Job | None:
        """The job to start next, if a resize has ended the attempt; None if something else has.

        With the ranks that were asked for; with those before, where the former have failed before they trained.
        """
        resizing, attempt = self.resizing, self.attempt
        if resizing.target is None:
            return None
        killed = attempt.stopped and resizing.postponed  # the user did not wait
        if attempt.resized and not killed:
            resizing.postponed = resizing.postponed or attempt.stopped
            resizing.before = self.job
            return resizing.target
        sentence = self._explain_failures().sentence if attempt.failures else "it ended before"
        timed_out = any(isinstance(failure, TimeLimit) for failure in attempt.failures)
        if resizing.before is None or resizing.failure or attempt.stopped or timed_out or not attempt.failures:
            resizing.answer(resizing.failure or f"the job could not be resized: {sentence}")
            attempt.stopped = attempt.stopped or resizing.postponed
            resizing.postponed = 0
            return None
        self._report_failures()
        return resizing.go_back(sentence)

    def _lost_hosts(self, number: int, restarts: int) -> list[Host] | None:
        """The hosts that were lost, before a restart; None if there is none. restarts: so far"""
        attempt = self.attempt
        if attempt.stopped or not attempt.failures or restarts >= self.job.max_restarts:
            return None
        for failure in attempt.failures:
            if isinstance(failure, TimeLimit) or (
                number == 0 and isinstance(failure, NotStarted) and failure.code == 2
            ):
                return None  # wrong use would be wrong the next time, too
        return lost_hosts(self.job.hosts, self.job.size, attempt.gone())

    def _take(self, again: Job) -> None:
        """Makes this the job to start next: with fewer ranks others may be shown, or have the standard input."""
        self.job = again
        self.stdin.rank = again.debug_rank
        self.console.choose(again.ranks, _asking(again))
        self.tail.hidden = _hidden(again)

    def _report(self) -> tuple[int, str]:
        """Prints what went wrong, if anything did; returns the exit code, and the sentence that explains it."""
        attempt = self.attempt
        if attempt.stop is not None:
            self.console.say(str(attempt.stop))
        if attempt.stopped == signal.SIGPIPE and self.console.unwritable:
            return 1, self.console.unwritable
        code, sentence = self._report_failures() if attempt.failures else (0, "")
        # No 75 after Ctrl-C: a loop in a shell script would start the job again.
        if attempt.stop is not None and not attempt.stop.late and attempt.stopped != signal.SIGINT:
            return STOPPED, str(attempt.stop)
        if attempt.stopped:
            if not sentence and not self.console.has_last_word and attempt.stopped != signal.SIGPIPE:
                self.console.say(f"ended by {name_of(attempt.stopped)}")
            return 128 + attempt.stopped, sentence or f"ended by {signal_name(attempt.stopped, hint=False)}"
        return code, sentence

    def _explain_failures(self) -> failure_report.Report:
        """The report on what went wrong."""
        attempt = self.attempt
        several_hosts = attempt.ranks.several_hosts()
        return failure_report.explain(attempt.failures, attempt.engine_output, self.tail, several_hosts)

    def _report_failures(self) -> tuple[int, str]:
        """Prints the report on what went wrong; returns the exit code, and the sentence that explains it."""
        first = root_cause(self.attempt.failures, self.attempt.engine_output)
        found = self._explain_failures()
        if self._explain or not isinstance(first, RankFailed | TimeLimit):
            for text, quoted in found.blocks:
                self.console.say(text, quoted)
        return found.code, found.sentence


def _hidden(job: Job) -> frozenset[int]:
    """Ranks that the console does not show."""
    return frozenset() if job.ranks is None else frozenset(range(job.size)) - {*job.ranks}


def _asking(job: Job) -> list[int]:
    """Ranks whose prompts a user may answer."""
    return [job.debug_rank] if os.isatty(0) else []


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


def describe_hosts(lost: Sequence[Host], left: Job | None) -> str:
    """Where a restart takes place, "" where nothing was lost. left: the job without the hosts that were lost

    >>> describe_hosts([Host("a"), Host("b")], None)
    ', on all hosts: without a, b too few ranks are left'
    """
    if not lost:
        return ""
    names = ", ".join(host.name for host in lost)
    if left is None:
        return f", on all hosts: without {names} too few ranks are left"
    return f", without {names}: {left.size} rank{'s' * (left.size != 1)}"


def smaller(job: Job, lost: Collection[Host]) -> Job | None:
    """The job on the hosts that are left; None if these take fewer than `job.min_ranks` ranks, or all are needed."""
    if not lost:
        return job
    left = tuple(host for host in job.hosts if host not in lost)
    slots = sum(host.slots for host in left)
    n = min(job.size, slots)
    if job.min_ranks is None or n < job.min_ranks:
        return None
    return with_ranks(job, n, left)
