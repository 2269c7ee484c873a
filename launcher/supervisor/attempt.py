"""One attempt to run a job: starts the engine, handles what the agents report, and ends the job.

It has one event loop and no threads: every event is a file descriptor that becomes readable or writable, and every wait
has a deadline. `launcher.diagnosis.failures` decides which failure is the root cause; this module only reacts.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from collectives.errors import name_ranks
from collectives.world import ATTEMPT, STOPPED
from launcher import engines
from launcher.console.console import Console
from launcher.diagnosis.failures import (
    AgentLost,
    EngineEnded,
    EngineLost,
    Failure,
    NotStarted,
    NotStopped,
    Raised,
    RankFailed,
    Stop,
    TimeLimit,
    is_peer_failure,
)
from launcher.diagnosis.job_clock import JobClock
from launcher.diagnosis.liveness import SILENCE
from launcher.diagnosis.observer import Observer
from launcher.engines.start_errors import explain_start_failure, unreachable_host
from launcher.errors import LARGE_PACKETS, UsageError
from launcher.job import Job
from launcher.linux import ENDING_SIGNALS, USER_SIGNALS, stat_of
from launcher.network import ranks_on
from launcher.protocol import Message, ProtocolError, to_bytes, type_and_value
from launcher.supervisor.environment import (
    StateMemory,
    agent_command,
    agents_environment,
    free_port,
    host_of_rank_0,
    master_address,
)
from launcher.supervisor.listener import Listener
from launcher.supervisor.rank_table import RankProcess, RankTable
from launcher.supervisor.reaper import Reaper
from launcher.supervisor.resizing import Resizing, with_ranks
from launcher.supervisor.returning_hosts import ReturningHosts
from launcher.supervisor.signal_pipe import SUSPENDING, name_of, stop_until_continued
from launcher.supervisor.stdin import StdinForwarder

# All times are in seconds.
# After a failure the other ranks have at most this long to end by themselves: their work is lost anyway.
_FAILURE_GRACE = 2.0
# For how long to wait for the failure of a peer, after a rank has reported that it failed because of one.
_PEER_FAILURE_LIMIT = 0.5
# For how long to wait for the others, after a rank has ended with 0 without `collectives.shutdown` (os._exit). If all
# of them end like that, it is no failure.
_EARLY_EXIT_LIMIT = 1.0
# For how long to wait for reports on killed ranks. They come within milliseconds, unless an agent is stopped or dead:
# then the reaper kills everything.
_KILL_LIMIT = 0.5
# For how long to wait for the engine, which cleans up once all agents have ended.
_ENGINE_LIMIT = 1.5
# Bytes that are kept of what the engine prints.
_ENGINE_OUTPUT_LIMIT = 1 << 16
# A signal that comes again sooner than this is the same Ctrl-C: `timeout` of the coreutils signals its child, and then
# its child's whole group.
_REPEAT_INTERVAL = 0.1
# The longest wait for an event.
_MAX_WAIT = 1.0
# If a wait took this much longer than it should have, the launcher was stopped.
_STOPPED_LIMIT = 2.0


class Attempt:
    """One start of a job, until all of its processes have ended.

    console: shows what the ranks write; stdin: forwards the standard input; observers: see every event
    wakeup: file descriptor on which signals arrive; environ: environment of the ranks
    clock: all time limits are on this clock; deadline: its time at which the whole job must have ended
    resizing: requests for another number of ranks; hosts: asks hosts that the job does without whether they are back

    failures: what went wrong, in the order in which the launcher learned of it
    end_signal: number of the signal with which the user ended the job; 0: none
    stop: how the ranks stopped, if they did so as they were asked to; engine_output: the last that the engine printed
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
        hosts: ReturningHosts,
    ) -> None:
        self.job = job
        self.ranks = RankTable(job.size)
        self.now = time.monotonic()
        self.failures: list[Failure] = []
        self.stop: Stop | None = None
        self.end_signal = 0
        self.engine_output = b""
        self._console = console
        self._stdin = stdin
        self._observers = observers
        self._wakeup = wakeup
        self._environ = environ
        self._clock = clock
        self._job_deadline = deadline
        self._resizing = resizing
        self._hosts = hosts
        # Times on the clock, by name. `_on_deadlines` says what happens then.
        self._deadlines = {"start": self._job_time(job.start_limit), "limit": deadline}
        if job.min_ranks is not None:
            self._deadlines["hosts"] = self._job_time(hosts.interval)
        self._ending = False  # The ranks have been asked to end, or the attempt is over.
        self._killed = False  # The ranks have been killed.
        self._released = False  # The agents have been told that they may end.
        self._closed = False
        # The message that asked the ranks to end, for ranks that start later.
        self._end_command: Message | None = None
        self._signalled_at = -math.inf  # When the last signal to end came.
        # The first rank that ended with 0 although others may be waiting for it.
        self._early_exit: RankFailed | None = None
        self._engine = engines.choose_engine(job, environ)
        self._listener = Listener(self._engine.remote_hosts, job.size)
        scratch = os.path.join(environ.get("TMPDIR") or "/tmp", f"ddp-launch-{os.getpid()}-{os.urandom(4).hex()}")
        master = master_address(environ, host_of_rank_0(job, self._engine, environ), free_port())
        environment = self._engine.environment({**environ, **master, **self._agents_environment()}, scratch)
        self._reaper = Reaper(partial(self._engine.start, agent_command(job), environment), scratch)
        os.set_blocking(self._reaper.engine_output, False)

    def _agents_environment(self) -> dict[str, str]:
        """The variables that agents get besides those of their ranks."""
        listener = self._listener
        variables = agents_environment(self.job, self._engine, listener.address, listener.secret)
        if size := self._console.terminal.size():
            variables |= {"COLUMNS": str(max(1, size[0] - self._console.prefix_width)), "LINES": str(size[1])}
        return variables

    def run(self) -> None:
        """Handles events until all ranks have ended."""
        while not self._finished():
            self._run_once()
        self._on_engine_output()
        self._ending = True
        self._clock.release(self.now)
        self._deadlines.clear()
        if self.failures and self.ranks.missing():
            self.failures.append(self._engine_ended())
        self.stop = self._stop()

    def _stop(self) -> Stop | None:
        """How the ranks stopped, if they did so as they were asked to, and the report should say it."""
        stop = self.ranks.stop()
        if stop is None or self.failures or self.resized:
            return None
        if stop.late and not self.end_signal:
            self._record(NotStopped(at=self.now, ranks=stop.late, seconds=2 * self.job.grace))
            return None
        self._observers.stopped(stop)
        return stop

    @property
    def resized(self) -> bool:
        """All ranks have saved their state for a next start with another number of ranks."""
        return not self.failures and self.ranks.saved and all(process.resizing for process in self.ranks.values())

    def unreachable_ranks(self) -> frozenset[int]:
        """The ranks of the host that ssh could not reach; if there is none, ranks that are missing or were lost."""
        # If ssh has named a host, ranks of other hosts may only be late.
        host = unreachable_host(self.engine_output.decode("utf-8", "replace"))
        on_host = ranks_on(self.job.hosts, self.job.size, host)
        # All ranks have been killed: of those that are not over, no answer came.
        lost = {rank for rank, process in self.ranks.items() if process.disconnected or not process.over}
        return on_host or frozenset({*lost, *self.ranks.missing()})

    def drain(self) -> None:
        """Waits until the reader of our output has taken all of it, or the user presses Ctrl-C. The job is over."""
        self._console.flush()
        while self._console.terminal.waiting_for is not None:
            self._run_once()

    @property
    def slots(self) -> list[str]:
        """The memory on other hosts from which a restart can go on, if the agents there stay."""
        return self.ranks.slots() if self.failures or self.resized else []

    def close(self, memory: StateMemory | None = None) -> None:
        """Ends whatever still runs. memory: takes agents on other hosts that hold the state for the next start"""
        self._closed = self._ending = self._released = True
        self._listener.close()
        ranks, slots = self.ranks, self.slots
        self.ranks = RankTable(ranks.n)

        def end() -> None:
            ranks.close()
            self._reaper.close()

        if memory is not None and slots:
            memory.keep(slots, end)
        else:
            end()

    def wait(self, seconds: float) -> None:
        """Waits before a restart, after `close`. A signal (see `end_signal`) or the job's time limit ends the wait."""
        self.now = time.monotonic()
        self.failures = []
        self._deadlines = {"restart": self._job_time(seconds), "limit": self._job_deadline}
        while not (self.end_signal or self.failures or "restart" in self._due()):
            self._run_once()

    def fail(self, failure: Failure) -> None:
        """Records a failure. The first one ends the job."""
        if self.ranks.saved or (self.end_signal and not self._explains_stop(failure)):
            return
        self._record(failure)
        if self._ending:
            return
        if is_peer_failure(failure):
            # If all ranks were ended now, the peer could not report its own failure, which is the cause of this one.
            self._deadlines.setdefault("peer failure", self._job_time(_PEER_FAILURE_LIMIT))
        else:
            self._end_after_failure(failure)

    def _end_after_failure(self, failure: Failure) -> None:
        """Asks the ranks to end. They may save their state first only if the failure is the job's time limit."""
        if isinstance(failure, TimeLimit):
            self._shut_down(signal.SIGTERM, self.job.grace)
        else:
            self._shut_down(signal.SIGTERM, min(self.job.grace, _FAILURE_GRACE), "peer_failed")

    def _explains_stop(self, failure: Failure) -> bool:
        """True for an exception that a rank raised after the user's signal: most likely its state was not saved.

        Not after Ctrl-C, where exceptions are common, because Python raises KeyboardInterrupt anywhere.
        """
        raised = isinstance(failure, RankFailed) and failure.raised is not None
        return raised and self.end_signal != signal.SIGINT and not is_peer_failure(failure)

    def _record(self, failure: Failure) -> None:
        self.failures.append(failure)
        self._observers.failed(failure)

    def ask_stacks(self) -> None:
        """Asks every rank for its Python stacks, which observers then get one by one."""
        self.ranks.send({"stacks": True})

    def stopped_engine(self) -> str:
        """Name and pid of a process of the engine on this machine that is stopped; "" if there is none."""
        if not self._reaper.engine:  # The reaper has not started it yet.
            return f"the launcher's reaper (pid {self._reaper.pid})" if stat_of(self._reaper.pid).state == "T" else ""
        here = os.uname().nodename
        pids = {self._reaper.engine, *(process.engine for process in self.ranks.values() if process.host == here)}
        stopped = (pid for pid in sorted(pids) if stat_of(pid).state == "T")
        return next((f"{stat_of(pid).name} (pid {pid})" for pid in stopped), "")

    # -- the end of a job

    def _shut_down(self, number: int, grace: float, command: str = "signal") -> None:
        """Sends the ranks a signal to end; after `grace` seconds they are killed. command: sent to their agents"""
        if not self._ending:
            self._observers.ending()
        self._ending = True
        self._clock.release(self.now)
        self._deadlines = {"kill": self._job_time(grace)}
        self._end_command = {command: number}
        # A rank that is leaving runs its exit handlers, which a signal would interrupt.
        self.ranks.send(self._end_command, lambda process: not process.over and not process.leaving)

    def _kill(self, limit: float = _KILL_LIMIT) -> None:
        """Kills all ranks. limit: seconds after which the job counts as over, even if agents have not reported"""
        self._ending = self._killed = True
        self._clock.release(self.now)
        self._deadlines = {"sweep": self._job_time(limit)}
        self._end_command = {"kill": True}
        self.ranks.send(self._end_command)

    def _end_by_signal(self, number: int) -> None:
        """Ends the job because of a signal from the user; SIGPIPE: because nothing reads our output any more."""
        self.end_signal = number
        self._signalled_at = self.now
        self._shut_down(number if number != signal.SIGPIPE else signal.SIGTERM, self.job.grace)

    # -- the loop

    def _job_time(self, seconds: float = 0.0) -> float:
        """The time of the clock in `seconds` from now."""
        return self._clock.at(self.now) + seconds

    def _due(self) -> set[str]:
        """The deadlines that have passed."""
        now = self._job_time()
        return {name for name, deadline in self._deadlines.items() if deadline <= now}

    def _run_once(self) -> None:
        """Waits for the next events and handles them."""
        handlers = self._event_handlers()
        poll = select.poll()
        for fd, (mask, _) in handlers.items():
            poll.register(fd, mask)
        until = min(self._listener.deadline, self._observers.tick(self.now), self.now + _MAX_WAIT)
        if not self._clock.held:
            until = min(until, self.now + min(self._deadlines.values(), default=math.inf) - self._job_time())
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
        if not self._released and self._all_ranks_over():
            self._released = True
            keep = self.slots
            self._deadlines = {"engine": self._job_time(0.0 if keep else _ENGINE_LIMIT)}
            self.ranks.send({"release": True}, lambda process: not (keep and process.slots))
        self._console.flush()
        if self._console.terminal.broken and not self._ending and self._resizing.since is None:
            self._end_by_signal(signal.SIGPIPE)

    def _event_handlers(self) -> dict[int, tuple[int, Callable[[], None]]]:
        """By file descriptor: the events to wait for, and the function to call.

        Called in this order, so that the output of ranks is read before the end of their engine.
        """
        table: dict[int, tuple[int, Callable[[], None]]] = {}
        reading = 0 if self._console.backlogged else select.POLLIN
        for process in self.ranks.values():
            if not process.closed:
                mask = reading | (select.POLLOUT if process.channel.backlog else 0)
                table[process.channel.fileno()] = mask, partial(self._on_readable, process)
        table[self._wakeup] = select.POLLIN, self._on_signal
        if not self._closed:
            for fileno in self._listener.filenos():
                table[fileno] = select.POLLIN, partial(self._on_connection, fileno)
            if self._resizing.listener is not None:
                table[self._resizing.listener.fileno()] = select.POLLIN, self._on_resize_request
            if not self._reaper.lost:
                table[self._reaper.fileno()] = select.POLLIN, self._on_reaper
            if not self._reaper.output_closed:
                table[self._reaper.engine_output] = select.POLLIN, self._on_engine_output
        if (stdin_fd := self._stdin.readable_fd(self.ranks)) is not None:
            table[stdin_fd] = select.POLLIN, partial(self._stdin.read, self.ranks)
        if (output_fd := self._console.terminal.waiting_for) is not None:
            table[output_fd] = select.POLLOUT, self._console.flush
        return table

    def _on_deadlines(self) -> None:
        due = self._due()
        for name in due - {"sweep", "engine", "restart"}:  # `_finished` and `wait` look for these.
            self._deadlines.pop(name, None)
        if "start" in due:
            text = f"{name_ranks(self.ranks.missing())} did not start within {self.job.start_limit:g} s"
            if engine := self.stopped_engine():
                text += f": {engine} is stopped"
            elif self._engine.remote_hosts:
                text += f": {LARGE_PACKETS}"
            self.fail(NotStarted(at=self.now, message=text))
        if "limit" in due:
            self.fail(TimeLimit(at=self.now, seconds=self.job.timeout or 0.0))
        if "hosts" in due:
            self._take_hosts()
        if "joining" in due:
            self.fail(NotStarted(at=self.now, message=self.ranks.joining_timeout()))
        if "stopping" in due:  # Asks the ranks that did not stop with the others; they may save their state, too.
            self._shut_down(signal.SIGTERM, self.job.grace)
        if "peer failure" in due:
            self._end_after_failure(self.failures[0])
        if "early exit" in due and self._early_exit is not None and not self._all_ranks_over():
            self.fail(self._early_exit)
        if "kill" in due:
            if self.end_signal or TimeLimit in map(type, self.failures):
                self._report_overdue()
            self._kill()
        self._listener.drop_silent(self.now)

    def _report_overdue(self) -> None:
        """Says which ranks are killed because they have not ended within `Job.grace`, unless the `Stop` says it."""
        late = sorted(rank for rank, process in self.ranks.items() if not process.over)
        if self.ranks.stop() is None:
            consequence = "killed, and what was not saved is lost (more time: --grace)"
            self._console.say(f"{name_ranks(late)} did not end within {self.job.grace:g} s: {consequence}")

    def _finished(self) -> bool:
        if self._due() & {"sweep", "engine"}:
            return True
        return self._all_ranks_over() and (self._reaper.status is not None or self._reaper.lost)

    def _all_ranks_over(self) -> bool:
        return (self._ending or self.ranks.complete) and self.ranks.over

    # -- the engine and its reaper

    def _on_reaper(self) -> None:
        self._reaper.receive()
        if self._reaper.lost:
            self.fail(EngineLost(at=self.now, name="the launcher's reaper", pid=self._reaper.pid, above=True))
            self._kill()
        elif self._reaper.status is not None and (self.failures or not self._released):
            self._on_engine_output()  # The output may say why it ended.
            failure = self._engine_ended()
            if not self._ending or failure.status < 0:
                self.fail(failure)

    def _engine_ended(self) -> EngineEnded:
        pid, status, name = self._reaper.engine, self._reaper.status or 0, self._engine.name
        return EngineEnded(at=self.now, pid=pid, status=status, missing=self.ranks.missing(), name=name)

    def _on_engine_output(self) -> None:
        """Keeps what the engine itself prints: the report on a failure quotes it if nothing explains more."""
        self.engine_output = (self.engine_output + self._reaper.read_output())[-_ENGINE_OUTPUT_LIMIT:]
        if self.ranks.complete or self.failures:
            return
        if sentence := explain_start_failure(self.engine_output.decode("utf-8", "replace")):
            self.fail(NotStarted(at=self.now, message=sentence, code=2))

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
                self._console.say(f"{name_of(number)}: the job does not start again")
                self.end_signal = number
            elif self._resizing.since is not None and not self._resizing.postponed:
                self._postpone(number)
            elif not self._ending and not self._resizing.postponed:
                self._console.say(f"{name_of(number)}: ending the job (once more kills it at once)")
                self._end_by_signal(number)
            elif self.now - self._signalled_at > _REPEAT_INTERVAL:
                self._console.terminal.drop()
                self.end_signal = self.end_signal or self._resizing.postponed
                self._kill(limit=0.0)

    def _postpone(self, number: int) -> None:
        """Ends the job as soon as the next ranks have loaded its state: now it may be in memory alone."""
        self._resizing.postponed = number
        self._signalled_at = self.now
        text = "ending the job when its new ranks have their state"
        self._console.say(f"{name_of(number)}: {text} (once more kills it at once, and loses what is not on disk)")

    def _suspend(self) -> None:
        """Ctrl-Z: suspends the job until the launcher is continued."""
        self.ranks.send({"suspend": True})
        self._console.terminal.hide()
        seconds = stop_until_continued()
        self.now = time.monotonic()
        self._skip_stopped_time(seconds)

    def _skip_stopped_time(self, seconds: float) -> None:
        """Leaves the time out of all time limits in which this process was stopped, and continues the ranks."""
        self._clock.skip(seconds)
        self._observers.resumed(seconds)
        self.ranks.send({"suspend": False})

    # -- resizing

    def _on_resize_request(self) -> None:
        n = self._resizing.receive()
        if n is None:
            return
        same = f"the job has {n} rank{'s' * (n != 1)} already"
        if why := same if n == self.job.size else self._resize(with_ranks(self.job, n)):
            self._resizing.answer(why)
        else:
            self._hosts.max_ranks = n

    def _take_hosts(self) -> None:
        """Resizes the job onto hosts that it does without, if some have answered; asks them again if not."""
        hosts = self._hosts
        self._deadlines["hosts"] = self._job_time(hosts.interval)
        max_ranks = self.ranks.max_ranks
        if max_ranks is None or self._resizing.target is not None:
            return  # ranks are not in their loop yet, or about to leave it
        target = hosts.answered(self.job, max_ranks)
        hosts.ask((target or self.job).hosts)
        if target is None:
            return
        names = ", ".join(host.name for host in target.hosts if host not in self.job.hosts)
        self._console.say(f"{names} can be reached: the job is resized from {self.job.size} to {target.size} ranks")
        if why := self._resize(target):
            self._console.say(why)
            hosts.failed()

    def _resize(self, target: Job) -> str:
        """Has the ranks leave their loop, so that the job goes on as `target`. Returns: why it cannot; else nothing."""
        n = target.size
        memory = self._resizing.memory
        max_ranks = self.ranks.max_ranks
        if self._ending:
            return "the job is being ended"
        if max_ranks is None:
            loop = "the loop of a ddp.checkpoint.Checkpointer, which is what can leave for another number of ranks"
            return f"not all ranks of the job are in {loop}"
        if n > max_ranks:
            return f"micro_batches={max_ranks} is the most ranks that the job can have, not {n}"
        try:
            engines.choose_engine(engines.resolve_size(target, self._environ), self._environ)
        except UsageError as error:
            return str(error)
        if memory.variable and not memory.grow(n):
            return f"the system grants no memory, or no open files, for the state of {n} ranks"
        self._resizing.target = target
        self.ranks.send({"resize": True})
        return ""

    def _on_resizable(self, process: RankProcess, limit: int) -> None:
        """A rank has begun a loop in which the job can be resized. limit: see `RankProcess.resizable`"""
        process.resizable = limit
        resizing = self._resizing
        if resizing.before is not None and self.ranks.max_ranks is not None:
            self._console.say(resizing.complete(self._job_time()))
            if resizing.postponed:
                self._end_by_signal(resizing.postponed)
                resizing.postponed = 0

    def _on_held(self, process: RankProcess) -> None:
        """The state of the rank has been copied to memory."""
        process.held = True
        if self.ranks.held:
            memory = self._resizing.memory
            memory.held = int(self._environ[ATTEMPT])
            memory.release()

    def _on_resizing(self, process: RankProcess, step: int) -> None:
        """A rank has left its loop after `step`, and saved its state for the ranks of the next start."""
        process.resizing = True
        if self._resizing.since is None:
            self._resizing.step = step
            self._resizing.since = self._job_time()

    # -- agents

    def _on_connection(self, fileno: int) -> None:
        authenticated = self._listener.serve(fileno)
        if authenticated is None:
            return
        channel, hello = authenticated
        process = RankProcess(channel, hello)
        rank = process.rank
        if int(hello["size"]) != self.job.size or rank in self.ranks:
            channel.close()
            name, size = self._engine.name, hello["size"]
            text = f"{name} was to start {self.job.size} ranks, but rank {rank} was told of a world of {size}"
            self.fail(NotStarted(at=self.now, message=text))
            return
        self.ranks[rank] = process
        if self.ranks.complete:
            self._deadlines.pop("start", None)
        self._stdin.rank_started(rank, self.ranks)
        self._observers.rank_started(rank, hello)
        if self.job.heartbeat_timeout is not None:
            channel.send({"heartbeat": max(self.job.heartbeat_timeout, SILENCE)})
        if self.ranks.debugging():
            channel.send({"pause": True})
        if self._end_command is not None:
            channel.send(self._end_command)

    def _on_readable(self, process: RankProcess) -> None:
        """An agent has sent something, or closed its connection."""
        process.channel.flush()
        try:
            messages = process.channel.receive()
        except ProtocolError:
            messages = None  # Nothing that it sends can be trusted.
        for message in messages or ():
            self._handle_message(process, message)
        if messages is not None:
            return
        process.closed = True
        process.channel.close()
        if not process.over:
            self._set_debugging(process, False)
            process.lost = True
            self._console.rank_ended(process.rank, -signal.SIGKILL)  # Prints the rank's unfinished lines.
            if not self._killed:
                process.disconnected = True
                self.fail(self._agent_lost(process, process.agent))

    def _handle_message(self, process: RankProcess, message: Message) -> None:
        """Handles what an agent has sent: its own messages, and reports of its rank."""
        kind, value = type_and_value(message)
        match kind:
            case "out" | "err":
                self._observers.output(process.rank, kind, to_bytes(value))
            case "heartbeat":
                self._observers.heartbeat(process.rank, value, self.now)
            case "joining":
                self._on_joining(process, value)
            case "stopped":
                process.step = value
            case "resizable":
                self._on_resizable(process, value)
            case "resizing":
                self._on_resizing(process, value)
            case "held":
                self._on_held(process)
            case "stacks":
                self._observers.stacks(process.rank, value)
            case "stdin_taken":
                self._stdin.acknowledged(process.rank, self.ranks)
            case "debugging":
                self._set_debugging(process, value)
            case "quit":
                if not self._ending:
                    self._console.say(f"{value}: ending the job (Ctrl-C kills it at once)")
                    self._end_by_signal(signal.SIGINT)
            case "refused":
                process.leaving = True
                host = f"{process.host}: " if self.ranks.several_hosts() else ""
                self.fail(NotStarted(at=self.now, message=f"{host}{value}", code=2))
            case "raised":
                process.leaving = True
                self.fail(self._rank_failed(process, raised=Raised(**value)))
            case "leaving":
                process.leaving = True
                self._handle_exit(process, self._rank_failed(process, status=value))
            case "signalled":
                process.asked = True
            case "parent_lost":
                failure: Failure = self._agent_lost(process, value)
                if value == process.engine:
                    failure = EngineLost(at=self.now, name=process.engine_name, pid=value, host=process.host)
                self.fail(failure)
            case "end":
                self._on_end(process, message)

    def _on_joining(self, process: RankProcess, limit: float | None) -> None:
        """A rank has begun to wait in `collectives.init`, for `limit` seconds at most, or no longer waits: None."""
        process.joining = limit
        process.joined = process.joined or limit is None
        self._observers.joining(process.rank, limit is not None)
        if not (waiting := self.ranks.joining()):
            self._deadlines.pop("joining", None)
        elif not self._ending:
            self._deadlines.setdefault("joining", self._job_time(min(waiting.values())))
            self._check_for_missed_ranks()

    def _set_debugging(self, process: RankProcess, debugging: bool) -> None:
        """A rank has entered or left a debugger. All time limits are suspended while any rank is in one."""
        before = self.ranks.debugging()
        process.debugging = debugging
        after = self.ranks.debugging()
        if after == before:
            return
        self._observers.debugging(after)
        if not after:
            self._clock.release(self.now)
        elif not self._ending:
            self._clock.hold(self.now)
        if bool(after) != bool(before):
            self.ranks.send({"pause": bool(after)})

    def _on_end(self, process: RankProcess, message: Message) -> None:
        """A rank has ended."""
        self._set_debugging(process, False)
        process.status = int(message["end"])
        self._observers.rank_ended(process.rank, process.status)
        # However a rank ends after the launcher's own signal, that is not a failure.
        if self._ending:
            return
        failure = self._rank_failed(process, status=process.status, memory=message.get("memory"))
        if process.status != 0 and not process.leaving:
            self._handle_exit(process, failure)
        elif process.status == 0 and message["deserted"] and self._early_exit is None:
            self._early_exit = failure
            self._deadlines["early exit"] = self._job_time(_EARLY_EXIT_LIMIT)
        else:
            self._check_for_missed_ranks()

    def _check_for_missed_ranks(self) -> None:
        """Fails a rank that ended with 0 before it called `collectives.init`, if others wait for it there."""
        waiting = tuple(self.ranks.joining())
        for process in self.ranks.values():
            if process.status == 0 and not process.joined and waiting:
                self.fail(self._rank_failed(process, status=0, missed_by=waiting))
                return

    def _handle_exit(self, process: RankProcess, failure: RankFailed) -> None:
        """A rank ends with another code than 0: a failure, unless it is STOPPED."""
        if failure.status != STOPPED:
            self.fail(failure)
            return
        process.saved = True
        if not self._ending:
            self._deadlines.setdefault("stopping", self._job_time(self.job.grace))

    def _rank_failed(self, process: RankProcess, **details: Any) -> RankFailed:
        return RankFailed(
            at=self.now,
            rank=process.rank,
            pid=process.pid,
            host=process.host,
            asked=process.asked,
            **details,
        )

    def _agent_lost(self, process: RankProcess, pid: int) -> AgentLost:
        return AgentLost(at=self.now, rank=process.rank, pid=pid, host=process.host, started=process.started)
