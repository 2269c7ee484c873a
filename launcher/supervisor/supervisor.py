"""Supervises a job from its first start to its end: observers, restarts, resizes, and the report on failures."""

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
from launcher.errors import UsageError, plural
from launcher.job import STDIN, Job
from launcher.linux import fill_standard_streams, many_files, stat_of
from launcher.network import Host, ranks_by_host
from launcher.placement import THREADS
from launcher.protocol import FILES
from launcher.supervisor.attempt import Attempt
from launcher.supervisor.environment import StateMemory, ranks_environment
from launcher.supervisor.resizing import Resizing
from launcher.supervisor.signal_pipe import SignalPipe, name_of
from launcher.supervisor.stdin import StdinForwarder

if TYPE_CHECKING:
    from launcher.console.logs import Logs


def launch(job: Job, *, observers: Sequence[Observer] = (), explain: bool = True) -> int:
    """Runs a job to its end.

    observers: see every event; explain: if False, does not print why a rank failed, or that `job.timeout` passed
    Returns: the exit code. 0 if every rank ended with 0; 75 if ranks stopped with their state saved (exit code 75), and
    the others ended with 0; 124 after `job.timeout`; 130 after Ctrl-C; 143 or 129 after SIGTERM or SIGHUP, unless the
    code is 75; 141 if nothing reads the output any more. Otherwise the code of the root cause: the exit code of a rank,
    128 + N if signal N killed it, 1 if it raised; 1 if the job hung or an agent died; 2 if an agent reports that its
    rank cannot be started, or ssh that it cannot reach a host. 1 also if the output cannot be written, for example
    because the disk is full. docs/launcher.md has a table of codes.
    Raises: UsageError if the job cannot be started or restarted as it was asked for. For example, there is no MPI for
    several ranks, or fewer files may be opened than the job needs.
    """
    fill_standard_streams()
    if not stat_of(os.getpid()).state:
        raise UsageError("/proc is empty, and ranks are watched with it: mount -t proc proc /proc")
    requested = job
    job = engines.resolve_size(job, os.environ)
    if job.trace is not None:
        from launcher import tracing  # Imported late: few jobs need it.

        job = replace(job, trace=tracing.prepare(job.trace))
    program = None
    if job.script == STDIN:
        with open(0, "rb", closefd=False) as stdin:
            program = stdin.read()
    with many_files(job.size) as before, SignalPipe() as wakeup:
        environ = {**os.environ, FILES: str(before)}
        code = _Supervisor(requested, job, wakeup, environ, observers, explain, program).run()
    if job.trace is not None:
        _print(tracing.merge(job.trace))
    return code


def _print(text: str) -> None:
    """Prints a line after the console has been closed."""
    try:
        print(f"ddp-launch: {one_line(text)}", file=sys.stderr)
    except OSError:
        pass  # stderr is closed.


