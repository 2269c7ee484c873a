"""One attempt to run a job: starts the engine, handles what the agents report, and ends the job.

It has one event loop and no threads. The loop waits until a file descriptor becomes readable or writable, or until the
next deadline, and for 1 s at most. `agents` handles what the agents send. `resizing` handles requests for another
number of ranks. `launcher.diagnosis.failures` decides which failure is the root cause.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

from collectives.errors import name_ranks
from launcher import engines
from launcher.console.console import Console
from launcher.diagnosis.failures import (
    EngineEnded,
    EngineLost,
    Failure,
    NotStarted,
    NotStopped,
    RankFailed,
    Stop,
    TimeLimit,
    is_peer_failure,
)
from launcher.diagnosis.job_clock import JobClock
from launcher.diagnosis.observer import Observer
from launcher.engines.start_errors import explain_start_failure, unreachable_host
from launcher.errors import LARGE_PACKETS
from launcher.job import Job
from launcher.linux import ENDING_SIGNALS, USER_SIGNALS, stat_of
from launcher.network import ranks_on
from launcher.protocol import Message
from launcher.supervisor import agents
from launcher.supervisor.environment import (
    StateMemory,
    agent_command,
    agents_environment,
    free_port,
    host_of_rank_0,
    master_address,
)
from launcher.supervisor.listener import Listener
from launcher.supervisor.rank_table import RankTable
from launcher.supervisor.reaper import Reaper
from launcher.supervisor.resizing import Resizing
from launcher.supervisor.signal_pipe import SUSPENDING, name_of, stop_until_continued
from launcher.supervisor.stdin import StdinForwarder

# All times are in seconds.
# After a failure (not after the job's time limit) the ranks have at most this long to end by themselves: their work is
# lost anyway.
_FAILURE_GRACE = 2.0
# After a rank has reported that it failed because of a peer: for how long to wait for the failure of the peer itself.
_PEER_FAILURE_LIMIT = 0.5
# For how long to wait for the agents' reports on killed ranks. The reports come within milliseconds, unless an agent is
# stopped or dead. After this time `Attempt.close` makes the reaper kill what is left.
_KILL_LIMIT = 0.5
# For how long to wait for the engine, which cleans up once all agents have ended.
_ENGINE_LIMIT = 1.5
# Of the engine's output, only the last bytes are kept: at most this many.
_ENGINE_OUTPUT_LIMIT = 1 << 16
# A signal that comes again sooner than this does not count as a second one: `timeout` of the coreutils signals its
# child, and then the child's whole process group.
_REPEAT_INTERVAL = 0.1
# The longest wait for an event.
_MAX_WAIT = 1.0
# The launcher counts as having been stopped if a wait, together with the handling of the events before it, took this
# much longer than planned.
_STOPPED_LIMIT = 2.0


class Attempt:
    """One start of a job, from the start of its engine to the end of its ranks.

    console: shows what the ranks write; stdin: forwards the standard input; observers: see every event
    wakeup: file descriptor on which signals arrive; environ: what the environment of the ranks is made from
    clock: the clock of the job's time limits; deadline: the time on this clock at which the whole job is ended
    resizing: the requests to resize the job, and the state of the one in progress

    failures: what went wrong, in the order in which the launcher learned of it
    end_signal: number of the signal with which the user ended the job; SIGINT if the user quit a rank's debugger;
        SIGPIPE if the output cannot be written any more; 0: none
    stop: how the ranks stopped, if they stopped on request; engine_output: the end of what the engine printed

    Raises: UsageError if the job cannot be started: see `choose_engine`, `Listener` and `Reaper`.
    """

    def __init__(
        self,
        job: Job,
        console: Console,
        stdin: StdinForwarder,
        observers: Observer,
        wakeup: int,
        environ: Mapping[str, str],
        clock: JobClock,
        deadline: float = math.inf,
        *,
        resizing: Resizing,
    ) -> None:
        self.job = job
        self.ranks = RankTable(job.size)
        self.now = time.monotonic()
        self.failures: list[Failure] = []
        self.stop: Stop | None = None
        self.end_signal = 0
        self.engine_output = b""
        self.console = console
        self.stdin = stdin
        self.observers = observers
        self._wakeup = wakeup
        self.environ = environ
        self.clock = clock
        self._job_deadline = deadline
        self.resizing = resizing
        # Times on the clock, by name. `_on_deadlines`, `_finished` and `wait` act on them.
        self.deadlines = {"start": self.job_time(job.start_limit), "job": deadline}
        if job.min_ranks is not None:
            self.deadlines["hosts"] = self.job_time(resizing.hosts.interval)
        self.ending = False  # The launcher has begun to end the ranks, or the attempt is over.
        self.killed = False  # The agents have been sent `kill`.
        self.released = False  # The agents that may end have been sent `release`, or the attempt is closed.
        # Agents have been sent `release`. The engine ends after them: Open MPI's as soon as one of them exits with a
        # status other than 0.
        self.engine_may_end = False
        self._closed = False
        # The last message that asked the ranks to end or killed them. Ranks that start later get it, too.
        self.end_command: Message | None = None
        self._signalled_at = -math.inf  # When a signal last asked the job to end (monotonic).
        # Set once a rank has ended with exit code 0 without leaving its world. It is reported unless the other ranks
        # end soon, too.
        self.early_exit: RankFailed | None = None
        self.engine = engines.choose_engine(job, environ)
        self.listener = Listener(self.engine.remote_hosts, job.size)
        scratch = os.path.join(environ.get("TMPDIR") or "/tmp", f"ddp-launch-{os.getpid()}-{os.urandom(4).hex()}")
        master = master_address(environ, host_of_rank_0(job, self.engine, environ), free_port())
        environment = self.engine.environment({**environ, **master, **self._agents_environment()}, scratch)
        self._reaper = Reaper(partial(self.engine.start, agent_command(job), environment), scratch)
        os.set_blocking(self._reaper.engine_output, False)

    def _agents_environment(self) -> dict[str, str]:
        """Variables for the agents: those of `agents_environment`, and the terminal's size without the line prefix."""
        listener = self.listener
        variables = agents_environment(self.job, self.engine, listener.address, listener.secret)
        if size := self.console.terminal.size():
            variables |= {"COLUMNS": str(max(1, size[0] - self.console.prefix_width)), "LINES": str(size[1])}
        return variables

    def run(self) -> None:
        """Handles events until all ranks and the engine have ended, or the time to wait for them is over."""
        while not self._finished():
            self._run_once()
        self._on_engine_output()
        self.ending = True
        self.clock.release(self.now)
        self.deadlines.clear()
        if self.failures and self.ranks.missing():
            self.failures.append(self._engine_ended())
        self.stop = self._stop()

    def _stop(self) -> Stop | None:
        """How the ranks stopped; None if no rank stopped on request, something failed, or the job is to be resized.

        Records NotStopped if some ranks did not stop, and no signal from the user ended the job.
        """
        stop = self.ranks.stop()
        if stop is None or self.failures or self.resized:
            return None
        if stop.late and not self.end_signal:
            self._record(NotStopped(ranks=stop.late, seconds=2 * self.job.grace))
            return None
        self.observers.stopped(stop)
        return stop

    @property
    def resized(self) -> bool:
        """Whether all ranks have saved their state for a start with another number of ranks, and nothing has failed."""
        return not self.failures and self.ranks.saved and all(process.resizing for process in self.ranks.values())

    def unreachable_ranks(self) -> frozenset[int]:
        """The ranks of the host that ssh could not reach; if ssh reached all, those that did not start or were lost."""
        # If ssh has named a host, missing ranks of other hosts may merely be late.
        host = unreachable_host(self.engine_output.decode("utf-8", "replace"))
        on_host = ranks_on(self.job.hosts, self.job.size, host)
        # A rank that is not over has been killed, and its agent has not reported its end.
        lost = {rank for rank, process in self.ranks.items() if process.disconnected or not process.over}
        return on_host or frozenset({*lost, *self.ranks.missing()})

    def drain(self) -> None:
        """Called when the job is over: waits until all output has been written, or a signal such as Ctrl-C drops it."""
        self.console.flush()
        while self.console.terminal.waiting_for is not None:
            self._run_once()

    @property
    def slots(self) -> list[str]:
        """The slots of the state memory that agents hold. The next start can load them if these agents stay.

        [] unless the attempt has failed, or has ended to be resized.
        """
        return self.ranks.slots() if self.failures or self.resized else []

    def close(self, memory: StateMemory | None = None) -> None:
        """Ends what still runs. memory: takes the agents that hold state for the next start; None: they end, too"""
        self._closed = self.ending = self.released = True
        self.listener.close()
        ranks = self.ranks
        slots = self.slots
        self.ranks = RankTable(ranks.n)
        if memory is not None and slots:
            memory.keep(ranks, self._reaper)
        else:
            ranks.close()
            self._reaper.close()

    def wait(self, seconds: float) -> None:
        """Waits before a restart, after `close`. A signal (see `end_signal`) or the job's time limit ends the wait."""
        self.now = time.monotonic()
        self.failures = []
        self.deadlines = {"restart": self.job_time(seconds), "job": self._job_deadline}
        while not (self.end_signal or self.failures or "restart" in self._due()):
            self._run_once()

    def fail(self, failure: Failure) -> None:
        """Records a failure, and ends the job at once, or after a moment if the failure of a peer caused this one.

        A job that is already being ended continues to end as before. Ignores the failure if all ranks have saved their
        state. After a signal of the user, ignores every failure for which `_explains_stop` is False.
        """
        if self.ranks.saved or (self.end_signal and not self._explains_stop(failure)):
            return
        self._record(failure)
        if self.ending:
            return
        if is_peer_failure(failure):
            # If all ranks were ended now, the peer could not report its own failure, which is the cause of this one.
            self.deadlines.setdefault("peer failure", self.job_time(_PEER_FAILURE_LIMIT))
        else:
            self._end_after_failure(failure)

    def _end_after_failure(self, failure: Failure) -> None:
        """Asks the ranks to end. They may save their state first only if the failure is the job's time limit."""
        if isinstance(failure, TimeLimit):
            self._shut_down(signal.SIGTERM, self.job.grace)
        else:
            self._shut_down(signal.SIGTERM, min(self.job.grace, _FAILURE_GRACE), "peer_failed")

    def _explains_stop(self, failure: Failure) -> bool:
        """True if a rank raised an exception after a signal of the user: most likely its state was not saved.

        False after Ctrl-C, where exceptions are common, because Python raises KeyboardInterrupt anywhere. False also if
        the failure of a peer caused the exception.
        """
        raised = isinstance(failure, RankFailed) and failure.raised is not None
        return raised and self.end_signal != signal.SIGINT and not is_peer_failure(failure)

    def _record(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.observers.failed(failure)

    def request_stacks(self) -> None:
        """Asks every rank for its Python stacks, which observers then get one by one."""
        self.ranks.send({"stacks": True})

    def stopped_engine(self) -> str:
        """Name and pid of a stopped process of the engine on this machine; "" if there is none.

        Before the reaper has started the engine, the reaper is checked instead.
        """
        if not self._reaper.engine:
            return f"the launcher's reaper (pid {self._reaper.pid})" if stat_of(self._reaper.pid).state == "T" else ""
        this_host = os.uname().nodename
        pids = {self._reaper.engine, *(process.engine for process in self.ranks.values() if process.host == this_host)}
        stopped = (pid for pid in sorted(pids) if stat_of(pid).state == "T")
        return next((f"{stat_of(pid).name} (pid {pid})" for pid in stopped), "")

    # -- the end of a job

    def _shut_down(self, number: int, grace: float, command: str = "signal") -> None:
        """Sends the ranks a signal to end; after `grace` seconds they are killed.

        command: the protocol's message that carries the signal, "signal" or "peer_failed"
        """
        self._begin_ending()
        self.deadlines = {"kill": self.job_time(grace)}
        self.end_command = {command: number}
        # A rank that is leaving runs its exit handlers, which a signal would interrupt.
        self.ranks.send(self.end_command, lambda process: not process.over and not process.leaving)

    def _kill(self, limit: float = _KILL_LIMIT) -> None:
        """Kills all ranks. limit: seconds after which the attempt is over, even if agents have not reported"""
        self._begin_ending()
        self.killed = True
        self.deadlines = {"sweep": self.job_time(limit)}
        self.end_command = {"kill": True}
        self.ranks.send(self.end_command)

    def _begin_ending(self) -> None:
        if not self.ending:
            self.observers.ending()
        self.ending = True
        self.clock.release(self.now)

    def end_by_signal(self, number: int) -> None:
        """Ends the job as a signal from the user does. SIGPIPE: the output cannot be written any more"""
        self.end_signal = number
        self._signalled_at = self.now
        self._shut_down(number if number != signal.SIGPIPE else signal.SIGTERM, self.job.grace)

    # -- the loop

    def job_time(self, seconds: float = 0.0) -> float:
        """The time on the job's clock `seconds` from now."""
        return self.clock.at(self.now) + seconds

    def _due(self) -> set[str]:
        """The deadlines that have passed."""
        now = self.job_time()
        return {name for name, deadline in self.deadlines.items() if deadline <= now}

    def _run_once(self) -> None:
        """Waits for the next events and handles them."""
        handlers = self._event_handlers()
        poll = select.poll()
        for fd, (mask, _) in handlers.items():
            poll.register(fd, mask)
        until = min(self.listener.deadline, self.observers.tick(self.now), self.now + _MAX_WAIT)
        if not self.clock.held:
            until = min(until, self.now + min(self.deadlines.values(), default=math.inf) - self.job_time())
        wait = max(0.0, 1000 * (until - time.monotonic()))
        before = self.now  # The time of the last events: the launcher may also have been stopped while it handled them.
        events = poll.poll(wait)
        self.now = time.monotonic()
        stopped_for = self.now - before - 1e-3 * wait
        if stopped_for > _STOPPED_LIMIT:
            self._skip_stopped_time(stopped_for)
        for fd, _ in events:
            handlers[fd][1]()
        self._on_deadlines()
        if not self.released and self._all_ranks_over():
            self.released = self.engine_may_end = True
            keep = self.slots
            self.deadlines = {"engine": self.job_time(0.0 if keep else _ENGINE_LIMIT)}
            self.ranks.send({"release": True}, lambda process: not (keep and process.slots))
        self.console.flush()
        if self.console.terminal.broken and not self.ending and self.resizing.since is None:
            self.end_by_signal(signal.SIGPIPE)

    def _event_handlers(self) -> dict[int, tuple[int, Callable[[], None]]]:
        """By file descriptor: the events to wait for, and the function to call.

        The functions are called in this order, so that the output of ranks is read before the end of their engine.
        """
        table: dict[int, tuple[int, Callable[[], None]]] = {}
        reading = 0 if self.console.backlogged else select.POLLIN
        for process in self.ranks.values():
            if not process.closed:
                mask = reading | (select.POLLOUT if process.channel.backlog else 0)
                table[process.channel.fileno()] = mask, partial(agents.receive, self, process)
        table[self._wakeup] = select.POLLIN, self._on_signal
        if not self._closed:
            for fileno in self.listener.filenos():
                table[fileno] = select.POLLIN, partial(agents.authenticate, self, fileno)
            if self.resizing.listener is not None:
                handler = partial(self.resizing.handle_request, self.job, self.ranks)
                table[self.resizing.listener.fileno()] = select.POLLIN, handler
            if not self._reaper.lost:
                table[self._reaper.fileno()] = select.POLLIN, self._on_reaper
            if not self._reaper.output_closed:
                table[self._reaper.engine_output] = select.POLLIN, self._on_engine_output
        if (stdin_fd := self.stdin.readable_fd(self.ranks)) is not None:
            table[stdin_fd] = select.POLLIN, partial(self.stdin.read, self.ranks)
        if (output_fd := self.console.terminal.waiting_for) is not None:
            table[output_fd] = select.POLLOUT, self.console.flush
        return table

    def _on_deadlines(self) -> None:
        due = self._due()
        for name in due - {"sweep", "engine", "restart"}:  # `_finished` and `wait` look for these.
            self.deadlines.pop(name, None)
        if "start" in due:
            text = f"{name_ranks(self.ranks.missing())} did not start within {self.job.start_limit:g} s"
            if engine := self.stopped_engine():
                text += f": {engine} is stopped"
            elif self.engine.remote_hosts:
                text += f": {LARGE_PACKETS}"
            self.fail(NotStarted(message=text))
        if "job" in due:
            self.fail(TimeLimit(seconds=self.job.timeout or 0.0))
        hosts = self.resizing.hosts
        if "hosts" in due:
            self.deadlines["hosts"] = self.job_time(hosts.interval)
        if "hosts" in self.deadlines and hosts.has_answer():
            self.resizing.take_hosts(self.job, self.ranks)
        if "hosts" in due and self.resizing.target is None:  # Probing again discards the answers.
            hosts.probe(self.job, self.ranks.max_ranks or 0)
        if "copy" in due:
            self.resizing.memory.release()
        if "joining" in due:
            self.fail(NotStarted(message=self.ranks.joining_timeout()))
        if "stopping" in due:  # Some ranks have not stopped yet. This signal lets them save their state.
            self._shut_down(signal.SIGTERM, self.job.grace)
        if "peer failure" in due:
            self._end_after_failure(self.failures[0])
        if "early exit" in due and self.early_exit is not None and not self._all_ranks_over():
            self.fail(self.early_exit)
        if "kill" in due:
            if self.end_signal or TimeLimit in map(type, self.failures):
                self._report_overdue()
            self._kill()
        self.listener.drop_silent(self.now)

    def _report_overdue(self) -> None:
        """Names the ranks that are killed because they have not ended within `Job.grace`.

        Prints nothing if `Stop` will name them: a rank has stopped as asked, and nothing has failed.
        """
        late = sorted(rank for rank, process in self.ranks.items() if not process.over)
        if self.failures or self.ranks.stop() is None:
            consequence = "killed, and what was not saved is lost (more time: --grace)"
            self.console.say(f"{name_ranks(late)} did not end within {self.job.grace:g} s: {consequence}")

    def _finished(self) -> bool:
        if self._due() & {"sweep", "engine"}:
            return True
        return self._all_ranks_over() and (self._reaper.status is not None or self._reaper.lost)

    def _all_ranks_over(self) -> bool:
        return (self.ending or self.ranks.complete) and self.ranks.over

    # -- the engine and its reaper

    def _on_reaper(self) -> None:
        self._reaper.receive()
        if self._reaper.lost:
            self.fail(EngineLost(name="the launcher's reaper", pid=self._reaper.pid, above=True))
            self._kill()
        elif self._reaper.status is not None and (self.failures or not self.engine_may_end):
            self._on_engine_output()  # The output may say why it ended.
            failure = self._engine_ended()
            if not self.ending or failure.status < 0:
                self.fail(failure)

    def _engine_ended(self) -> EngineEnded:
        pid = self._reaper.engine
        status = self._reaper.status or 0
        name = self.engine.name
        return EngineEnded(pid=pid, status=status, missing=self.ranks.missing(), name=name)

    def _on_engine_output(self) -> None:
        """Keeps the end of what the engine itself prints, for the report on a failure.

        The attempt fails if the output says why ranks cannot start.
        """
        self.engine_output = (self.engine_output + self._reaper.read_output())[-_ENGINE_OUTPUT_LIMIT:]
        if self.ranks.complete or self.failures:
            return
        if sentence := explain_start_failure(self.engine_output.decode("utf-8", "replace")):
            self.fail(NotStarted(message=sentence, code=2))

    # -- signals

    def _on_signal(self) -> None:
        for number in os.read(self._wakeup, 512):
            if number in USER_SIGNALS:
                self.ranks.send({"signal": number})
            elif number == SUSPENDING:
                self._suspend()
            elif number not in ENDING_SIGNALS:
                continue  # SIGCONT, SIGWINCH: the loop only has to run once.
            elif self._closed:
                self.console.say(f"{name_of(number)}: the job does not start again")
                self.end_signal = number
            elif self.resizing.since is not None and not self.resizing.postponed:
                self._postpone(number)
            elif not self.ending and not self.resizing.postponed:
                self.console.say(f"{name_of(number)}: ending the job (once more kills it at once)")
                self.end_by_signal(number)
            elif self.now - self._signalled_at > _REPEAT_INTERVAL:
                self.console.terminal.drop()
                self.end_signal = self.end_signal or self.resizing.postponed
                self._kill(limit=0.0)

    def _postpone(self, number: int) -> None:
        """Postpones the end of the job until the next ranks have loaded its state, which may exist in memory only."""
        self.resizing.postponed = number
        self._signalled_at = self.now
        text = "ending the job when its new ranks have their state"
        self.console.say(f"{name_of(number)}: {text} (once more kills it at once, and loses what is not on disk)")

    def _suspend(self) -> None:
        """Ctrl-Z: suspends the job until the launcher is continued."""
        self.ranks.send({"suspend": True})
        self.console.terminal.hide()
        seconds = stop_until_continued()
        self.now = time.monotonic()
        self._skip_stopped_time(seconds)

    def _skip_stopped_time(self, seconds: float) -> None:
        """Excludes the time in which this process was stopped from the job's time limits, and continues the ranks."""
        self.clock.skip(seconds)
        self.observers.resumed(seconds)
        self.ranks.send({"suspend": False})
