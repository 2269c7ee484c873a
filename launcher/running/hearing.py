"""What the keepers say of their ranks: carried to those whom it concerns, and turned into facts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from collectives.world import STOPPED
from launcher.judging.verdict import EngineLost, Fact, KeeperLost, NotStarted, Raised, RankFailed
from launcher.output.console import Console
from launcher.running.clocks import Clocks
from launcher.running.crew import Crew, Member
from launcher.running.ending import Ending
from launcher.running.feeding import StandardInput
from launcher.running.joining import Joining
from launcher.running.observer import Observer
from launcher.wire import Message, WireError, to_bytes

# A rank that ended with 0 but took no leave of the others (os._exit) is no failure if they end like that too.
_DESERTION_LIMIT = 1.0


class Hearing:
    """The ears of a job.

    fail: takes note of a failure; grace: seconds that a job has to end by itself

    silent: ranks whose keepers fell silent without a word
    deserter: a rank that ended with 0 and perhaps left others waiting; "deserted" of the clocks is when that is certain
    joining: who waits for all to join the world; "joining" of the clocks is when they wait no longer
    Of the clocks "stopping" is when ranks that go on, though others have stopped as asked, are told to stop as well.
    """

    def __init__(
        self,
        crew: Crew,
        console: Console,
        stdin: StandardInput,
        observers: Observer,
        clocks: Clocks,
        ending: Ending,
        fail: Callable[[Fact], None],
        grace: float,
    ) -> None:
        self.silent: frozenset[int] = frozenset()
        self.deserter: RankFailed | None = None
        self.joining = Joining(crew.n)
        self._crew, self._console, self._stdin, self._observers = crew, console, stdin, observers
        self._clocks, self._ending, self._fail, self._grace = clocks, ending, fail, grace
        self._passed = 0  # breakpoints that the debugger has gone on from

    def welcome(self, rank: int, member: Member, hello: Message) -> None:
        """A keeper has come, and is told what the others have been told before. hello: what it says of itself"""
        self._crew.add(rank, member)
        self._stdin.came(rank, self._crew)
        self._observers.up(rank, hello)
        if self._crew.debugging():
            member.channel.send({"pause": True})
        if self._passed:
            member.channel.send({"passed": self._passed})
        if self._ending.order is not None:
            member.channel.send(self._ending.order)

    def hear(self, rank: int, member: Member) -> None:
        """Something has come from a keeper, or it has gone."""
        member.channel.flush()
        try:
            messages = member.channel.receive()
        except WireError:
            messages = None  # as good as gone: nothing that it says can be trusted
        if messages is None:
            member.closed = True
            member.channel.close()
            if not member.over:
                self._on_debugging(member, False)
                member.lost = True
                self._console.leave(rank)
                if not self._ending.killed:
                    self.silent |= {rank}
                    self._fail(self._keeper_lost(rank, member, member.keeper))
            return
        for message in messages:
            self._on_message(rank, member, message)

    def _on_message(self, rank: int, member: Member, message: Message) -> None:
        for stream in ("out", "err"):
            if stream in message:
                self._observers.said(rank, stream, to_bytes(message[stream]))
        if "nccl" in message:
            self._observers.noted(rank, "nccl", to_bytes(message["nccl"]))
        if "beat" in message:
            self._observers.beat(rank, message["beat"], time.monotonic())
        if "stacks" in message:
            self._observers.stacks(rank, str(message["stacks"]))
        if "debugging" in message:
            self._on_debugging(member, bool(message["debugging"]))
        if "editing" in message:
            self._stdin.edit(bool(message["editing"]))
        if "joining" in message:
            self.joining.waits(rank, message["joining"])
            self._observers.joining(rank, message["joining"] is not None)
            if self.joining.limit is None:
                self._clocks.drop("joining")
            elif not self._ending.begun:
                self._clocks.begin("joining", time.monotonic(), self.joining.limit)
                self._look_for_ended_ranks()
        if "passed" in message:
            self._passed = int(message["passed"])
            self._crew.tell({"passed": self._passed}, lambda each: not each.over)
        if "quit" in message and not self._ending.begun:
            self._console.say(f"ddp-launch: {message['quit']}: ending the job (Ctrl-C kills it at once)")
            self._ending.stop(signal.SIGINT, time.monotonic(), self._grace)
        if "refused" in message:
            member.leaving = True
            where = f"{member.host}: " if self._crew.several_hosts() else ""
            self._fail(NotStarted(at=time.monotonic(), message=f"{where}{message['refused']}", code=2))
        if "raised" in message:
            member.leaving = True
            self._fail(self._failed(rank, member, raised=Raised(**message["raised"])))
        if "stopped" in message:
            member.step = int(message["stopped"])
        if "leaving" in message:
            member.leaving = True
            self._leaves(member, self._failed(rank, member, status=int(message["leaving"])))
        if "lost" in message:
            self._on_lost(rank, member, int(message["lost"]))
        if "asked" in message:
            member.asked = True
        if "took" in message:
            self._stdin.taken()
        if "end" in message:
            self._on_end(rank, member, message)

    def _on_lost(self, rank: int, member: Member, pid: int) -> None:
        if pid == member.engine:
            self._fail(EngineLost(at=time.monotonic(), name=member.engine_name, pid=pid, host=member.host))
        else:
            self._fail(self._keeper_lost(rank, member, pid))

    def _keeper_lost(self, rank: int, member: Member, pid: int) -> KeeperLost:
        return KeeperLost(at=time.monotonic(), rank=rank, pid=pid, host=member.host, started=member.started)

    def _leaves(self, member: Member, how: RankFailed) -> None:
        """A rank leaves with another exit code than 0."""
        if how.status != STOPPED:
            self._fail(how)
            return
        member.saved = True
        if not self._ending.begun:
            self._clocks.begin("stopping", time.monotonic(), self._grace)

    def _failed(self, rank: int, member: Member, **how: Any) -> RankFailed:
        return RankFailed(at=time.monotonic(), rank=rank, pid=member.pid, host=member.host, asked=member.asked, **how)

    def _on_end(self, rank: int, member: Member, message: Message) -> None:
        member.status = int(message["end"])
        self._on_debugging(member, False)
        if rank == self._stdin.rank:
            self._stdin.edit(False)
        self._observers.ended(rank, member.status)
        self.joining.ended(rank)
        # What a rank makes of our own signal is not a failure.
        failed = self._failed(rank, member, status=member.status, memory=message.get("memory"))
        if self._ending.begun:
            return
        if member.status != 0 and not member.leaving:
            self._leaves(member, failed)
        elif member.status == 0 and message["deserted"] and self.deserter is None:
            self.deserter = failed
            self._clocks.put("deserted", time.monotonic(), _DESERTION_LIMIT)
        else:
            self._look_for_ended_ranks()

    def _look_for_ended_ranks(self) -> None:
        """A rank that ended with 0 before it came to `collectives.init` has failed if others wait for it there."""
        for rank, member in self._crew:
            if member.status == 0 and (waiting := self.joining.missed(rank)):
                self._fail(self._failed(rank, member, status=0, missed_by=waiting))
                return

    def _on_debugging(self, member: Member, debugging: bool) -> None:
        before = self._crew.debugging()
        member.debugging = debugging
        now = self._crew.debugging()
        if now == before:
            return
        self._observers.debugging(now)
        if now and not before:
            self._clocks.hold(time.monotonic())
        if before and not now:
            self._clocks.release(time.monotonic())
        if bool(now) != bool(before):
            self._crew.tell({"pause": bool(now)}, lambda each: not each.over)