class _Supervisor:
    """Runs all attempts of one job. requested: the job that the user asked for; job: what `resolve_size` made of it"""

    def __init__(
        self,
        requested: Job,
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
        self.resizing = Resizing(requested, self.memory, environ, self.console.say)
        self.clock = JobClock()
        self.until = math.inf if job.timeout is None else self.clock.at(time.monotonic()) + job.timeout

    def _optional_observers(self) -> list[Observer]:
        """The status, and what the job asks for: metrics, log files, events, the hang detector.

        Modules of observers that the job does not ask for are not imported.
        """
        job = self.job
        console = self.console
        status = Status(job)
        observers: list[Observer] = [status]
        if job.metrics_port is not None:
            from launcher.console.metrics_server import MetricsServer

            observers.append(MetricsServer(job.metrics_port, status))
        logs: Logs | None = None
        if job.log_dir is not None:
            from launcher.console.logs import Logs

            logs = Logs(job.log_dir, console, sys.argv)
            observers.append(logs)
        if job.events is not None:
            from launcher.console.events import Events

            observers.append(Events(job, console, sys.argv))
        hang = math.inf if job.hang_timeout is None else job.hang_timeout
        heartbeat = math.inf if job.heartbeat_timeout is None else job.heartbeat_timeout
        if min(hang, heartbeat) < math.inf:
            from launcher.diagnosis.hang_detector import HangDetector

            # A function, because each start of the job has a log folder of its own.
            folder = lambda: None if logs is None else logs.folder  # noqa: E731
            observers.append(HangDetector(job.size, hang, heartbeat, console, folder, lambda: self.attempt))
        return observers

    def run(self) -> int:
        """Runs the job, with its restarts. Returns: the exit code"""
        try:
            code, text = self._run()
            self.observers.job_ended(code, text)
            return code
        except UsageError as error:  # The job could not be started, or not be restarted.
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
            environ = {**self.environ, **ranks_environment(self.job, number, self.memory)}
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
            again = False
            try:
                attempt.run()
                if (attempt.ranks.max_ranks or math.inf) < math.inf:
                    # With micro-batches results do not depend on the number of ranks, but their last bits depend on the
                    # number of BLAS threads. So later starts keep this number.
                    self.environ.setdefault(THREADS, attempt.ranks[0].threads)
                resized = self._after_resize()
                if resized is None:
                    code, text = self._report()
                    lost = self._lost_hosts(number, restarts)
                    if lost is None:
                        self.console.remove_bar()
                        attempt.drain()
                        return (code, text) if code or not self.console.unwritable else (1, self.console.unwritable)
                again = True
            finally:
                no_memory = attempt.ranks.max_ranks is not None and self.memory.held < 0
                attempt.close(self.memory if again else None)
            number += 1
            if resized is not None:
                failed_in_a_row = 0
                self._set_job(resized)
                continue
            assert lost is not None
            failed_in_a_row = count_in_a_row(failed_in_a_row, time.monotonic() - started)
            restarts += 1
            smaller_job = without_hosts(self.job, lost)
            # A restart that needs the lost hosts waits longer, because lost hosts seldom come back at once.
            delay = restart_delay(failed_in_a_row + (smaller_job is None))
            text = f"restart {restarts} of {self.job.max_restarts}"
            if delay:
                text += f" in {delay:g} s"
            text += describe_hosts(lost, smaller_job)
            if no_memory:
                text += ", with no state in memory"
            self.console.say(text)
            self._set_job(smaller_job or self.job)
            attempt.wait(delay)
            if attempt.end_signal or attempt.failures:
                return self._report()

    def _after_resize(self) -> Job | None:
        """The job to start next if a resize is in progress; None if there is no resize, or it is given up.

        If all ranks have saved their state for it: the job with the requested number of ranks. If the new ranks failed
        before they trained: the job as it was before.
        """
        resizing = self.resizing
        attempt = self.attempt
        if resizing.target is None:
            return None
        killed = attempt.end_signal and resizing.postponed  # The user sent a second signal.
        if attempt.resized and not killed:
            resizing.postponed = resizing.postponed or attempt.end_signal
            resizing.before = self.job
            return resizing.target
        sentence = self._explain_failures().sentence if attempt.failures else "it ended before"
        timed_out = any(isinstance(failure, TimeLimit) for failure in attempt.failures)
        if resizing.before is None or resizing.failure or attempt.end_signal or timed_out or not attempt.failures:
            resizing.answer(resizing.failure or f"the job could not be resized: {sentence}")
            attempt.end_signal = attempt.end_signal or resizing.postponed
            resizing.postponed = 0
            return None
        self._report_failures()
        return resizing.go_back(sentence)

    def _lost_hosts(self, number: int, restarts: int) -> list[Host] | None:
        """The hosts that were lost, if the job is to be restarted; None if it is not.

        number: of the attempt, 0 for the first; restarts: number of restarts so far
        """
        attempt = self.attempt
        if attempt.end_signal or not attempt.failures or restarts >= self.job.max_restarts:
            return None
        for failure in attempt.failures:
            if isinstance(failure, TimeLimit) or (
                number == 0 and isinstance(failure, NotStarted) and failure.code == 2
            ):
                return None  # A restart would not help: the time limit has passed, or the job cannot start as asked.
        return lost_hosts(self.job.hosts, self.job.size, attempt.unreachable_ranks())

    def _set_job(self, job: Job) -> None:
        """Sets the job to start next, the ranks that the console shows, and the rank that gets the standard input."""
        self.job = job
        self.stdin.rank = job.debug_rank
        self.console.choose(job.ranks, _asking(job))
        self.tail.hidden = _hidden(job)

    def _report(self) -> tuple[int, str]:
        """Prints how the ranks stopped and what went wrong. Returns: the exit code, and a sentence on it ("" for 0)"""
        attempt = self.attempt
        if attempt.stop is not None:
            self.console.say(str(attempt.stop))
        if attempt.end_signal == signal.SIGPIPE and self.console.unwritable:
            return 1, self.console.unwritable
        code, sentence = self._report_failures() if attempt.failures else (0, "")
        # After Ctrl-C the exit code is 130, not STOPPED: after STOPPED, a loop in a shell script starts the job again.
        if attempt.stop is not None and not attempt.stop.late and attempt.end_signal != signal.SIGINT:
            return STOPPED, str(attempt.stop)
        if attempt.end_signal:
            if not sentence and not self.console.has_last_word and attempt.end_signal != signal.SIGPIPE:
                self.console.say(f"ended by {name_of(attempt.end_signal)}")
            return 128 + attempt.end_signal, sentence or f"ended by {signal_name(attempt.end_signal, hint=False)}"
        return code, sentence

    def _explain_failures(self) -> failure_report.Report:
        """The report on what went wrong."""
        attempt = self.attempt
        several_hosts = attempt.ranks.several_hosts()
        return failure_report.explain(attempt.failures, attempt.engine_output, self.tail, several_hosts)

    def _report_failures(self) -> tuple[int, str]:
        """Prints the report on what went wrong. Returns: the exit code, and the sentence that explains it"""
        first = root_cause(self.attempt.failures, self.attempt.engine_output)
        report = self._explain_failures()
        if self._explain or not isinstance(first, RankFailed | TimeLimit):
            for text, quoted in report.blocks:
                self.console.say(text, quoted)
        return report.code, report.sentence


def _hidden(job: Job) -> frozenset[int]:
    """Ranks that the console does not show."""
    return frozenset() if job.ranks is None else frozenset(range(job.size)) - {*job.ranks}


def _asking(job: Job) -> list[int]:
    """Ranks whose prompts the user can answer: the console also shows their unfinished lines."""
    return [job.debug_rank] if os.isatty(0) else []


# The longest wait before a restart (s).
_MAX_DELAY = 60.0
# After an attempt that ran this long (s), failures are counted anew.
_LONG_RUN = 600.0


def restart_delay(in_a_row: int) -> float:
    """Seconds to wait before a restart: 0, 1, 2, 4, ... 60. Most failures do not come back, so the first wait is 0.

    in_a_row: the result of `count_in_a_row`; one more if the restart needs lost hosts

    >>> [restart_delay(number) for number in (1, 2, 3, 4, 9)]
    [0.0, 1.0, 2.0, 4.0, 60.0]
    """
    return 0.0 if in_a_row == 1 else min(2.0 ** min(in_a_row - 2, 6), _MAX_DELAY)


def count_in_a_row(before: int, ran: float) -> int:
    """The number of failures in a row; 1 after a long run. before: until this attempt; ran: its duration (s)"""
    return 1 if ran >= _LONG_RUN else before + 1


def lost_hosts(hosts: Sequence[Host], n: int, unreachable: Collection[int]) -> list[Host]:
    """The hosts whose ranks are all unreachable. n: number of ranks of the job; unreachable: numbers of ranks

    [] if the ranks of all hosts are unreachable: then the hosts are most likely not the cause.

    >>> lost_hosts([Host("a", 2), Host("b", 2)], 4, unreachable={2, 3})
    [Host(name='b', slots=2)]
    """
    used = [(host, ranks) for host, ranks in ranks_by_host(hosts, n) if ranks]
    lost = [host for host, ranks in used if all(rank in unreachable for rank in ranks)]
    return [] if len(lost) == len(used) else lost


def describe_hosts(lost: Sequence[Host], smaller_job: Job | None) -> str:
    """A clause about the hosts of a restart; "" if none was lost. smaller_job: the job without the lost hosts

    >>> describe_hosts([Host("a"), Host("b")], None)
    ', on all hosts: without a, b too few ranks are left'
    """
    if not lost:
        return ""
    names = ", ".join(host.name for host in lost)
    if smaller_job is None:
        return f", on all hosts: without {names} too few ranks are left"
    return f", without {names}: {plural(smaller_job.size, 'rank')}"


def without_hosts(job: Job, lost: Collection[Host]) -> Job | None:
    """The job without the lost hosts; `job` itself if none is lost.

    Returns: None if hosts are lost and `job.min_ranks` is None or more than the slots of the other hosts.
    """
    if not lost:
        return job
    hosts = tuple(host for host in job.hosts if host not in lost)
    n = min(job.size, sum(host.slots for host in hosts))
    if job.min_ranks is None or n < job.min_ranks:
        return None
    return job.with_ranks(n, hosts)
