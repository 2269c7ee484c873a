"""Event loop of an agent: forwards between rank and launcher, watches the rank to its end, ends all it started."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time

from collectives.world import PEER_FAILED_AT
from launcher import errors
from launcher.agent.agent_supervisor import SWEEP_LIMIT, end_at_once, end_like
from launcher.agent.heartbeat import Heartbeat
from launcher.agent.stacks import LOOK, Stacks
from launcher.agent.suspend import ORDERED, PAUSED, Suspension
from launcher.linux import format_bytes, reap_all, signal_pipe, stat_of, sweep
from launcher.protocol import Message, ProtocolError, connect, to_bytes, to_text, type_and_value

TYPE_CHECKING = False  # not of `typing`, whose import would cost an agent a tenth of its memory
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_CHUNK = 1 << 16
# A rank whose output the launcher does not take in time is made to wait, as on a full pipe.
_BACKLOG = 1 << 20
# A rank that prints line by line is read this much later (s) each time, unless it has filled its pipe: many lines then
# cost one message. What comes after a pause is passed on at once.
_REST, _FEW = 0.004, 1 << 14
# What is left in a rank's pipes after its end is read at once; only a process beyond our reach can keep them open.
_DRAIN_LIMIT = 1.0
_BEAT = 1.0  # s
# Of a killed parent that has several threads the one which started us may die first (s): we hear, and it seems to live.
_DYING = 0.02
_NEVER = float("inf")

# From outside, an engine most likely, and to end the rank; and for whatever the user wants.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Agent:
    """An agent: the rank's pipes, its state, and what must still be reported.

    pid: of the rank; pipes: our ends of its standard streams and of its reports
    stacks, page: file descriptors of the memory for its stacks, and of the page by which its time limits are stopped
    above: pids of the parent, and of its parent if that is an agent supervisor; identity: the first message
    """

    def __init__(
        self,
        pid: int,
        pipes: dict[str, int],
        stacks: int,
        page: int,
        above: Sequence[int],
        identity: Message,
    ) -> None:
        self.pid = pid
        self.pipes = pipes
        self.above = above
        self.identity = identity
        self.heartbeat = Heartbeat(pid)
        self.stacks = Stacks(pid, stacks, self.heartbeat)
        self.page = page
        self.suspension = Suspension(page)
        self.reports = Reports()
        self.joined = False  # others may wait for this rank
        self.stdin = b""
        self.status: int | None = None
        self.peak = 0  # bytes
        self.killed = False  # by us
        self.next_beat = 0.0
        self.rested_at = 0.0
        self.heartbeat_timeout = _NEVER  # s without the launcher's machine after which the rank is ended
        self.drain_deadline = _NEVER
        self.reported = False
        self.released = False

    def keep(self, address: str, secret: str) -> NoReturn:
        """Watches the rank to its end, and ends like it."""
        self.wakeup = signal_pipe((signal.SIGCHLD, *_ENDING, *_PASSED_ON))
        try:
            self.channel, messages = connect(address, secret, self.identity)
        except errors.StartError as words:
            print(errors.start_error_line(words), file=sys.stderr)
            end_at_once()
        self._obey(messages)  # orders may have come with the answer
        self._reap()  # a rank may have ended before SIGCHLD had a handler
        while not self.released:
            self._turn()
        assert self.status is not None
        end_like(os.waitstatus_to_exitcode(self.status))

    def _turn(self) -> None:
        """Waits until something happens, and deals with it."""
        reading: list[int] = [self.wakeup, self.channel.fileno()]
        if self.channel.backlog < _BACKLOG and self._resting() == 0.0:
            reading += [self.pipes[name] for name in ("out", "err") if name in self.pipes]
        if "report" in self.pipes:
            reading.append(self.pipes["report"])
        writing = [self.channel.fileno()] if self.channel.backlog else []
        if self.stdin and "in" in self.pipes:
            writing.append(self.pipes["in"])
        readable, writable, _ = select.select(reading, writing, [], self._wait())
        if self.channel.fileno() in writable:
            self.channel.flush()
        if self.pipes.get("in") in writable:
            self._feed()
        for name in ("report", "out", "err"):
            if self.pipes.get(name) in readable:
                self._carry(name)
        if self.wakeup in readable:
            self._handle_signals(os.read(self.wakeup, 512))
        if self.channel.fileno() in readable:
            self._obey(self._receive())
        self._do_due(time.monotonic())
        self._report_end()

    def _wait(self) -> float:
        """Seconds until something is due."""
        due = min(self.drain_deadline, self.next_beat)
        wait = max(0.0, due - time.monotonic())
        if self.stacks.awaited:
            wait = min(wait, LOOK)
        if rest := self._resting():
            wait = min(wait, rest)
        return wait

    def _resting(self) -> float:
        """For how long (s) output is left alone, 0: it is not."""
        return max(0.0, self.rested_at - time.monotonic()) if self.status is None else 0.0

    def _do_due(self, now: float) -> None:
        if self.stacks.awaited and (text := self.stacks.look(now)) is not None:
            self.channel.send({"stacks": text})
        if now >= self.next_beat:
            self.next_beat = now + _BEAT
            self._beat()

    def _beat(self) -> None:
        # Before anything is sent: what was sent a second ago has been acknowledged by now.
        if self.channel.unacknowledged() >= self.heartbeat_timeout:
            end_at_once()  # the launcher's machine is beyond reach, and has given this one up
        if self.status is not None:
            self.channel.send({})  # nothing to say, but only what is sent can be acknowledged
            return
        if self.channel.backlog < _BACKLOG:
            self.channel.send({"heartbeat": self.heartbeat.take()})

    # -- the rank

    def _carry(self, name: str) -> None:
        try:
            data = os.read(self.pipes[name], _CHUNK)
        except BlockingIOError:
            return
        if not data:
            os.close(self.pipes.pop(name))
        elif name == "report":
            for report in self.reports.feed(data):
                self._take_report(report)
        else:
            self.channel.send({name: to_text(data)})
            if len(data) < _FEW:
                self.rested_at = time.monotonic() + _REST

    def _take_report(self, message: Message) -> None:
        kind, value = type_and_value(message)
        if kind in ("joined", "left"):
            self.joined = kind == "joined"
        elif kind == "flight":
            self.heartbeat.found(value)
        else:
            self.channel.send(message)

    def _feed(self) -> None:
        """Passes stdin on; the launcher sends more when this has been acknowledged."""
        try:
            self.stdin = self.stdin[os.write(self.pipes["in"], self.stdin[:_CHUNK]) :]
        except BrokenPipeError:
            os.close(self.pipes.pop("in"))
            self.stdin = b""
            return
        if not self.stdin:
            self.channel.send({"stdin_taken": True})

    def _on_signal(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)  # not reaped yet, so the pid is the rank's
            self.killed = self.killed or number == signal.SIGKILL

    def _reap(self) -> None:
        """Reaps children that have ended: the rank, or orphans of its own that came to us."""
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.peak = usage.ru_maxrss << 10
                self._children_ended({pid: status})
        self._children_ended(reap_all())  # it may have ended between the two

    def _children_ended(self, ended: dict[int, int]) -> None:
        if self.pid in ended and self.status is None:
            self.status = ended[self.pid]
            self.peak = self.peak or resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
            # What the rank leaves behind would hold its pipes open, and the machine's memory.
            sweep(SWEEP_LIMIT)
            self.drain_deadline = time.monotonic() + _DRAIN_LIMIT

    # -- engine and launcher

    def _handle_signals(self, numbers: bytes) -> None:
        until = time.monotonic() + _DYING
        while signal.SIGTERM in numbers and self._lost() is None and time.monotonic() < until:
            time.sleep(0.001)
        if (lost := self._lost()) is not None:
            self.channel.send({"parent_lost": lost})
            end_at_once()
        for number in numbers:
            if number in _ENDING:
                # Whether this is a stop that the rank may take its time for or a peer has died, the launcher knows.
                self.channel.send({"signalled": number})
            if number != signal.SIGCHLD:
                self._on_signal(number)
        self._reap()

    def _lost(self) -> int | None:
        """The parent that has died: the agent supervisor, if there is one, or the engine; None if all live."""
        child = os.getpid()
        for pid in self.above:
            if stat_of(child).parent != pid:
                return pid
            child = pid
        return None

    def _receive(self) -> list[Message] | None:
        try:
            return self.channel.receive()
        except ProtocolError as error:
            print(f"agent: {error}", file=sys.stderr)
            return None

    def _obey(self, messages: list[Message] | None) -> None:
        if messages is None:  # the launcher has gone
            end_at_once()
        for message in messages:
            kind, value = type_and_value(message)
            if (handler := getattr(self, f"_on_{kind}", None)) is not None:
                handler(value)

    def _on_heartbeat(self, seconds: float) -> None:
        self.heartbeat_timeout = float(seconds)

    def _on_peer_failed(self, number: int) -> None:
        os.pwrite(self.page, b"\1", PEER_FAILED_AT)
        self._on_signal(number)

    def _on_kill(self, value: object) -> None:
        self.killed = True
        self._children_ended(sweep(SWEEP_LIMIT))

    def _on_stdin(self, text: str) -> None:
        if "in" in self.pipes:
            self.stdin += to_bytes(text)
            if not text:
                os.close(self.pipes.pop("in"))

    def _on_stacks(self, value: object) -> None:
        # Once reaped, its pid may be another's.
        text = self.stacks.ask(time.monotonic()) if self.status is None else "it has ended\n"
        if text is not None:
            self.channel.send({"stacks": text})

    def _on_pause(self, paused: bool) -> None:
        self.suspension.set(PAUSED, paused)

    def _on_suspend(self, suspended: bool) -> None:
        self.suspension.set(ORDERED, suspended)

    def _on_release(self, value: object) -> None:
        self.released = True

    # -- the end

    def _report_end(self) -> None:
        """Reports the rank's end, after all of its output has been sent."""
        if self.status is None or self.reported:
            return
        if time.monotonic() < self.drain_deadline and not self.pipes.keys().isdisjoint(("out", "err", "report")):
            return
        self.reported = True
        self.drain_deadline = _NEVER
        for name in list(self.pipes):
            os.close(self.pipes.pop(name))
        code = os.waitstatus_to_exitcode(self.status)
        memory = f"it had {format_bytes(self.peak)} at most" if code == -signal.SIGKILL and not self.killed else None
        self.channel.send({"end": code, "deserted": self.joined, "memory": memory})


# By name, the type of what is reported.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "raised": dict,
    "refused": str,
    "leaving": int,
    "stopped": int,
    "joining": (int, float, type(None)),
    "joined": bool,
    "left": bool,
    "flight": int,
    "debugging": bool,
    "quit": str,
}
# What `launcher.diagnosis.failures.Raised` is made of.
_RAISED = {"type": str, "message": str, "traceback": str}
# Bytes; longer than any report: `launcher.agent.rank` shortens what an exception says.
_LONGEST = 1 << 20


class Reports:
    """The reports in a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The reports that `data` completes."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LONGEST:]
        return [report for line in lines if (report := parse(line)) is not None]


def parse(line: bytes) -> Message | None:
    """The report that a line holds; None if it is none.

    >>> parse(b'{"leaving": 3}'), parse(b'{"leaving": "x"}'), parse(b"hello")
    ({'leaving': 3}, None, None)
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    kind, value = type_and_value(found)
    if kind not in _TYPES or not isinstance(value, _TYPES[kind]):
        return None
    return found if kind != "raised" or {key: type(text) for key, text in found[kind].items()} == _RAISED else None
