"""One start of a job: starts the engine, listens to the keepers, decides when it is over, ends it.

One loop, one selector, no thread: every event is a readable or writable file, every wait has a deadline. What failed
is decided in `launcher.judging.verdict`; here is only what to do about it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from collectives.world import ATTEMPT
from launcher import engines
from launcher.engines.words import explain, unreached
from launcher.job import Job
from launcher.judging.motion import SILENCE
from launcher.judging.stopping import Stop
from launcher.judging.verdict import (
    EngineEnded,
    EngineLost,
    Fact,
    NotStarted,
    NotStopped,
    TimeLimit,
    is_echo,
    name_ranks,
)
from launcher.output.console import BACKLOG, Console
from launcher.process import stat_of
from launcher.running import restarts
from launcher.running.clocks import Clocks
from launcher.running.crew import Crew, Member
from launcher.running.ending import Ending
from launcher.running.feeding import StandardInput
from launcher.running.guard import Guard
from launcher.running.hearing import Hearing
from launcher.running.meeting import free_port, host_of_rank_0, meeting
from launcher.running.observer import Observer
from launcher.running.reception import Reception
from launcher.running.signals import ENDING, FORWARDED, SUSPENDING, name_of, stand_still
from launcher.running.starting import keeper, keepers_environment, threads
from launcher.wire import PING, TERMINAL

# After a failure nobody needs the others' work: they get at most this long to end by themselves.
_FAILURE_GRACE = 2.0
# A rank that failed because a peer did may be heard of first, though the peer said so before it let the others know.
_SETTLE = 0.5
# The engine cleans up after itself once all keepers have ended.
_ENGINE_LIMIT = 1.5
_CHATTER_LIMIT = 1 << 16
#: A loop that turns at least every PING seconds and stood still for longer than this was stopped (s).
STOOD_STILL = 2.0


class Outcome(NamedTuple):
    """How an attempt ended.

    asked: the signal by which the user ended it, 0 if it was not the user
    facts: what went wrong, as it was learned; stop: how the ranks stopped, if nothing did, and if they say so
    chatter: what the engine said
    gone: ranks of a host that ssh does not reach; else those that never came, or fell silent
    several_hosts: the ranks were on more than one
    until: when the whole job must have ended (monotonic, s), later by the time for which it stood still
    """

    asked: int
    facts: list[Fact]
    stop: Stop | None
    chatter: bytes
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
        stdin: StandardInput,
        observers: Observer,
        wakeup: int,
        environ: Mapping[str, str],
        limit: float = float("inf"),
        files: tuple[int, int] | None = None,
    ) -> None:
        self.job = job
        self.crew = Crew(job.size)
        self.now = time.monotonic()
        self._console, self._stdin, self._observers, self._wakeup = console, stdin, observers, wakeup
        self._facts: list[Fact] = []
        self._chatter = b""
        self._released = False
        self._clocks = Clocks()
        self._clocks.put("start", self.now, job.start_limit)
        self._clocks.put("limit", self.now, limit)
        self._until = self.now + limit
        self._ending = Ending(self.crew, self._clocks, observers)
        self._hearing = Hearing(self.crew, console, stdin, observers, self._clocks, self._ending, self.fail, job.grace)
        self._ping = self.now  # when the keepers are to hear from us next
        self._engine = engines.choose(job, environ)
        self._reception = Reception(self._engine.elsewhere, job.size)
        scratch = os.path.join(environ.get("TMPDIR") or "/tmp", f"ddp-launch-{os.getpid()}-{os.urandom(4).hex()}")
        there = meeting(environ, host_of_rank_0(job, self._engine, environ), free_port())
        told = self._engine.environment({**environ, **there, **self._told()}, scratch)
        command = self._engine.command(keeper(job), told)
        self._guard = Guard(command, told, scratch, files)
        # On a terminal only, and once: who reads a file has asked for what the ranks say.
        first = environ.get(ATTEMPT, "0") == "0"
        if first and console.columns() and (text := threads(job, self._engine, environ, len(os.sched_getaffinity(0)))):
            console.say(f"ddp-launch: {text}")
        os.set_blocking(self._guard.chatter, False)

    def _told(self) -> dict[str, str]:
        """What keepers find in their environment."""
        reception = self._reception
        ours = keepers_environment(self.job, self._engine, reception.address, reception.secret)
        if size := self._console.columns():
            ours |= {"COLUMNS": str(max(1, size[0] - self._console.prefix_width)), "LINES": str(size[1])}
        return ours | {TERMINAL: "1"} if self._stdin.terminal else ours

    def run(self) -> Outcome:
        """Watches to the end."""
        while not self._finished():
            self._turn()
        self._on_chatter()
        self._ending.begun = True
        self._clocks.clear()
        if self._facts and self.crew.missing():
            self._facts.append(self._engine_ended())
        until = self._until + self._clocks.stood
        asked = self._ending.stopped
        stop = self._stop()
        return Outcome(asked, self._facts, stop, self._chatter, self._gone(), self.crew.several_hosts(), until)

    def _stop(self) -> Stop | None:
        """How the job stopped, if it did so as it was asked to."""
        stop = self.crew.stop()
        if stop is not None and stop.late and not self._ending.stopped and not self._facts:
            fact = NotStopped(at=self.now, ranks=stop.late, seconds=2 * self.job.grace)
            self._facts.append(fact)
            self._observers.failed(fact)
        # Of a failure, and of a time limit, is said what they are.
        if stop is not None and not self._facts:
            self._observers.stopped(stop)
            return stop
        return None

    def _gone(self) -> frozenset[int]:
        """The ranks that are not heard of."""
        # Where ssh has said whose host it does not reach, others may just not have come yet.
        away = restarts.ranks_on(self.job.hosts, self.job.size, unreached(self._chatter.decode("utf-8", "replace")))
        beyond = {rank for rank, member in self.crew if not member.over}  # they were killed, and it did not help
        return away or frozenset(self.crew.missing()) | self._hearing.silent | beyond

    def drain(self) -> None:
        """A slow reader gets everything, unless the user presses Ctrl-C. The job is over."""
        self._console.flush()
        while self._console.waiting_for is not None:
            self._turn()

    def close(self) -> None:
        """Ends whatever still runs."""
        self._stdin.edit(False)
        self.crew.close()
        self._reception.close()
        self._guard.close()

    def fail(self, fact: Fact) -> None:
        """Takes note of a failure. The first ends the job."""
        if self._ending.stopped or self.crew.saved:
            return
        self._facts.append(fact)
        self._observers.failed(fact)
        if self._ending.begun:
            return
        if is_echo(fact):
            # Ending the others now would kill the one whose failure this is, before it has told us.
            self._clocks.begin("settle", self.now, _SETTLE)
        else:
            grace = self.job.grace if isinstance(fact, TimeLimit) else min(self.job.grace, _FAILURE_GRACE)
            self._ending.begin(signal.SIGTERM, self.now, grace)

    def ask_stacks(self) -> None:
        """Has every rank's Python stacks written; observers hear of them one by one."""
        self.crew.tell({"stacks": True}, lambda member: not member.over)

    def stopped_engine(self) -> str:
        """Name and pid of a process of the engine on this machine that is stopped, "" if none is."""
        here = os.uname().nodename
        pids = {self._guard.engine, *(member.engine for _, member in self.crew if member.host == here)}
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
            self.crew.tell({"ping": True})
        until = min(self._clocks.next, self._reception.deadline, self._observers.turn(self.now), self._ping)
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
        if self._console.broken and not self._ending.begun:
            self._ending.stop(signal.SIGPIPE, self.now, self.job.grace)

    def _move(self, by: float) -> None:
        """This process was stopped for a while, and its keepers stopped their ranks: that time does not count."""
        self._clocks.move(by)
        self._observers.moved(by)
        self.crew.tell({"freeze": False}, lambda member: not member.over)

    def _interests(self) -> dict[int, tuple[int, Callable[[], None]]]:
        """What to wait for now, and whom to tell. In this order: what ranks say comes before their engine's end."""
        table: dict[int, tuple[int, Callable[[], None]]] = {}
        reading = select.POLLIN if self._console.backlog < BACKLOG else 0
        for rank, member in self.crew:
            if not member.closed:
                mask = reading | (select.POLLOUT if member.channel.backlog else 0)
                table[member.channel.fileno()] = mask, partial(self._hearing.hear, rank, member)
        for fileno in self._reception.filenos():
            table[fileno] = select.POLLIN, partial(self._on_reception, fileno)
        table[self._wakeup] = select.POLLIN, self._on_signal
        if not self._guard.lost:
            table[self._guard.fileno()] = select.POLLIN, self._on_guard
        if not self._guard.silent:
            table[self._guard.chatter] = select.POLLIN, self._on_chatter
        if (wanted := self._stdin.wanted(self.crew)) is not None:
            table[wanted] = select.POLLIN, partial(self._stdin.read, self.crew)
        if (waiting := self._console.waiting_for) is not None:
            table[waiting] = select.POLLOUT, self._console.flush
        return table

    def _on_deadlines(self) -> None:
        due = self._clocks.due(self.now)
        if "start" in due:
            text = f"{name_ranks(self.crew.missing())} did not start within {self.job.start_limit:g} s"
            if engine := self.stopped_engine():
                text += f": {engine} is stopped"
            self.fail(NotStarted(at=self.now, message=text))
        if "limit" in due:
            self._clocks.drop("limit")
            self.fail(TimeLimit(at=self.now, seconds=self.job.timeout or 0.0))
        if "joining" in due:
            self._clocks.drop("joining")
            self.fail(NotStarted(at=self.now, message=self._hearing.joining.sentence()))
        if "stopping" in due:  # nobody has agreed with them: they are asked now, and may save as well
            self._ending.begin(signal.SIGTERM, self.now, self.job.grace)
        if "settle" in due:
            self._ending.begin(signal.SIGTERM, self.now, min(self.job.grace, _FAILURE_GRACE))
        if "deserted" in due and self._hearing.deserter is not None and not self._all_over():
            self.fail(self._hearing.deserter)
        if "kill" in due:
            self._ending.kill(self.now)
        self._reception.drop_silent(self.now)

    def _advance(self) -> None:
        """Lets the keepers go once no rank is left to watch."""
        if self._released or not self._all_over():
            return
        self._released = True
        self._clocks.clear()
        self._clocks.put("engine", self.now, _ENGINE_LIMIT)
        self.crew.tell({"release": True})

    def _finished(self) -> bool:
        if self._clocks.due(self.now) & {"sweep", "engine"}:
            return True
        return self._all_over() and (self._guard.status is not None or self._guard.lost)

    def _all_over(self) -> bool:
        return (self._ending.begun or self.crew.complete) and self.crew.over

    # -- events

    def _on_reception(self, fileno: int) -> None:
        news = self._reception.serve(fileno)
        if news is None:
            return
        channel, hello = news
        rank = int(hello["rank"])
        if int(hello["size"]) != self.job.size or rank in self.crew:
            channel.close()
            name, size = self._engine.name, hello["size"]
            text = f"{name} was to start {self.job.size} ranks, but rank {rank} was told of a world of {size}"
            self.fail(NotStarted(at=self.now, message=text))
            return
        if self.job.heartbeat_timeout is not None:
            channel.send({"heartbeat": max(self.job.heartbeat_timeout, SILENCE)})
        member = Member(channel, hello)
        self._hearing.welcome(rank, member, hello)
        if self.crew.complete:
            self._clocks.drop("start")
        if self.job.size > 1 and member.engine == self._guard.pid and member.host == os.uname().nodename:
            # What had started the keeper died before this could look who it was: the guard is who orphans come to.
            text = f"a process of {self._engine.name} died as soon as it had started rank {rank}"
            self.fail(NotStarted(at=self.now, message=text))

    def _on_guard(self) -> None:
        self._guard.read()
        if self._guard.lost:
            self.fail(EngineLost(at=self.now, name="the launcher's guard", pid=self._guard.pid, above=True))
            self._ending.kill(self.now)
        elif self._guard.status is not None and (self._facts or not self._released):
            self._on_chatter()  # it may have said why
            fact = self._engine_ended()
            if not self._ending.begun or fact.status < 0:
                self.fail(fact)

    def _engine_ended(self) -> EngineEnded:
        pid, status, name = self._guard.engine, self._guard.status or 0, self._engine.name
        return EngineEnded(at=self.now, pid=pid, status=status, missing=self.crew.missing(), name=name)

    def _on_chatter(self) -> None:
        """Keeps what the engine itself says, for the case that nothing explains a failure better."""
        self._chatter = (self._chatter + self._guard.listen())[-_CHATTER_LIMIT:]
        if self.crew.complete or self._facts:
            return
        if sentence := explain(self._chatter.decode("utf-8", "replace")):
            self.fail(NotStarted(at=self.now, message=sentence, code=2))

    def _on_signal(self) -> None:
        for number in os.read(self._wakeup, 512):
            if number in FORWARDED:
                self.crew.tell({"signal": number}, lambda member: not member.over)
            elif number == SUSPENDING:
                self._suspend()
            elif number not in ENDING:
                continue  # SIGCONT, SIGWINCH: only to look again
            elif self._ending.begun:
                if not self._ending.is_same_wish(self.now):
                    self._console.drop()
                    self._ending.kill(self.now, limit=0.0)
            else:
                self._console.say(f"ddp-launch: {name_of(number)}: ending the job (once more kills it at once)")
                self._ending.stop(number, self.now, self.job.grace)

    def _suspend(self) -> None:
        """Ctrl-Z: the job stands still until somebody continues the launcher."""
        self.crew.tell({"freeze": True}, lambda member: not member.over)
        self._console.hide()
        self._stdin.rest()
        stood = stand_still()
        self.now = time.monotonic()
        self._move(stood)
