"""One start of a job: starts the engine, listens to the keepers, decides when it is over, ends it.

One loop, one selector, no thread: every event is a readable or writable file, every wait has a deadline. What failed
is decided in `launcher.verdict`; here is only what to do about it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from collectives.world import ATTEMPT
from launcher import engines
from launcher.console import BACKLOG, Console
from launcher.crew import Crew, Member
from launcher.engines.words import explain
from launcher.feeding import StandardInput
from launcher.guard import Guard
from launcher.job import Job
from launcher.observer import Observer
from launcher.reception import Reception
from launcher.signals import ENDING, FORWARDED, SUSPENDING
from launcher.starting import keeper, keepers_environment, threads
from launcher.verdict import (
    EngineEnded,
    EngineLost,
    Fact,
    KeeperLost,
    NotStarted,
    Raised,
    RankFailed,
    TimeLimit,
    is_echo,
    name_ranks,
    signal_name,
)
from launcher.wire import PING, TERMINAL, Message, WireError, to_bytes

# After a failure nobody needs the others' work: they get at most this long to end by themselves.
_FAILURE_GRACE = 2.0
# A rank that ended with 0 but took no leave of the others (os._exit) is no failure if they end like that too.
_DESERTION_LIMIT = 1.0
# Killed ranks are reported within milliseconds, unless their keeper is stopped or gone: then the guard ends everything.
_KILL_LIMIT = 0.5
# A rank that failed because a peer did may be heard of first, though the peer said so before it let the others know.
_SETTLE = 0.5
# The engine cleans up after itself once all keepers have ended.
_ENGINE_LIMIT = 1.5
_CHATTER_LIMIT = 1 << 16
# The deadlines that say how long a job may take, and do not run while somebody debugs it.
_HELD = ("start", "limit", "joining")
# A loop that turns at least every PING seconds and stood still for longer than this was stopped (s).
_STOOD_STILL = 2.0


class Outcome(NamedTuple):
    """How an attempt ended.

    stop: the signal by which the user ended it, 0 if it was not the user
    facts: what went wrong, as it was learned; chatter: what the engine said
    gone: ranks that never came, or fell silent without a word; several_hosts: the ranks were on more than one
    """

    stop: int
    facts: list[Fact]
    chatter: bytes
    gone: frozenset[int]
    several_hosts: bool


class Attempt:
    """A job from its start to its end.

    console: shows what the ranks say; stdin: goes to one of them; observers: hear of everything
    wakeup: file descriptor on which signals arrive; environ: of the ranks
    limit: s from now on in which the job must have ended
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
    ) -> None:
        self.job = job
        self.crew = Crew(job.size)
        self.now = time.monotonic()
        self._console, self._stdin, self._observers, self._wakeup = console, stdin, observers, wakeup
        self._facts: list[Fact] = []
        self._chatter = b""
        self._deserter: RankFailed | None = None
        self._stopped = 0  # the signal by which the user ended the job
        self._ending = self._killed = self._released = False
        self._silent: frozenset[int] = frozenset()  # ranks whose keepers fell silent without a word
        self._order: Message = {}  # what ranks that come late are told, once it ends
        # What happens when its time comes; removed when it no longer matters.
        self._deadlines: dict[str, float] = {"start": self.now + job.start_limit, "limit": self.now + limit}
        self._held: dict[str, float] = {}  # seconds that are left of those that somebody's debugger holds up
        self._passed = 0  # breakpoints that the debugger has gone on from
        self._joining: dict[int, float] = {}  # who waits for all to join the world, and how long at most
        self._joined: set[int] = set()
        self._ping = self.now  # when the keepers are to hear from us next
        self._engine = engines.choose(job, environ)
        self._reception = Reception(self._engine.elsewhere)
        scratch = os.path.join(environ.get("TMPDIR") or "/tmp", f"ddp-launch-{os.getpid()}-{os.urandom(4).hex()}")
        told = self._engine.environment({**environ, **self._told()}, scratch)
        command = self._engine.command(keeper(job), told)
        self._guard = Guard(command, told, scratch)
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
        self._ending, self._deadlines = True, {}
        if self._facts and self.crew.missing():
            self._facts.append(self._engine_ended())
        gone = frozenset(self.crew.missing()) | self._silent
        return Outcome(self._stopped, self._facts, self._chatter, gone, self.crew.several_hosts())

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
        if self._stopped:
            return
        self._facts.append(fact)
        self._observers.failed(fact)
        if self._ending:
            return
        if is_echo(fact):
            # Ending the others now would kill the one whose failure this is, before it has told us.
            self._deadlines.setdefault("settle", self.now + _SETTLE)
        else:
            grace = self.job.grace if isinstance(fact, TimeLimit) else min(self.job.grace, _FAILURE_GRACE)
            self._end(signal.SIGTERM, grace)

    def ask_stacks(self) -> None:
        """Has every rank's Python stacks written; observers hear of them one by one."""
        self.crew.tell({"stacks": True}, lambda member: not member.over)

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
        until = min(*self._deadlines.values(), self._reception.deadline, self._observers.turn(self.now), self._ping)
        wait = max(0.0, 1000 * (until - time.monotonic()))
        before = time.monotonic()
        events = poll.poll(wait)
        self.now = time.monotonic()
        if (stood := self.now - before - 1e-3 * wait) > _STOOD_STILL:
            self._move(stood)
        for fd, _ in events:
            interests[fd][1]()
        self._on_deadlines()
        self._advance()
        self._console.flush()
        if self._console.broken and not self._ending:
            self._stop(signal.SIGPIPE)

    def _move(self, by: float) -> None:
        """This process was stopped for a while, and its keepers stopped their ranks: that time does not count."""
        self._deadlines = {name: at + by for name, at in self._deadlines.items()}
        self._observers.moved(by)
        self.crew.tell({"freeze": False}, lambda member: not member.over)

    def _interests(self) -> dict[int, tuple[int, Callable[[], None]]]:
        """What to wait for now, and whom to tell. In this order: what ranks say comes before their engine's end."""
        table: dict[int, tuple[int, Callable[[], None]]] = {}
        reading = select.POLLIN if self._console.backlog < BACKLOG else 0
        for rank, member in self.crew:
            if not member.closed:
                mask = reading | (select.POLLOUT if member.channel.backlog else 0)
                table[member.channel.fileno()] = mask, partial(self._on_rank, rank, member)
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
        due = {name for name, at in self._deadlines.items() if at <= self.now}
        if "start" in due:
            text = f"{name_ranks(self.crew.missing())} did not start within {self.job.start_limit:g} s"
            self.fail(NotStarted(at=self.now, message=text))
        if "limit" in due:
            del self._deadlines["limit"]
            self.fail(TimeLimit(at=self.now, seconds=self.job.timeout or 0.0))
        if "joining" in due:
            del self._deadlines["joining"]
            self.fail(NotStarted(at=self.now, message=self._who_is_missed()))
        if "settle" in due:
            self._end(signal.SIGTERM, min(self.job.grace, _FAILURE_GRACE))
        if "deserted" in due and self._deserter is not None and not self._all_over():
            self.fail(self._deserter)
        if "kill" in due:
            self._kill()
        self._reception.drop_silent(self.now)

    def _advance(self) -> None:
        """Lets the keepers go once no rank is left to watch."""
        if self._released or not self._all_over():
            return
        self._released = True
        self._deadlines = {"engine": self.now + _ENGINE_LIMIT}
        self.crew.tell({"release": True})

    def _finished(self) -> bool:
        if any(name in self._deadlines and self._deadlines[name] <= self.now for name in ("sweep", "engine")):
            return True
        return self._all_over() and (self._guard.status is not None or self._guard.lost)

    def _all_over(self) -> bool:
        return (self._ending or self.crew.complete) and self.crew.over

    # -- ending

    def _stop(self, number: int) -> None:
        self._stopped = number
        self._end(number if number != signal.SIGPIPE else signal.SIGTERM, self.job.grace)

    def _end(self, number: int, grace: float) -> None:
        if not self._ending:
            self._observers.ending()
        self._ending = True
        self._order = {"signal": number}
        self._deadlines = {"kill": self.now + grace}
        # A rank that raised or exits is on its way out, through its exit handlers.
        self.crew.tell(self._order, lambda member: not member.over and not member.leaving)

    def _kill(self) -> None:
        self._ending = self._killed = True
        self._order = {"kill": True}
        self._deadlines = {"sweep": self.now + _KILL_LIMIT}
        self.crew.tell(self._order, lambda member: not member.over)

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
        member = Member(channel, hello)
        self.crew.add(rank, member)
        self._stdin.came(rank, self.crew)
        self._observers.up(rank, hello)
        if self.crew.complete:
            self._deadlines.pop("start", None)
        if self.job.size > 1 and member.engine == self._guard.pid and member.host == os.uname().nodename:
            # What had started the keeper died before this could look who it was: the guard is who orphans come to.
            text = f"a process of {self._engine.name} died as soon as it had started rank {rank}"
            self.fail(NotStarted(at=self.now, message=text))
        # What the others have been told before it came.
        if self.crew.debugging():
            channel.send({"pause": True})
        if self._passed:
            channel.send({"passed": self._passed})
        if self._ending:
            channel.send(self._order)

    def _on_rank(self, rank: int, member: Member) -> None:
        member.channel.flush()
        try:
            messages = member.channel.receive()
        except WireError:
            messages = None  # as good as gone: nothing that it says can be trusted
        if messages is None:
            member.closed = True
            member.channel.close()
            if not member.over:
                member.lost = True
                self._console.leave(rank)
                if not self._killed:
                    self._silent |= {rank}
                    self.fail(KeeperLost(at=self.now, rank=rank, pid=member.keeper, host=member.host))
            return
        for message in messages:
            self._on_message(rank, member, message)

    def _on_message(self, rank: int, member: Member, message: Message) -> None:
        for stream in ("out", "err"):
            if stream in message:
                self._observers.said(rank, stream, to_bytes(message[stream]))
        if "beat" in message:
            self._observers.beat(rank, message["beat"], self.now)
        if "stacks" in message:
            self._observers.stacks(rank, str(message["stacks"]))
        if "debugging" in message:
            self._on_debugging(member, bool(message["debugging"]))
        if "editing" in message:
            self._stdin.edit(bool(message["editing"]))
        if "joining" in message:
            self._on_joining(rank, message["joining"])
        if "passed" in message:
            self._passed = int(message["passed"])
            self.crew.tell({"passed": self._passed}, lambda each: not each.over)
        if "quit" in message and not self._ending:
            self._console.say(f"ddp-launch: {message['quit']}: ending the job (Ctrl-C kills it at once)")
            self._stop(signal.SIGINT)
        if "raised" in message:
            member.leaving = True
            self.fail(self._failed(rank, member, raised=Raised(**message["raised"])))
        if "leaving" in message:
            member.leaving = True
            self.fail(self._failed(rank, member, status=int(message["leaving"])))
        if "lost" in message:
            self.fail(EngineLost(at=self.now, name=member.engine_name, pid=member.engine, host=member.host))
        if "asked" in message:
            member.asked = True
        if "took" in message:
            self._stdin.taken()
        if "end" in message:
            self._on_end(rank, member, message)

    def _failed(self, rank: int, member: Member, **how: Any) -> RankFailed:
        return RankFailed(at=self.now, rank=rank, pid=member.pid, host=member.host, asked=member.asked, **how)

    def _on_end(self, rank: int, member: Member, message: Message) -> None:
        member.status = int(message["end"])
        self._on_debugging(member, False)
        if rank == self._stdin.rank:
            self._stdin.edit(False)
        self._observers.ended(rank, member.status)
        # What a rank makes of our own signal is not a failure.
        failed = self._failed(rank, member, status=member.status, memory=message.get("memory"))
        if member.status != 0 and not member.leaving and not self._ending:
            self.fail(failed)
        elif member.status == 0 and message["deserted"] and not self._ending and self._deserter is None:
            self._deserter = failed
            self._deadlines["deserted"] = self.now + _DESERTION_LIMIT

    def _on_debugging(self, member: Member, debugging: bool) -> None:
        before = self.crew.debugging()
        member.debugging = debugging
        now = self.crew.debugging()
        if now == before:
            return
        self._observers.debugging(now)
        if now and not before:
            self._held = {name: self._deadlines.pop(name) - self.now for name in _HELD if name in self._deadlines}
        if before and not now and not self._ending:
            self._deadlines |= {name: self.now + left for name, left in self._held.items()}
            self._held = {}
        if bool(now) != bool(before):
            self.crew.tell({"pause": bool(now)}, lambda each: not each.over)

    def _on_joining(self, rank: int, limit: float | None) -> None:
        """A rank waits in `collectives.init` for all others, or no longer."""
        if limit is not None:
            self._joining[rank] = limit
        else:
            self._joining.pop(rank, None)
            self._joined.add(rank)
        deadlines, now = (self._held, 0.0) if self.crew.debugging() else (self._deadlines, self.now)
        if not self._joining:
            deadlines.pop("joining", None)
        elif not self._ending:
            deadlines.setdefault("joining", now + min(self._joining.values()))

    def _who_is_missed(self) -> str:
        missed = [rank for rank in range(self.job.size) if rank not in self._joining and rank not in self._joined]
        waiting, limit = name_ranks(sorted(self._joining)), min(self._joining.values(), default=0.0)
        if not missed:
            return f"the world of all ranks was not there within {limit:g} s, for which {waiting} waited"
        return f"{name_ranks(missed)} did not come to collectives.init() within {limit:g} s, where {waiting} waited"

    def _on_guard(self) -> None:
        self._guard.read()
        if self._guard.lost:
            self.fail(EngineLost(at=self.now, name="the launcher's guard", pid=self._guard.pid))
            self._kill()
        elif self._guard.status is not None and (self._facts or not self._released):
            self._on_chatter()  # it may have said why
            fact = self._engine_ended()
            if not self._ending or fact.status < 0:
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
            elif self._ending:
                self._console.drop()
                self._kill()
                self._deadlines["sweep"] = self.now
            else:
                name = "Ctrl-C" if number == signal.SIGINT else signal_name(number, hint=False)
                self._console.say(f"ddp-launch: {name}: ending the job (once more kills it at once)")
                self._stop(number)

    def _suspend(self) -> None:
        """Ctrl-Z: the job stands still until somebody continues the launcher."""
        self.crew.tell({"freeze": True}, lambda member: not member.over)
        self._console.hide()
        self._stdin.rest()
        before = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.now = time.monotonic()
        self._move(self.now - before)
