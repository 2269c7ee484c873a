"""Message handler: turns agents' messages into calls of the job's parts, and into failures."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from collectives.world import STOPPED
from launcher.console.console import Console
from launcher.diagnosis.failures import AgentLost, EngineLost, Failure, NotStarted, Raised, RankFailed
from launcher.diagnosis.observer import Observer
from launcher.protocol import Message, ProtocolError, to_bytes
from launcher.supervisor.rank_table import JoiningRanks, Member, RankTable
from launcher.supervisor.shutdown import Deadlines, Shutdown
from launcher.supervisor.stdin import StdinForwarder

# A rank that ended with 0 but took no leave of the others (os._exit) is no failure if they end like that too.
_DESERTION_LIMIT = 1.0


class MessageHandler:
    """The ears of a job.

    fail: takes note of a failure; grace: seconds that a job has to end by itself

    silent: ranks whose agents fell silent without a word
    deserter: a rank that ended with 0 and perhaps left others waiting; the deadline "deserted" is when that is certain
    joining: who waits for all to join the world; "joining" of the deadlines is when they wait no longer
    Of the deadlines "stopping" is when ranks that go on, though others have stopped as asked, are told to stop as well.
    """

    def __init__(
        self,
        ranks: RankTable,
        console: Console,
        stdin: StdinForwarder,
        observers: Observer,
        deadlines: Deadlines,
        shutdown: Shutdown,
        fail: Callable[[Failure], None],
        grace: float,
    ) -> None:
        self.silent: frozenset[int] = frozenset()
        self.deserter: RankFailed | None = None
        self.joining = JoiningRanks(ranks.n)
        self._ranks, self._console, self._stdin, self._observers = ranks, console, stdin, observers
        self._deadlines, self._shutdown, self._fail, self._grace = deadlines, shutdown, fail, grace
        self._passed = 0  # breakpoints that the debugger has gone on from

    def welcome(self, rank: int, member: Member, hello: Message) -> None:
        """An agent has come, and is told what the others have been told before. hello: what it says of itself"""
        self._ranks.add(rank, member)
        self._stdin.came(rank, self._ranks)
        self._observers.rank_started(rank, hello)
        if self._ranks.debugging():
            member.channel.send({"pause": True})
        if self._passed:
            member.channel.send({"passed": self._passed})
        if self._shutdown.order is not None:
            member.channel.send(self._shutdown.order)

    def hear(self, rank: int, member: Member) -> None:
        """Something has come from an agent, or it has gone."""
        member.channel.flush()
        try:
            messages = member.channel.receive()
        except ProtocolError:
            messages = None  # as good as gone: nothing that it says can be trusted
        if messages is None:
            member.closed = True
            member.channel.close()
            if not member.over:
                self._on_debugging(member, False)
                member.lost = True
                self._console.leave(rank)
                if not self._shutdown.killed:
                    self.silent |= {rank}
                    self._fail(self._agent_lost(rank, member, member.agent))
            return
        for message in messages:
            self._on_message(rank, member, message)

    def _on_message(self, rank: int, member: Member, message: Message) -> None:
        for stream in ("out", "err"):
            if stream in message:
                self._observers.output(rank, stream, to_bytes(message[stream]))
        if "nccl" in message:
            self._observers.library_log(rank, "nccl", to_bytes(message["nccl"]))
        if "beat" in message:
            self._observers.heartbeat(rank, message["beat"], time.monotonic())
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
                self._deadlines.drop("joining")
            elif not self._shutdown.begun:
                self._deadlines.begin("joining", time.monotonic(), self.joining.limit)
                self._look_for_ended_ranks()
        if "passed" in message:
            self._passed = int(message["passed"])
            self._ranks.tell({"passed": self._passed}, lambda each: not each.over)
        if "quit" in message and not self._shutdown.begun:
            self._console.say(f"ddp-launch: {message['quit']}: ending the job (Ctrl-C kills it at once)")
            self._shutdown.stop(signal.SIGINT, time.monotonic(), self._grace)
        if "refused" in message:
            member.leaving = True
            where = f"{member.host}: " if self._ranks.several_hosts() else ""
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
            self._fail(self._agent_lost(rank, member, pid))

    def _agent_lost(self, rank: int, member: Member, pid: int) -> AgentLost:
        return AgentLost(at=time.monotonic(), rank=rank, pid=pid, host=member.host, started=member.started)

    def _leaves(self, member: Member, how: RankFailed) -> None:
        """A rank leaves with another exit code than 0."""
        if how.status != STOPPED:
            self._fail(how)
            return
        member.saved = True
        if not self._shutdown.begun:
            self._deadlines.begin("stopping", time.monotonic(), self._grace)

    def _failed(self, rank: int, member: Member, **how: Any) -> RankFailed:
        return RankFailed(at=time.monotonic(), rank=rank, pid=member.pid, host=member.host, asked=member.asked, **how)

    def _on_end(self, rank: int, member: Member, message: Message) -> None:
        member.status = int(message["end"])
        self._on_debugging(member, False)
        if rank == self._stdin.rank:
            self._stdin.edit(False)
        self._observers.rank_ended(rank, member.status)
        self.joining.rank_ended(rank)
        # What a rank makes of our own signal is not a failure.
        failed = self._failed(rank, member, status=member.status, memory=message.get("memory"))
        if self._shutdown.begun:
            return
        if member.status != 0 and not member.leaving:
            self._leaves(member, failed)
        elif member.status == 0 and message["deserted"] and self.deserter is None:
            self.deserter = failed
            self._deadlines.put("deserted", time.monotonic(), _DESERTION_LIMIT)
        else:
            self._look_for_ended_ranks()

    def _look_for_ended_ranks(self) -> None:
        """A rank that ended with 0 before it came to `collectives.init` has failed if others wait for it there."""
        for rank, member in self._ranks:
            if member.status == 0 and (waiting := self.joining.missed(rank)):
                self._fail(self._failed(rank, member, status=0, missed_by=waiting))
                return

    def _on_debugging(self, member: Member, debugging: bool) -> None:
        before = self._ranks.debugging()
        member.debugging = debugging
        now = self._ranks.debugging()
        if now == before:
            return
        self._observers.debugging(now)
        if now and not before:
            self._deadlines.hold(time.monotonic())
        if before and not now:
            self._deadlines.release(time.monotonic())
        if bool(now) != bool(before):
            self._ranks.tell({"pause": bool(now)}, lambda each: not each.over)
