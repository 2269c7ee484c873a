"""One attempt to run a job: starts the engine, listens to the agents, decides when it is over, ends it.

One loop, one poll, no thread: every event is a readable or writable file, every wait has a deadline. What a failure is
and which is the root cause is decided in `launcher.diagnosis.failures`; here is only what to do about it.
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
from collectives.world import STOPPED
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
from launcher.linux import stat_of
from launcher.network import ranks_on
from launcher.protocol import Message, ProtocolError, to_bytes, type_and_value
from launcher.supervisor.environment import agent_command, agents_environment, free_port, host_of_rank_0, master_address
from launcher.supervisor.listener import Listener
from launcher.supervisor.rank_table import RankProcess, RankTable
from launcher.supervisor.reaper import Reaper
from launcher.supervisor.resizing import Resizing, with_ranks
from launcher.supervisor.signal_pipe import ENDING, FORWARDED, SUSPENDING, name_of, stand_still
from launcher.supervisor.stdin import StdinForwarder

# After a failure the other ranks' work is lost: they get at most this long to end by themselves.
_FAILURE_GRACE = 2.0
# A rank that failed because a peer did may be reported before that peer.
_SETTLE = 0.5
# A rank that ended with 0 without `collectives.shutdown` (os._exit) is no failure if the others end like that too.
_DESERTION_LIMIT = 1.0
# Killed ranks are reported within milliseconds, unless their agent is stopped or gone: then the reaper ends everything.
_KILL_LIMIT = 0.5
# The engine cleans up after itself once all agents have ended.
_ENGINE_LIMIT = 1.5
_ENGINE_OUTPUT_LIMIT = 1 << 16
# s; one Ctrl-C may come twice: `timeout` of the coreutils signals its child, and then its child's whole group.
_TWICE = 0.1
# s; a loop that turns at least so often and stood still for longer than that was stopped.
_TURN, _STOOD_STILL = 1.0, 2.0


class Attempt:
    """A job from its start to its end.

    console: shows what the ranks write; stdin: goes to one of them; observers: see every event
    wakeup: file descriptor on which signals arrive; environ: of the ranks
    resizing: requests for another number of ranks
    clock: by which all time limits run; until: its time at which the whole job must have ended

    failures: what went wrong, in the order in which it was learned; stopped: the signal by which the user ended it
    stop: how the ranks stopped, if they did so as asked; engine_output: the last of what the engine printed
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
        until: float = math.inf,
        *,
        resizing: Resizing,
    ) -> None:
        self.job = job
        self.ranks = RankTable(job.size)
        self.now = time.monotonic()
        self.failures: list[Failure] = []
        self.stop: Stop | None = None
        self.stopped = 0
        self.engine_output = b""
        self._console, self._stdin, self._observers, self._wakeup = console, stdin, observers, wakeup
        self._clock, self._until = clock, until
        self._environ, self._resizing = environ, resizing
        #: What happens at which time of the clock, by name; `_on_deadlines` says what.
        self._deadlines = {"start": self._after(job.start_limit), "limit": until}
        self._ending = False  # the ranks have been asked to end, or the attempt is over
        self._killed = False  # and are asked no more
        self._released = False  # the agents may end
        self._closed = False
        self._order: Message | None = None  # for ranks that start when the others have been asked to end
        self._stopped_at = -math.inf
        self._deserter: RankFailed | None = None  # ended with 0, and perhaps left others waiting
        self._engine = engines.choose_engine(job, environ)
        self._listener = Listener(self._engine.remote_hosts, job.size)
        scratch = os.path.join(environ.get("TMPDIR") or "/tmp", f"ddp-launch-{os.getpid()}-{os.urandom(4).hex()}")
        master = master_address(environ, host_of_rank_0(job, self._engine, environ), free_port())
        environment = self._engine.environment({**environ, **master, **self._agents_environment()}, scratch)
        self._reaper = Reaper(partial(self._engine.start, agent_command(job), environment), scratch)
        os.set_blocking(self._reaper.engine_output, False)

    def _agents_environment(self) -> dict[str, str]:
        """What agents find in their environment."""
        listener = self._listener
        ours = agents_environment(self.job, self._engine, listener.address, listener.secret)
        if size := self._console.terminal.size():
            ours |= {"COLUMNS": str(max(1, size[0] - self._console.prefix_width)), "LINES": str(size[1])}
        return ours

    def run(self) -> None:
        """Watches the ranks to their end."""
        while not self._finished():
            self._turn()
        self._on_engine_output()
        self._ending = True
        self._clock.release(self.now)
        self._deadlines.clear()
        if self.failures and self.ranks.missing():
            self.failures.append(self._engine_ended())
        self.stop = self._stop()

    def _stop(self) -> Stop | None:
        """How the job stopped, if it did so as it was asked to."""
        stop = self.ranks.stop()
        if stop is None or self.failures or self.resized:
            return None  # a failure, or a time limit, is what is reported
        if stop.late and not self.stopped:
            self._note(NotStopped(at=self.now, ranks=stop.late, seconds=2 * self.job.grace))
            return None
        self._observers.stopped(stop)
        return stop

    @property
    def resized(self) -> bool:
        """All ranks have left their state to those of the next start, of which there are more or fewer."""
        return not self.failures and self.ranks.saved and all(process.resizing for process in self.ranks.values())

    def gone(self) -> frozenset[int]:
        """The ranks that cannot be reached: of a host that ssh does not reach; else not started, or silent."""
        # Where ssh has named the host that it does not reach, others may only be late.
        host = unreachable_host(self.engine_output.decode("utf-8", "replace"))
        away = ranks_on(self.job.hosts, self.job.size, host)
        # Ranks that are not over were killed, and it did not help.
        silent = {rank for rank, process in self.ranks.items() if process.silent or not process.over}
        return away or frozenset({*silent, *self.ranks.missing()})

    def drain(self) -> None:
        """A slow reader gets everything, unless the user presses Ctrl-C. The job is over."""
        self._console.flush()
        while self._console.terminal.waiting_for is not None:
            self._turn()

    def close(self) -> None:
        """Ends whatever still runs."""
        self._closed = self._ending = self._released = True
        self.ranks.close()
        self._listener.close()
        self._reaper.close()

    def wait(self, seconds: float) -> None:
        """Waits before a restart, once this attempt is closed. A signal (`stopped`) or the time limit ends it early."""
        self.now = time.monotonic()
        self.failures = []
        self._deadlines = {"restart": self._after(seconds), "limit": self._until}
        while not (self.stopped or self.failures or "restart" in self._due()):
            self._turn()

    def fail(self, failure: Failure) -> None:
        """Records a failure. The first ends the job."""
        if self.ranks.saved or (self.stopped and not self._explains_stop(failure)):
            return
        self._note(failure)
        if self._ending:
            return
        if is_peer_failure(failure):
            # Ending the others now would kill the rank whose failure this is before it has reported.
            self._deadlines.setdefault("settle", self._after(_SETTLE))
        else:
            self._end_after(failure)

    def _end_after(self, failure: Failure) -> None:
        """Asks the ranks to end. When time is over they may save first; else nothing that they do counts any more."""
        if isinstance(failure, TimeLimit):
            self._shut_down(signal.SIGTERM, self.job.grace)
        else:
            self._shut_down(signal.SIGTERM, min(self.job.grace, _FAILURE_GRACE), "peer_failed")

    def _explains_stop(self, failure: Failure) -> bool:
        """True for an exception of a rank that handles SIGTERM: most likely its state was not saved.

        After Ctrl-C exceptions are common, since Python raises KeyboardInterrupt anywhere.
        """
        raised = isinstance(failure, RankFailed) and failure.raised is not None
        return raised and self.stopped != signal.SIGINT and not is_peer_failure(failure)

    def _note(self, failure: Failure) -> None:
        self.failures.append(failure)
        self._observers.failed(failure)

    def ask_stacks(self) -> None:
        """Asks every rank for its Python stacks; observers get them one by one."""
        self.ranks.send({"stacks": True})

    def stopped_engine(self) -> str:
        """Name and pid of a process of the engine on this machine that is stopped, "" if none is."""
        if not self._reaper.engine:  # without the reaper, no engine starts
            return f"the launcher's reaper (pid {self._reaper.pid})" if stat_of(self._reaper.pid).state == "T" else ""
        here = os.uname().nodename
        pids = {self._reaper.engine, *(process.engine for process in self.ranks.values() if process.host == here)}
        stopped = (pid for pid in sorted(pids) if stat_of(pid).state == "T")
        return next((f"{stat_of(pid).name} (pid {pid})" for pid in stopped), "")

    # -- the end of a job

    def _shut_down(self, number: int, grace: float, order: str = "signal") -> None:
        """Asks the ranks to end, by a signal; they have `grace` seconds for it. order: what the agents are sent"""
        if not self._ending:
            self._observers.ending()
        self._ending = True
        self._clock.release(self.now)
        self._deadlines = {"kill": self._after(grace)}
        self._order = {order: number}
        # A rank that raised or exits is on its way out, through its exit handlers.
        self.ranks.send(self._order, lambda process: not process.over and not process.leaving)

    def _kill(self, limit: float = _KILL_LIMIT) -> None:
        """Kills all ranks. limit: seconds until the job counts as over, whatever agents report"""
        self._ending = self._killed = True
        self._clock.release(self.now)
        self._deadlines = {"sweep": self._after(limit)}
        self._order = {"kill": True}
        self.ranks.send(self._order)

    def _end_by(self, number: int) -> None:
        """The user ends the job by this signal; SIGPIPE: by not reading on."""
        self.stopped, self._stopped_at = number, self.now
        self._shut_down(number if number != signal.SIGPIPE else signal.SIGTERM, self.job.grace)

    # -- the loop

    def _after(self, seconds: float) -> float:
        """The time of the clock in so many seconds."""
        return self._clock.at(self.now) + seconds

    def _due(self) -> set[str]:
        """The deadlines that have passed."""
        at = self._after(0.0)
        return {name for name, when in self._deadlines.items() if when <= at}

    def _turn(self) -> None:
        """Waits for the next events and handles them."""
        interests = self._interests()
        poll = select.poll()
        for fd, (mask, _) in interests.items():
            poll.register(fd, mask)
        until = min(self._listener.deadline, self._observers.tick(self.now), self.now + _TURN)
        if not self._clock.held:
            until = min(until, self.now + min(self._deadlines.values(), default=math.inf) - self._after(0.0))
        wait = max(0.0, 1000 * (until - time.monotonic()))
        before = self.now  # not the time of now: it may have been stopped in the turn before
        events = poll.poll(wait)
        self.now = time.monotonic()
        if (stood := self.now - before - 1e-3 * wait) > _STOOD_STILL:
            self._resume(stood)
        for fd, _ in events:
            interests[fd][1]()
        self._on_deadlines()
        if not self._released and self._all_over():  # no rank is left to watch
            self._released = True
            self._deadlines = {"engine": self._after(_ENGINE_LIMIT)}
            self.ranks.send({"release": True}, lambda process: True)
        self._console.flush()
        if self._console.terminal.broken and not self._ending and self._resizing.since is None:
            self._end_by(signal.SIGPIPE)

    def _interests(self) -> dict[int, tuple[int, Callable[[], None]]]:
        """What to wait for now, and what to call. In this order: ranks' output comes before their engine's end."""
        table: dict[int, tuple[int, Callable[[], None]]] = {}
        reading = 0 if self._console.backlogged else select.POLLIN
        for rank, process in self.ranks.items():
            if not process.closed:
                mask = reading | (select.POLLOUT if process.channel.backlog else 0)
                table[process.channel.fileno()] = mask, partial(self._on_readable, rank, process)
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
        if (wanted := self._stdin.readable_fd(self.ranks)) is not None:
            table[wanted] = select.POLLIN, partial(self._stdin.read, self.ranks)
        if (waiting := self._console.terminal.waiting_for) is not None:
            table[waiting] = select.POLLOUT, self._console.flush
        return table

    def _on_deadlines(self) -> None:
        due = self._due()
        for name in due - {"sweep", "engine", "restart"}:  # which end a loop
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
        if "joining" in due:
            self.fail(NotStarted(at=self.now, message=self.ranks.joining_timeout()))
        if "stopping" in due:  # ranks that did not stop with the others are asked now, and may save as well
            self._shut_down(signal.SIGTERM, self.job.grace)
        if "settle" in due:
            self._end_after(self.failures[0])
        if "deserted" in due and self._deserter is not None and not self._all_over():
            self.fail(self._deserter)
        if "kill" in due:
            if self.stopped or TimeLimit in map(type, self.failures):
                self._report_overdue()
            self._kill()
        self._listener.drop_silent(self.now)

    def _report_overdue(self) -> None:
        """Says which ranks are killed since they have not ended within `Job.grace`, unless `Stop` says it."""
        late = sorted(rank for rank, process in self.ranks.items() if not process.over)
        if self.ranks.stop() is None:
            lost = "killed, and what was not saved is lost (more time: --grace)"
            self._console.say(f"{name_ranks(late)} did not end within {self.job.grace:g} s: {lost}")

    def _finished(self) -> bool:
        if self._due() & {"sweep", "engine"}:
            return True
        return self._all_over() and (self._reaper.status is not None or self._reaper.lost)

    def _all_over(self) -> bool:
        return (self._ending or self.ranks.complete) and self.ranks.over

    # -- the engine and its reaper

    def _on_reaper(self) -> None:
        self._reaper.receive()
        if self._reaper.lost:
            self.fail(EngineLost(at=self.now, name="the launcher's reaper", pid=self._reaper.pid, above=True))
            self._kill()
        elif self._reaper.status is not None and (self.failures or not self._released):
            self._on_engine_output()  # its output may say why
            failure = self._engine_ended()
            if not self._ending or failure.status < 0:
                self.fail(failure)

    def _engine_ended(self) -> EngineEnded:
        pid, status, name = self._reaper.engine, self._reaper.status or 0, self._engine.name
        return EngineEnded(at=self.now, pid=pid, status=status, missing=self.ranks.missing(), name=name)

    def _on_engine_output(self) -> None:
        """Keeps what the engine itself prints, for the case that nothing explains a failure better."""
        self.engine_output = (self.engine_output + self._reaper.read_output())[-_ENGINE_OUTPUT_LIMIT:]
        if self.ranks.complete or self.failures:
            return
        if sentence := explain_start_failure(self.engine_output.decode("utf-8", "replace")):
            self.fail(NotStarted(at=self.now, message=sentence, code=2))

    # -- signals

    def _on_signal(self) -> None:
        for number in os.read(self._wakeup, 512):
            if number in FORWARDED:
                self.ranks.send({"signal": number})
            elif number == SUSPENDING:
                self._suspend()
            elif number not in ENDING:
                continue  # SIGCONT, SIGWINCH: only to look again
            elif self._closed:
                self._console.say(f"{name_of(number)}: the job does not start again")
                self.stopped = number
            elif self._resizing.since is not None and not self._resizing.postponed:
                self._postpone(number)
            elif not self._ending and not self._resizing.postponed:
                self._console.say(f"{name_of(number)}: ending the job (once more kills it at once)")
                self._end_by(number)
            elif self.now - self._stopped_at > _TWICE:
                self._console.terminal.drop()
                self.stopped = self.stopped or self._resizing.postponed
                self._kill(limit=0.0)

    def _postpone(self, number: int) -> None:
        """Ends the job only when the next ranks have its state, which may be in memory alone. They save it and stop."""
        self._resizing.postponed, self._stopped_at = number, self.now
        when = "ending the job when its new ranks have their state"
        self._console.say(f"{name_of(number)}: {when} (once more kills it at once, and loses what is not on disk)")

    def _suspend(self) -> None:
        """Ctrl-Z: suspends the job until the launcher is continued."""
        self.ranks.send({"suspend": True})
        self._console.terminal.hide()
        stood = stand_still()
        self.now = time.monotonic()
        self._resume(stood)

    def _resume(self, stood: float) -> None:
        """This process was stopped for a while, and perhaps its ranks: that time does not count."""
        self._clock.skip(stood)
        self._observers.resumed(stood)
        self.ranks.send({"suspend": False})

    # -- another number of ranks

    def _on_resize_request(self) -> None:
        n = self._resizing.receive()
        if n is None:
            return
        try:
            self._resizing.target = self._resized_job(n)
        except UsageError as error:
            self._resizing.answer(str(error))
        else:
            self.ranks.send({"resize": True})

    def _resized_job(self, n: int) -> Job:
        """The job with `n` ranks. Raises: UsageError if that cannot be."""
        if self._ending:
            raise UsageError("the job is being ended")
        if self._engine.remote_hosts:
            raise UsageError(f"a job can be resized on one machine, not on {self._engine.remote_hosts[0]}, too")
        if n == self.job.size:
            raise UsageError(f"the job has {n} rank{'s' * (n != 1)} already")
        max_ranks = self.ranks.max_ranks
        if max_ranks is None:
            loop = "the loop of a ddp.checkpoint.Checkpointer, which is what can leave for another number of ranks"
            raise UsageError(f"not all ranks of the job are in {loop}")
        if n > max_ranks:
            raise UsageError(f"micro_batches={max_ranks} is the most ranks that the job can have, not {n}")
        target = with_ranks(self.job, n)
        engines.choose_engine(engines.resolve_size(target, self._environ), self._environ)
        memory = self._resizing.memory
        if memory.variable and not memory.grow(n):
            raise UsageError(f"the system grants no memory, or no open files, for the state of {n} ranks")
        return target

    def _on_resizable(self, rank: int, process: RankProcess, limit: int | None) -> None:
        process.resizable = limit
        resizing = self._resizing
        if resizing.before is not None and self.ranks.max_ranks is not None:
            self._console.say(resizing.finish(self._after(0.0)))
            if resizing.postponed:
                self._end_by(resizing.postponed)
                resizing.postponed = 0

    def _on_resizing(self, rank: int, process: RankProcess, step: int) -> None:
        process.resizing = True
        if self._resizing.since is None:
            self._resizing.step = step
            self._resizing.since = self._after(0.0)

    # -- agents

    def _on_connection(self, fileno: int) -> None:
        authenticated = self._listener.serve(fileno)
        if authenticated is None:
            return
        channel, hello = authenticated
        rank = int(hello["rank"])
        if int(hello["size"]) != self.job.size or rank in self.ranks:
            channel.close()
            name, size = self._engine.name, hello["size"]
            text = f"{name} was to start {self.job.size} ranks, but rank {rank} was told of a world of {size}"
            self.fail(NotStarted(at=self.now, message=text))
            return
        self.ranks[rank] = RankProcess(channel, hello)
        if self.ranks.complete:
            self._deadlines.pop("start", None)
        self._stdin.rank_started(rank, self.ranks)
        self._observers.rank_started(rank, hello)
        if self.job.heartbeat_timeout is not None:
            channel.send({"heartbeat": max(self.job.heartbeat_timeout, SILENCE)})
        if self.ranks.debugging():
            channel.send({"pause": True})
        if self._order is not None:
            channel.send(self._order)

    def _on_readable(self, rank: int, process: RankProcess) -> None:
        """An agent has sent something, or closed its connection."""
        process.channel.flush()
        try:
            messages = process.channel.receive()
        except ProtocolError:
            messages = None  # nothing that it sends can be trusted
        for message in messages or ():
            kind, value = type_and_value(message)
            # Each type of message has a method; types that need no action have none.
            if kind == "end":
                self._on_end(rank, process, message)
            elif kind in ("out", "err"):
                self._observers.output(rank, kind, to_bytes(value))
            elif (handler := getattr(self, f"_on_{kind}", None)) is not None:
                handler(rank, process, value)
        if messages is not None:
            return
        process.closed = True
        process.channel.close()
        if not process.over:
            self._on_debugging(rank, process, False)
            process.lost = True
            self._console.rank_ended(rank, -signal.SIGKILL)  # prints its unfinished lines
            if not self._killed:
                process.silent = True
                self.fail(self._agent_lost(rank, process, process.agent))

    def _on_heartbeat(self, rank: int, process: RankProcess, beat: Message) -> None:
        self._observers.heartbeat(rank, beat, self.now)

    def _on_stacks(self, rank: int, process: RankProcess, text: str) -> None:
        self._observers.stacks(rank, text)

    def _on_joining(self, rank: int, process: RankProcess, limit: float | None) -> None:
        process.joining, process.joined = limit, process.joined or limit is None
        self._observers.joining(rank, limit is not None)
        if not (waiting := self.ranks.joining()):
            self._deadlines.pop("joining", None)
        elif not self._ending:
            self._deadlines.setdefault("joining", self._after(min(waiting.values())))
            self._look_for_ended_ranks()

    def _on_quit(self, rank: int, process: RankProcess, why: str) -> None:
        if not self._ending:
            self._console.say(f"{why}: ending the job (Ctrl-C kills it at once)")
            self._end_by(signal.SIGINT)

    def _on_refused(self, rank: int, process: RankProcess, why: str) -> None:
        process.leaving = True
        where = f"{process.host}: " if self.ranks.several_hosts() else ""
        self.fail(NotStarted(at=self.now, message=f"{where}{why}", code=2))

    def _on_raised(self, rank: int, process: RankProcess, raised: dict[str, str]) -> None:
        process.leaving = True
        self.fail(self._rank_failed(rank, process, raised=Raised(**raised)))

    def _on_stopped(self, rank: int, process: RankProcess, step: int) -> None:
        process.step = step

    def _on_leaving(self, rank: int, process: RankProcess, status: int) -> None:
        process.leaving = True
        self._leave(process, self._rank_failed(rank, process, status=status))

    def _on_signalled(self, rank: int, process: RankProcess, number: int) -> None:
        process.asked = True

    def _on_stdin_taken(self, rank: int, process: RankProcess, value: object) -> None:
        self._stdin.acknowledged(rank, self.ranks)

    def _on_parent_lost(self, rank: int, process: RankProcess, pid: int) -> None:
        if pid == process.engine:
            self.fail(EngineLost(at=self.now, name=process.engine_name, pid=pid, host=process.host))
        else:
            self.fail(self._agent_lost(rank, process, pid))

    def _on_debugging(self, rank: int, process: RankProcess, debugging: bool) -> None:
        before = self.ranks.debugging()
        process.debugging = debugging
        now = self.ranks.debugging()
        if now == before:
            return
        self._observers.debugging(now)
        if not now:
            self._clock.release(self.now)
        elif not self._ending:
            self._clock.hold(self.now)
        if bool(now) != bool(before):
            self.ranks.send({"pause": bool(now)})

    def _on_end(self, rank: int, process: RankProcess, message: Message) -> None:
        self._on_debugging(rank, process, False)
        process.status = int(message["end"])
        self._observers.rank_ended(rank, process.status)
        # What a rank makes of our own signal is not a failure.
        if self._ending:
            return
        failed = self._rank_failed(rank, process, status=process.status, memory=message.get("memory"))
        if process.status != 0 and not process.leaving:
            self._leave(process, failed)
        elif process.status == 0 and message["deserted"] and self._deserter is None:
            self._deserter = failed
            self._deadlines["deserted"] = self._after(_DESERTION_LIMIT)
        else:
            self._look_for_ended_ranks()

    def _look_for_ended_ranks(self) -> None:
        """A rank that ended with 0 before it came to `collectives.init` has failed if others wait for it there."""
        waiting = tuple(self.ranks.joining())
        for rank, process in self.ranks.items():
            if process.status == 0 and not process.joined and waiting:
                self.fail(self._rank_failed(rank, process, status=0, missed_by=waiting))
                return

    def _leave(self, process: RankProcess, how: RankFailed) -> None:
        """A rank ends with another exit code than 0."""
        if how.status != STOPPED:
            self.fail(how)
            return
        process.saved = True
        if not self._ending:
            self._deadlines.setdefault("stopping", self._after(self.job.grace))

    def _rank_failed(self, rank: int, process: RankProcess, **how: Any) -> RankFailed:
        return RankFailed(at=self.now, rank=rank, pid=process.pid, host=process.host, asked=process.asked, **how)

    def _agent_lost(self, rank: int, process: RankProcess, pid: int) -> AgentLost:
        return AgentLost(at=self.now, rank=rank, pid=pid, host=process.host, started=process.started)
