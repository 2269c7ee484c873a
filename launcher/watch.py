"""The launcher's heart: starts the engine, listens to the keepers, decides when the job is over, ends it.

One loop, one selector, no thread: every event is a readable or writable file, every wait has a deadline. What failed
is decided in `launcher.verdict`; here is only what to do about it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from collectives.world import TRACE
from launcher import engine
from launcher.console import BACKLOG, Console
from launcher.guard import Guard
from launcher.job import Job
from launcher.process import fill_standard_streams
from launcher.reception import Reception
from launcher.shield import shield
from launcher.signals import ENDING, SignalPipe
from launcher.verdict import (
    EngineEnded,
    EngineLost,
    Fact,
    KeeperLost,
    NotStarted,
    Raised,
    RankFailed,
    cause,
    is_echo,
    name_ranks,
    others,
    signal_name,
)
from launcher.wire import ADDRESS, SECRET, Channel, Message, WireError, to_bytes, to_text

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
_STDIN_CHUNK = 1 << 15


def launch(job: Job) -> int:
    """Runs a job to its end and returns its exit code.

    0 if every rank ended with 0; else that of the first rank that failed: 128 + N if signal N killed it, 1 if it
    raised; 130 after Ctrl-C, 143 after SIGTERM.
    Raises: UsageError if no MPI is there to start more than one rank.
    """
    fill_standard_streams()
    environ = dict(os.environ)
    if job.trace is not None:
        from launcher import tracing  # here, because few jobs want it

        environ[TRACE] = tracing.prepare(job.trace)
    with SignalPipe() as wakeup:
        watch = _Watch(job, wakeup, environ)
        try:
            code = watch.run()
        finally:
            watch.close()
    if job.trace is not None:
        _say(tracing.merge(environ[TRACE]))
    return code


def _say(text: str) -> None:
    """Says something when the console is closed."""
    try:
        print(f"ddp-launch: {text}", file=sys.stderr)
    except OSError:
        pass  # nobody reads it


class _Rank:
    """What is known of one rank."""

    def __init__(self, channel: Channel, hello: Message) -> None:
        self.channel = channel
        self.pid = int(hello["pid"])
        self.keeper = int(hello["keeper"])
        self.engine = int(hello["engine"])
        self.engine_name = str(hello["name"])
        self.leaving = False  # it has said why it ends
        self.status: int | None = None  # exit code, or minus the signal that killed it
        self.asked = False  # by somebody but the launcher to end
        self.lost = False
        self.closed = False

    @property
    def over(self) -> bool:
        return self.lost or self.status is not None


class _Watch:
    """One run of a job."""

    def __init__(self, job: Job, wakeup: int, environ: Mapping[str, str]) -> None:
        self.job = job
        self.wakeup = wakeup
        self.console = Console(job.size, prefix=job.prefix)
        self.ranks: dict[int, _Rank] = {}
        self.facts: list[Fact] = []
        self.chatter = b""
        self.deserter: RankFailed | None = None
        self.stop = 0  # the signal by which the user ended the job
        self.ending = False
        self.killed = False
        self.released = False
        self.now = time.monotonic()
        # What happens when its time comes; removed when it no longer matters.
        self.deadlines: dict[str, float] = {"start": self.now + job.start_limit}
        # Read only while rank 0 has taken what it was sent before.
        self.stdin: int | None = 0
        self.stdin_taken = True
        family, command = _command(job, environ)
        self.reception = Reception()
        scratch = os.path.join(environ.get("TMPDIR") or "/tmp", f"ddp-launch-{os.getpid()}-{os.urandom(4).hex()}")
        self.guard = Guard(command, self._environment(family, environ, scratch), scratch)
        os.set_blocking(self.guard.chatter, False)

    def _environment(self, family: str | None, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        ours = {ADDRESS: self.reception.address, SECRET: self.reception.secret}
        if size := self.console.columns():
            ours |= {"COLUMNS": str(max(1, size[0] - self.console.prefix_width)), "LINES": str(size[1])}
        threads = max(1, len(os.sched_getaffinity(0)) // self.job.size)
        return {"OMP_NUM_THREADS": str(threads), **engine.engine_environment(family, environ, scratch), **ours}

    def run(self) -> int:
        """Watches to the end; returns the exit code."""
        while not self._finished():
            self._turn()
        self._on_chatter()
        code = self._report()
        self.ending = True
        self.deadlines = {}
        self.console.flush()
        while self.console.waiting_for is not None:
            self._turn()  # a slow reader gets everything, unless the user presses Ctrl-C
        return code

    def close(self) -> None:
        """Ends whatever still runs."""
        for rank in self.ranks.values():
            rank.channel.close()
        self.reception.close()
        self.guard.close()

    # -- the loop

    def _turn(self) -> None:
        """Waits for the next events and deals with them."""
        interests = self._interests()
        poll = select.poll()
        for fd, (mask, _) in interests.items():
            poll.register(fd, mask)
        until = min(*self.deadlines.values(), self.reception.deadline, float("inf"))
        wait = None if until == float("inf") else max(0.0, 1000 * (until - time.monotonic()))
        events = poll.poll(wait)
        self.now = time.monotonic()
        for fd, _ in events:
            interests[fd][1]()
        self._on_deadlines()
        self._advance()
        self.console.flush()
        if self.console.broken and not self.ending:
            self._stop(signal.SIGPIPE)

    def _interests(self) -> dict[int, tuple[int, Callable[[], None]]]:
        """What to wait for now, and whom to tell. In this order: what ranks say comes before their engine's end."""
        table: dict[int, tuple[int, Callable[[], None]]] = {}
        reading = select.POLLIN if self.console.backlog < BACKLOG else 0
        for number, rank in self.ranks.items():
            if not rank.closed:
                mask = reading | (select.POLLOUT if rank.channel.backlog else 0)
                table[rank.channel.fileno()] = mask, partial(self._on_rank, number, rank)
        for fileno in self.reception.filenos():
            table[fileno] = select.POLLIN, partial(self._on_reception, fileno)
        table[self.wakeup] = select.POLLIN, self._on_signal
        if not self.guard.lost:
            table[self.guard.fileno()] = select.POLLIN, self._on_guard
        if not self.guard.silent:
            table[self.guard.chatter] = select.POLLIN, self._on_chatter
        if self.stdin is not None and self.stdin_taken and 0 in self.ranks and _may_read(self.stdin):
            table[self.stdin] = select.POLLIN, self._on_stdin
        if (waiting := self.console.waiting_for) is not None:
            table[waiting] = select.POLLOUT, self.console.flush
        return table

    def _on_deadlines(self) -> None:
        due = {name for name, at in self.deadlines.items() if at <= self.now}
        if "start" in due:
            text = f"{name_ranks(self._missing())} did not start within {self.job.start_limit:g} s"
            self._fail(NotStarted(at=self.now, message=text))
        if "settle" in due:
            self._end(signal.SIGTERM, min(self.job.grace, _FAILURE_GRACE))
        if "deserted" in due and self.deserter is not None and not self._all_over():
            self._fail(self.deserter)
        if "kill" in due:
            self._kill()
        self.reception.drop_silent(self.now)

    def _advance(self) -> None:
        """Lets the keepers go once no rank is left to watch."""
        if self.released or not self._all_over():
            return
        self.released = True
        self.deadlines = {"engine": self.now + _ENGINE_LIMIT}
        self._tell_all({"release": True})

    def _finished(self) -> bool:
        if any(name in self.deadlines and self.deadlines[name] <= self.now for name in ("sweep", "engine")):
            return True
        return self._all_over() and (self.guard.status is not None or self.guard.lost)

    def _all_over(self) -> bool:
        return (self.ending or len(self.ranks) == self.job.size) and all(rank.over for rank in self.ranks.values())

    def _missing(self) -> tuple[int, ...]:
        return tuple(number for number in range(self.job.size) if number not in self.ranks)

    # -- ending

    def _fail(self, fact: Fact) -> None:
        """Takes note of a failure. The first ends the job."""
        if self.stop:
            return
        self.facts.append(fact)
        if self.ending:
            return
        if is_echo(fact):
            # Ending the others now would kill the one whose failure this is, before it has told us.
            self.deadlines.setdefault("settle", self.now + _SETTLE)
        else:
            self._end(signal.SIGTERM, min(self.job.grace, _FAILURE_GRACE))

    def _stop(self, number: int) -> None:
        self.stop = number
        self._end(number if number != signal.SIGPIPE else signal.SIGTERM, self.job.grace)

    def _end(self, number: int, grace: float) -> None:
        self.ending = True
        self.order: Message = {"signal": number}
        self.deadlines = {"kill": self.now + grace}
        # A rank that raised or exits is on its way out, through its exit handlers.
        self._tell_all(self.order, lambda rank: not rank.over and not rank.leaving)

    def _kill(self) -> None:
        self.ending = self.killed = True
        self.order = {"kill": True}
        self.deadlines = {"sweep": self.now + _KILL_LIMIT}
        self._tell_all(self.order, lambda rank: not rank.over)

    def _tell_all(self, message: Message, who: Callable[[_Rank], bool] = lambda rank: True) -> None:
        for rank in self.ranks.values():
            if not rank.closed and who(rank):
                rank.channel.send(message)

    # -- events

    def _on_reception(self, fileno: int) -> None:
        if news := self.reception.serve(fileno):
            self._welcome(*news)

    def _welcome(self, channel: Channel, hello: Message) -> None:
        number = int(hello["rank"])
        if int(hello["size"]) != self.job.size or number in self.ranks:
            channel.close()
            text = (
                f"mpiexec was to start {self.job.size} ranks, but rank {number} was told of a world of {hello['size']}"
            )
            self._fail(NotStarted(at=self.now, message=text))
            return
        self.ranks[number] = _Rank(channel, hello)
        if len(self.ranks) == self.job.size:
            self.deadlines.pop("start", None)
        if self.ending:
            channel.send(self.order)

    def _on_rank(self, number: int, rank: _Rank) -> None:
        rank.channel.flush()
        try:
            messages = rank.channel.receive()
        except WireError:
            messages = None  # as good as gone: nothing that it says can be trusted
        if messages is None:
            rank.closed = True
            rank.channel.close()
            if not rank.over:
                rank.lost = True
                self.console.close(number)
                if not self.killed:
                    self._fail(KeeperLost(at=self.now, rank=number, pid=rank.keeper))
            return
        for message in messages:
            for stream in ("out", "err"):
                if stream in message:
                    self.console.write(number, stream, to_bytes(message[stream]))
            if "raised" in message:
                rank.leaving = True
                self._fail(RankFailed(at=self.now, rank=number, pid=rank.pid, raised=Raised(**message["raised"])))
            if "leaving" in message:
                rank.leaving = True
                self._fail(RankFailed(at=self.now, rank=number, pid=rank.pid, status=int(message["leaving"])))
            if "lost" in message:
                self._fail(EngineLost(at=self.now, name=rank.engine_name, pid=rank.engine))
            if "asked" in message:
                rank.asked = True
            if "took" in message:
                self.stdin_taken = True
            if "end" in message:
                rank.status = int(message["end"])
                self.console.close(number)
                # What a rank makes of our own signal is not a failure.
                failed = RankFailed(at=self.now, rank=number, pid=rank.pid, status=rank.status, asked=rank.asked)
                if rank.status != 0 and not rank.leaving and not self.ending:
                    self._fail(failed)
                elif rank.status == 0 and message["deserted"] and not self.ending and self.deserter is None:
                    self.deserter = failed
                    self.deadlines["deserted"] = self.now + _DESERTION_LIMIT

    def _on_guard(self) -> None:
        self.guard.read()
        if self.guard.lost:
            self._fail(EngineLost(at=self.now, name="the launcher's guard", pid=self.guard.pid))
            self._kill()
        elif self.guard.status is not None and (self.facts or not self.released):
            fact = EngineEnded(at=self.now, pid=self.guard.engine, status=self.guard.status, missing=self._missing())
            if not self.ending or fact.status < 0:
                self._fail(fact)

    def _on_chatter(self) -> None:
        """Keeps what the engine itself says, for the case that nothing explains a failure better."""
        self.chatter = (self.chatter + self.guard.listen())[-_CHATTER_LIMIT:]

    def _on_stdin(self) -> None:
        assert self.stdin is not None
        try:
            data = os.read(self.stdin, _STDIN_CHUNK)
        except OSError:
            data = b""  # the terminal has gone
        self.stdin_taken = False
        self.ranks[0].channel.send({"stdin": to_text(data)})
        if not data:
            self.stdin = None

    def _on_signal(self) -> None:
        for number in os.read(self.wakeup, 512):
            if number not in ENDING:
                continue  # SIGCONT, SIGWINCH: only to look again
            if self.ending:
                self.console.drop()
                self._kill()
                self.deadlines["sweep"] = self.now
            else:
                name = "Ctrl-C" if number == signal.SIGINT else signal_name(number, hint=False)
                self.console.say(f"ddp-launch: {name}: ending the job (once more kills it at once)")
                self._stop(number)

    # -- the end

    def _report(self) -> int:
        """Says what went wrong, if anything did; returns the exit code."""
        if self.stop:
            return 128 + self.stop
        if not self.facts:
            return 0
        if missing := self._missing():
            status = self.guard.status or 0
            self.facts.append(EngineEnded(at=self.now, pid=self.guard.engine, status=status, missing=missing))
        first = cause(self.facts, self.chatter)
        if also := others(self.facts, first):
            self.console.say(f"ddp-launch: failed too: {also}")
        if isinstance(first, RankFailed) and first.raised is not None:
            self.console.say(first.raised.traceback)
        # A keeper's own last words come through the engine too.
        unexplained = isinstance(first, EngineEnded | NotStarted) or b"Traceback" in self.chatter
        if unexplained and self.chatter.strip():
            self.console.say(self.chatter.decode("utf-8", "surrogateescape"))
        self.console.say(f"ddp-launch: {first}")
        return first.code


def _command(job: Job, environ: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """The engine's family and the command to run; a world of one needs no MPI, its keeper is started directly."""
    keeper = os.path.join(os.path.dirname(os.path.abspath(__file__)), "keeper.py")
    rank = [sys.executable, keeper, *shield(job.target)]
    if job.size == 1:
        return None, rank
    mpiexec = engine.find_mpiexec(environ=environ)
    family = engine.flavour(mpiexec)
    return family, engine.engine_command(family, mpiexec, job.size, rank)


def _may_read(fd: int) -> bool:
    """False for the terminal of a job in the background: reading would stop us."""
    try:
        return not os.isatty(fd) or os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return True  # a terminal, but not the one that controls us
