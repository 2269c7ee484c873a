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
from launcher.protocol import Message, ProtocolError, to_bytes, type_and_value
from launcher.supervisor.rank_table import JoiningRanks, RankProcess, RankTable
from launcher.supervisor.shutdown import Deadlines, Shutdown
from launcher.supervisor.stdin import StdinForwarder

# A rank that ended with 0 but took no leave of the others (os._exit) is no failure if they end like that too.
_DESERTION_LIMIT = 1.0


class MessageHandler:
    """Handles the messages of all agents of a job.

    fail: takes note of a failure; grace: seconds that a job has to end by itself

    silent: ranks whose agents fell silent without a word
    deserter: a rank that ended with 0 and perhaps left others waiting; the deadline "deserted" is when that is certain
    joining: who waits for all to join the world; "joining" of the deadlines is when they wait no longer
    The deadline "stopping" is when ranks that still run, after others stopped as asked, get the signal to stop, too.
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

    def add_rank(self, rank: int, process: RankProcess, hello: Message) -> None:
        """Adds a rank whose agent has connected, and sends it the orders that hold now. hello: its first message"""
        self._ranks.add(rank, process)
        self._stdin.rank_started(rank, self._ranks)
        self._observers.rank_started(rank, hello)
        if self._ranks.debugging():
            process.channel.send({"pause": True})
        if self._shutdown.order is not None:
            process.channel.send(self._shutdown.order)

    def on_readable(self, rank: int, process: RankProcess) -> None:
        """An agent has sent something, or closed its connection."""
        process.channel.flush()
        try:
            messages = process.channel.receive()
        except ProtocolError:
            messages = None  # as good as gone: nothing that it says can be trusted
        if messages is None:
            process.closed = True
            process.channel.close()
            if not process.over:
                self._on_debugging(rank, process, False)
                process.lost = True
                self._console.leave(rank)
                if not self._shutdown.killed:
                    self.silent |= {rank}
                    self._fail(self._agent_lost(rank, process, process.agent))
            return
        for message in messages:
            self._handle(rank, process, message)

    def _handle(self, rank: int, process: RankProcess, message: Message) -> None:
        """Each type of message has a method `_on_TYPE`; types of which nothing is to be done have none."""
        kind, value = type_and_value(message)
        if kind == "end":
            self._on_end(rank, process, message)
        elif (handler := getattr(self, f"_on_{kind}", None)) is not None:
            handler(rank, process, value)

    def _on_out(self, rank: int, process: RankProcess, text: str) -> None:
        self._observers.output(rank, "out", to_bytes(text))

    def _on_err(self, rank: int, process: RankProcess, text: str) -> None:
        self._observers.output(rank, "err", to_bytes(text))

    def _on_nccl(self, rank: int, process: RankProcess, text: str) -> None:
        self._observers.library_log(rank, "nccl", to_bytes(text))

    def _on_heartbeat(self, rank: int, process: RankProcess, beat: Message) -> None:
        self._observers.heartbeat(rank, beat, time.monotonic())

    def _on_stacks(self, rank: int, process: RankProcess, text: str) -> None:
        self._observers.stacks(rank, text)

    def _on_joining(self, rank: int, process: RankProcess, limit: float | None) -> None:
        self.joining.waits(rank, limit)
        self._observers.joining(rank, limit is not None)
        if self.joining.limit is None:
            self._deadlines.drop("joining")
        elif not self._shutdown.begun:
            self._deadlines.begin("joining", time.monotonic(), self.joining.limit)
            self._look_for_ended_ranks()

    def _on_quit(self, rank: int, process: RankProcess, why: str) -> None:
        if not self._shutdown.begun:
            self._console.say(f"ddp-launch: {why}: ending the job (Ctrl-C kills it at once)")
            self._shutdown.stop(signal.SIGINT, time.monotonic(), self._grace)

    def _on_refused(self, rank: int, process: RankProcess, why: str) -> None:
        process.leaving = True
        where = f"{process.host}: " if self._ranks.several_hosts() else ""
        self._fail(NotStarted(at=time.monotonic(), message=f"{where}{why}", code=2))

    def _on_raised(self, rank: int, process: RankProcess, raised: dict[str, str]) -> None:
        process.leaving = True
        self._fail(self._failed(rank, process, raised=Raised(**raised)))

    def _on_stopped(self, rank: int, process: RankProcess, step: int) -> None:
        process.step = step

    def _on_leaving(self, rank: int, process: RankProcess, status: int) -> None:
        process.leaving = True
        self._leaves(process, self._failed(rank, process, status=status))

    def _on_signalled(self, rank: int, process: RankProcess, number: int) -> None:
        process.asked = True

    def _on_stdin_taken(self, rank: int, process: RankProcess, value: object) -> None:
        self._stdin.acknowledged()

    def _on_parent_lost(self, rank: int, process: RankProcess, pid: int) -> None:
        if pid == process.engine:
            self._fail(EngineLost(at=time.monotonic(), name=process.engine_name, pid=pid, host=process.host))
        else:
            self._fail(self._agent_lost(rank, process, pid))

    def _agent_lost(self, rank: int, process: RankProcess, pid: int) -> AgentLost:
        return AgentLost(at=time.monotonic(), rank=rank, pid=pid, host=process.host, started=process.started)

    def _leaves(self, process: RankProcess, how: RankFailed) -> None:
        """A rank leaves with another exit code than 0."""
        if how.status != STOPPED:
            self._fail(how)
            return
        process.saved = True
        if not self._shutdown.begun:
            self._deadlines.begin("stopping", time.monotonic(), self._grace)

    def _failed(self, rank: int, process: RankProcess, **how: Any) -> RankFailed:
        return RankFailed(
            at=time.monotonic(), rank=rank, pid=process.pid, host=process.host, asked=process.asked, **how
        )

    def _on_end(self, rank: int, process: RankProcess, message: Message) -> None:
        process.status = int(message["end"])
        self._on_debugging(rank, process, False)
        self._observers.rank_ended(rank, process.status)
        self.joining.rank_ended(rank)
        # What a rank makes of our own signal is not a failure.
        failed = self._failed(rank, process, status=process.status, memory=message.get("memory"))
        if self._shutdown.begun:
            return
        if process.status != 0 and not process.leaving:
            self._leaves(process, failed)
        elif process.status == 0 and message["deserted"] and self.deserter is None:
            self.deserter = failed
            self._deadlines.put("deserted", time.monotonic(), _DESERTION_LIMIT)
        else:
            self._look_for_ended_ranks()

    def _look_for_ended_ranks(self) -> None:
        """A rank that ended with 0 before it came to `collectives.init` has failed if others wait for it there."""
        for rank, process in self._ranks:
            if process.status == 0 and (waiting := self.joining.missed(rank)):
                self._fail(self._failed(rank, process, status=0, missed_by=waiting))
                return

    def _on_debugging(self, rank: int, process: RankProcess, debugging: bool) -> None:
        before = self._ranks.debugging()
        process.debugging = debugging
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
