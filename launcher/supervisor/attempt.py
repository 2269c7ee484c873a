"""One attempt to run a job: starts the engine, listens to the agents, decides when it is over, ends it.

One loop, one poll, no thread: every event is a readable or writable file, every wait has a deadline. What failed is
decided in `launcher.diagnosis.failures`; here is only what to do about it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from launcher import engines
from launcher.console.console import Console
from launcher.diagnosis.failures import (
    EngineEnded,
    EngineLost,
    Failure,
    NotStarted,
    NotStopped,
    Stop,
    TimeLimit,
    is_echo,
    name_ranks,
)
from launcher.diagnosis.liveness import SILENCE
from launcher.diagnosis.observer import Observer
from launcher.engines.start_errors import explain_start_failure, unreachable_host
from launcher.job import Job
from launcher.linux import stat_of
from launcher.network import ranks_on
from launcher.protocol import PING
from launcher.supervisor.environment import agent, agents_environment, free_port, host_of_rank_0, meeting
from launcher.supervisor.listener import Listener
from launcher.supervisor.messages import MessageHandler
from launcher.supervisor.rank_table import RankProcess, RankTable
from launcher.supervisor.reaper import Reaper
from launcher.supervisor.shutdown import ENDING, FORWARDED, SUSPENDING, Deadlines, Shutdown, name_of, stand_still
from launcher.supervisor.stdin import StdinForwarder

# After a failure the other ranks' work is lost: they get at most this long to end by themselves.
_FAILURE_GRACE = 2.0
# A rank that failed because a peer did may be reported first, though the peer reported before it let the others know.
_SETTLE = 0.5
# The engine cleans up after itself once all agents have ended.
_ENGINE_LIMIT = 1.5
_ENGINE_OUTPUT_LIMIT = 1 << 16
#: A loop that turns at least every PING seconds and stood still for longer than this was stopped (s).
STOOD_STILL = 2.0


class AttemptOutcome(NamedTuple):
    """How an attempt ended.

    asked: the signal by which the user ended it, 0 if it was not the user
    failures: what went wrong, as it was learned; stop: how the ranks stopped, if nothing did, and if they say so
    engine_output: what the engine said
    gone: ranks of a host that ssh does not reach; else those that never started, or are silent
    several_hosts: the ranks were on more than one
    until: when the whole job must have ended (monotonic, s), later by the time for which it stood still
    """

    asked: int
    failures: list[Failure]
    stop: Stop | None
    engine_output: bytes
    gone: frozenset[int]
    several_hosts: bool
    until: float


class Attempt:
    """A job from its start to its end.

    console: shows what the ranks say; stdin: goes to one of them; observers: hear of everything
    wakeup: file descriptor on which signals arrive; environ: of the ranks
    limit: s from now on in which the job must have ended
    files: how many files the ranks may open, soft and hard limit; None: as many as this process
    """

    def __init__(
        self,
        job: Job,
        console: Console,
        stdin: StdinForwarder,
        observers: Observer,
        wakeup: int,
        environ: Mapping[str, str],
        limit: float = float("inf"),
        files: tuple[int, int] | None = None,
    ) -> None:
        self.job = job
        self.ranks = RankTable(job.size)
        self.now = time.monotonic()
        self._console, self._stdin, self._observers, self._wakeup = console, stdin, observers, wakeup
        self._failures: list[Failure] = []
        self._engine_output = b""
        self._released = False
        self._deadlines = Deadlines()
        self._deadlines.put("start", self.now, job.start_limit)
        self._deadlines.put("limit", self.now, limit)
        self._until = self.now + limit
        self._shutdown = Shutdown(self.ranks, self._deadlines, observers)
        self._messages = MessageHandler(
            self.ranks, console, stdin, observers, self._deadlines, self._shutdown, self.fail, job.grace
        )
        self._ping = self.now  # when the agents are to hear from us next
        self._engine = engines.choose_engine(job, environ)
        self._listener = Listener(self._engine.remote_hosts, job.size)
        scratch = os.path.join(environ.get("TMPDIR") or "/tmp", f"ddp-launch-{os.getpid()}-{os.urandom(4).hex()}")
        master = meeting(environ, host_of_rank_0(job, self._engine, environ), free_port())
        environment = self._engine.environment({**environ, **master, **self._agents_environment()}, scratch)
        self._reaper = Reaper(partial(self._engine.start, agent(job), environment), scratch, files)
        os.set_blocking(self._reaper.engine_output, False)

    def _agents_environment(self) -> dict[str, str]:
        """What agents find in their environment."""
        listener = self._listener
        ours = agents_environment(self.job, self._engine, listener.address, listener.secret)
        if size := self._console.columns():
            ours |= {"COLUMNS": str(max(1, size[0] - self._console.prefix_width)), "LINES": str(size[1])}
        return ours

    def run(self) -> AttemptOutcome:
        """Watches to the end."""
        while not self._finished():
            self._turn()
        self._on_engine_output()
        self._shutdown.begun = True
        self._deadlines.clear()
        if self._failures and self.ranks.missing():
            self._failures.append(self._engine_ended())
        return AttemptOutcome(
            asked=self._shutdown.stopped,
            stop=self._stop(),  # may add a failure
            failures=self._failures,
            engine_output=self._engine_output,
            gone=self._gone(),
            several_hosts=self.ranks.several_hosts(),
            until=self._until + self._deadlines.stood,
        )

    def _stop(self) -> Stop | None:
        """How the job stopped, if it did so as it was asked to."""
        stop = self.ranks.stop()
        if stop is None or self._failures:
            return None  # a failure, or a time limit, is what is reported
        if stop.late and not self._shutdown.stopped:
            failure = NotStopped(at=self.now, ranks=stop.late, seconds=2 * self.job.grace)
            self._failures.append(failure)
            self._observers.failed(failure)
            return None
        self._observers.stopped(stop)
        return stop

    def _gone(self) -> frozenset[int]:
        """The ranks that cannot be reached."""
        # Where ssh has said whose host it does not reach, others may only be late.
        away = ranks_on(self.job.hosts, self.job.size, unreachable_host(self._engine_output.decode("utf-8", "replace")))
        beyond = {rank for rank, process in self.ranks if not process.over}  # they were killed, and it did not help
        return away or frozenset(self.ranks.missing()) | self._messages.silent | beyond

    def drain(self) -> None:
        """A slow reader gets everything, unless the user presses Ctrl-C. The job is over."""
        self._console.flush()
        while self._console.waiting_for is not None:
            self._turn()

    def close(self) -> None:
        """Ends whatever still runs."""
        self.ranks.close()
        self._listener.close()
        self._reaper.close()

    def fail(self, failure: Failure) -> None:
        """Takes note of a failure. The first ends the job."""
        if self._shutdown.stopped or self.ranks.saved:
            return
        self._failures.append(failure)
        self._observers.failed(failure)
        if self._shutdown.begun:
            return
        if is_echo(failure):
            # Ending the others now would kill the rank whose failure this is before it has reported.
            self._deadlines.begin("settle", self.now, _SETTLE)
        else:
            grace = self.job.grace if isinstance(failure, TimeLimit) else min(self.job.grace, _FAILURE_GRACE)
            self._shutdown.begin(signal.SIGTERM, self.now, grace)

    def ask_stacks(self) -> None:
        """Has every rank's Python stacks written; observers hear of them one by one."""
        self.ranks.tell({"stacks": True}, lambda process: not process.over)

    def stopped_engine(self) -> str:
        """Name and pid of a process of the engine on this machine that is stopped, "" if none is."""
        here = os.uname().nodename
        pids = {self._reaper.engine, *(process.engine for _, process in self.ranks if process.host == here)}
        stopped = (pid for pid in sorted(pids) if stat_of(pid).state == "T")
        return next((f"{stat_of(pid).name} (pid {pid})" for pid in stopped), "")

    # -- the loop

    def _turn(self) -> None:
        """Waits for the next events and deals with them."""
        interests = self._interests()
        poll = select.poll()
        for fd, (mask, _) in interests.items():
            poll.register(fd, mask)
        if self._ping <= self.now:
            self._ping = self.now + PING
            self.ranks.tell({"ping": True})
        until = min(self._deadlines.next, self._listener.deadline, self._observers.tick(self.now), self._ping)
        wait = max(0.0, 1000 * (until - time.monotonic()))
        before = time.monotonic()
        events = poll.poll(wait)
        self.now = time.monotonic()
        if (stood := self.now - before - 1e-3 * wait) > STOOD_STILL:
            self._move(stood)
        for fd, _ in events:
            interests[fd][1]()
        self._on_deadlines()
        self._advance()
        self._console.flush()
        if self._console.broken and not self._shutdown.begun:
            self._shutdown.stop(signal.SIGPIPE, self.now, self.job.grace)

    def _move(self, by: float) -> None:
        """This process was stopped for a while, and its agents stopped their ranks: that time does not count."""
        self._deadlines.move(by)
        self._observers.resumed(by)
        self.ranks.tell({"suspend": False}, lambda process: not process.over)

    def _interests(self) -> dict[int, tuple[int, Callable[[], None]]]:
        """What to wait for now, and whom to tell. In this order: what ranks say comes before their engine's end."""
        table: dict[int, tuple[int, Callable[[], None]]] = {}
        reading = 0 if self._console.backlogged else select.POLLIN
        for rank, process in self.ranks:
            if not process.closed:
                mask = reading | (select.POLLOUT if process.channel.backlog else 0)
                table[process.channel.fileno()] = mask, partial(self._messages.on_readable, rank, process)
        for fileno in self._listener.filenos():
            table[fileno] = select.POLLIN, partial(self._on_connection, fileno)
        table[self._wakeup] = select.POLLIN, self._on_signal
        if not self._reaper.lost:
            table[self._reaper.fileno()] = select.POLLIN, self._on_reaper
        if not self._reaper.silent:
            table[self._reaper.engine_output] = select.POLLIN, self._on_engine_output
        if (wanted := self._stdin.readable_fd(self.ranks)) is not None:
            table[wanted] = select.POLLIN, partial(self._stdin.read, self.ranks)
        if (waiting := self._console.waiting_for) is not None:
            table[waiting] = select.POLLOUT, self._console.flush
        return table

    def _on_deadlines(self) -> None:
        due = self._deadlines.due(self.now)
        if "start" in due:
            text = f"{name_ranks(self.ranks.missing())} did not start within {self.job.start_limit:g} s"
            if engine := self.stopped_engine():
                text += f": {engine} is stopped"
            self.fail(NotStarted(at=self.now, message=text))
        if "limit" in due:
            self._deadlines.drop("limit")
            self.fail(TimeLimit(at=self.now, seconds=self.job.timeout or 0.0))
        if "joining" in due:
            self._deadlines.drop("joining")
            self.fail(NotStarted(at=self.now, message=self._messages.joining.sentence()))
        if "stopping" in due:  # ranks that did not stop with the others are asked now, and may save as well
            self._shutdown.begin(signal.SIGTERM, self.now, self.job.grace)
        if "settle" in due:
            self._shutdown.begin(signal.SIGTERM, self.now, min(self.job.grace, _FAILURE_GRACE))
        if "deserted" in due and self._messages.deserter is not None and not self._all_over():
            self.fail(self._messages.deserter)
        if "kill" in due:
            self._shutdown.kill(self.now)
        self._listener.drop_silent(self.now)

    def _advance(self) -> None:
        """Lets the agents go once no rank is left to watch."""
        if self._released or not self._all_over():
            return
        self._released = True
        self._deadlines.clear()
        self._deadlines.put("engine", self.now, _ENGINE_LIMIT)
        self.ranks.tell({"release": True})

    def _finished(self) -> bool:
        if self._deadlines.due(self.now) & {"sweep", "engine"}:
            return True
        return self._all_over() and (self._reaper.status is not None or self._reaper.lost)

    def _all_over(self) -> bool:
        return (self._shutdown.begun or self.ranks.complete) and self.ranks.over

    # -- events

    def _on_connection(self, fileno: int) -> None:
        news = self._listener.serve(fileno)
        if news is None:
            return
        channel, hello = news
        rank = int(hello["rank"])
        if int(hello["size"]) != self.job.size or rank in self.ranks:
            channel.close()
            name, size = self._engine.name, hello["size"]
            text = f"{name} was to start {self.job.size} ranks, but rank {rank} was told of a world of {size}"
            self.fail(NotStarted(at=self.now, message=text))
            return
        if self.job.heartbeat_timeout is not None:
            channel.send({"heartbeat": max(self.job.heartbeat_timeout, SILENCE)})
        process = RankProcess(channel, hello)
        self._messages.add_rank(rank, process, hello)
        if self.ranks.complete:
            self._deadlines.drop("start")
        if self.job.size > 1 and process.engine == self._reaper.pid and process.host == os.uname().nodename:
            # What had started the agent died before this could look who it was: the reaper is who orphans come to.
            text = f"a process of {self._engine.name} died as soon as it had started rank {rank}"
            self.fail(NotStarted(at=self.now, message=text))

    def _on_reaper(self) -> None:
        self._reaper.read()
        if self._reaper.lost:
            self.fail(EngineLost(at=self.now, name="the launcher's reaper", pid=self._reaper.pid, above=True))
            self._shutdown.kill(self.now)
        elif self._reaper.status is not None and (self._failures or not self._released):
            self._on_engine_output()  # it may have said why
            failure = self._engine_ended()
            if not self._shutdown.begun or failure.status < 0:
                self.fail(failure)

    def _engine_ended(self) -> EngineEnded:
        pid, status, name = self._reaper.engine, self._reaper.status or 0, self._engine.name
        return EngineEnded(at=self.now, pid=pid, status=status, missing=self.ranks.missing(), name=name)

    def _on_engine_output(self) -> None:
        """Keeps what the engine itself says, for the case that nothing explains a failure better."""
        self._engine_output = (self._engine_output + self._reaper.listen())[-_ENGINE_OUTPUT_LIMIT:]
        if self.ranks.complete or self._failures:
            return
        if sentence := explain_start_failure(self._engine_output.decode("utf-8", "replace")):
            self.fail(NotStarted(at=self.now, message=sentence, code=2))

    def _on_signal(self) -> None:
        for number in os.read(self._wakeup, 512):
            if number in FORWARDED:
                self.ranks.tell({"signal": number}, lambda process: not process.over)
            elif number == SUSPENDING:
                self._suspend()
            elif number not in ENDING:
                continue  # SIGCONT, SIGWINCH: only to look again
            elif self._shutdown.begun:
                if not self._shutdown.is_same_wish(self.now):
                    self._console.drop()
                    self._shutdown.kill(self.now, limit=0.0)
            else:
                self._console.say(f"ddp-launch: {name_of(number)}: ending the job (once more kills it at once)")
                self._shutdown.stop(number, self.now, self.job.grace)

    def _suspend(self) -> None:
        """Ctrl-Z: suspends the job until the launcher is continued."""
        self.ranks.tell({"suspend": True}, lambda process: not process.over)
        self._console.hide()
        stood = stand_still()
        self.now = time.monotonic()
        self._move(stood)
