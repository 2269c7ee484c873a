"""Event loop of an agent: forwards data between rank and launcher, watches the rank, and kills its orphans."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time

from collectives.world import PEER_FAILED_AT, RESIZE_AT
from launcher import errors
from launcher.agent.agent_supervisor import SWEEP_LIMIT, exit_like, kill_and_exit
from launcher.agent.heartbeat import RankReader
from launcher.agent.stacks import POLL_INTERVAL, Stacks
from launcher.agent.suspend import DEBUGGING, SUSPENDED, Suspension
from launcher.linux import ENDING_SIGNALS, FORWARDED_SIGNALS, format_bytes, reap_all, signal_pipe, stat_of, sweep
from launcher.protocol import Message, ProtocolError, connect, to_bytes, to_text, type_and_value

TYPE_CHECKING = False  # Not from `typing`, whose import would cost every agent 0.3 to 0.5 MB.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

_CHUNK = 1 << 16
# While this many bytes wait to be sent to the launcher, the rank's output is not read, and the rank blocks as on any
# full pipe.
_BACKLOG = 1 << 20
# After a read of few bytes the rank's output is left alone for this long (s), so that many short lines go out as one
# message. The first output after a pause is forwarded at once, and so is all output of a rank that writes much.
_OUTPUT_INTERVAL = 0.004
_FEW_BYTES = 1 << 14
# After the rank's end its pipes are read for at most this long (s): a process that cannot be killed may keep them open.
_DRAIN_LIMIT = 1.0
# Interval of heartbeats (s).
_HEARTBEAT_INTERVAL = 1.0
# SIGTERM may come from the kernel because the parent died. If the parent has several threads, the thread that started
# this process may die first: then the parent still seems alive for at most this long (s).
_PARENT_DEATH_LIMIT = 0.02
_NEVER = float("inf")


class Agent:
    """An agent: the rank's pipes and state, and the connection to the launcher.

    pid: of the rank
    pipes: the agent's ends of the pipes "in", "out", "err" and "report"
    stacks: file descriptor of the memory to which the rank writes its stacks
    page: file descriptor of the memory page from which the rank reads pauses, failed peers and resizes
    ancestors: pid of the parent; and of the parent's parent, if the parent is an agent supervisor
    """

    def __init__(
        self,
        pid: int,
        pipes: dict[str, int],
        stacks: int,
        page: int,
        ancestors: Sequence[int],
    ) -> None:
        self.pid = pid
        self.pipes = pipes
        self.ancestors = ancestors
        self.rank_reader = RankReader(pid)
        self.stacks = Stacks(pid, stacks, self.rank_reader)
        self.page = page
        self.suspension = Suspension(page)
        self.unparsed = b""  # The beginning of a report whose end has not arrived.
        self.joined = False  # Whether the rank is in a world whose other ranks may wait for it.
        self.stdin = b""
        self.status: int | None = None
        self.peak = 0  # Largest resident memory, bytes.
        self.killed = False  # Whether the launcher had the rank killed.
        self.next_heartbeat = 0.0
        self.next_output = 0.0
        # The rank is killed if the launcher's machine has acknowledged nothing for so long (s).
        self.heartbeat_timeout = _NEVER
        self.drain_deadline = _NEVER
        self.reported = False
        self.released = False

    def run(self, address: str, secret: str, identity: Message) -> NoReturn:
        """Watches the rank until it ends, and exits with its status. identity: the first message to the launcher

        If the launcher cannot be reached, or the launcher or the engine is lost, kills the rank and exits with 1.
        """
        self.wakeup = signal_pipe((signal.SIGCHLD, *FORWARDED_SIGNALS))
        try:
            self.channel, messages = connect(address, secret, identity)
        except errors.StartError as error:
            print(errors.start_error_line(error), file=sys.stderr)
            kill_and_exit()
        self._handle_commands(messages)
        self._reap()  # The rank may have ended before SIGCHLD had a handler.
        while not self.released:
            self._run_once()
        assert self.status is not None
        exit_like(os.waitstatus_to_exitcode(self.status))

    def _run_once(self) -> None:
        """Waits for the next events and handles them."""
        reading: list[int] = [self.wakeup, self.channel.fileno()]
        if self.channel.backlog < _BACKLOG and time.monotonic() >= self.next_output:
            reading += [self.pipes[name] for name in ("out", "err") if name in self.pipes]
        if "report" in self.pipes:
            reading.append(self.pipes["report"])
        writing = [self.channel.fileno()] if self.channel.backlog else []
        if self.stdin and "in" in self.pipes:
            writing.append(self.pipes["in"])
        readable, writable, _ = select.select(reading, writing, [], self._time_to_wait())
        if self.channel.fileno() in writable:
            self.channel.flush()
        if self.pipes.get("in") in writable:
            self._write_stdin()
        for name in ("report", "out", "err"):
            if self.pipes.get(name) in readable:
                self._forward_output(name)
        if self.wakeup in readable:
            self._handle_signals(os.read(self.wakeup, 512))
        if self.channel.fileno() in readable:
            self._handle_commands(self._receive())
        self._run_timers(time.monotonic())
        self._report_end()

    def _time_to_wait(self) -> float:
        """Seconds until the next timer."""
        now = time.monotonic()
        timers = [self.drain_deadline, self.next_heartbeat]
        if self.stacks.pending:
            timers.append(now + POLL_INTERVAL)
        if self.next_output > now:
            timers.append(self.next_output)
        return max(0.0, min(timers) - now)

    def _run_timers(self, now: float) -> None:
        if self.stacks.pending and (text := self.stacks.poll(now)) is not None:
            self.channel.send({"stacks": text})
        if now >= self.next_heartbeat:
            self.next_heartbeat = now + _HEARTBEAT_INTERVAL
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        # Checked before anything is sent: what was sent a second ago has been acknowledged by now.
        if self.channel.unacknowledged() >= self.heartbeat_timeout:
            kill_and_exit()  # The launcher's machine cannot be reached. The launcher has given up this rank, too.
        if self.status is not None:
            self.channel.send({})  # An empty message, so that the launcher's machine has something to acknowledge.
        elif self.channel.backlog < _BACKLOG:
            self.channel.send({"heartbeat": self.rank_reader.heartbeat()})

    # -- the rank

    def _forward_output(self, name: str) -> None:
        """Reads from the pipe `name` of the rank: sends output to the launcher, and handles reports."""
        try:
            data = os.read(self.pipes[name], _CHUNK)
        except BlockingIOError:
            return
        if not data:
            os.close(self.pipes.pop(name))
        elif name == "report":
            *lines, unfinished = (self.unparsed + data).split(b"\n")
            self.unparsed = unfinished[-_MAX_REPORT:]
            for line in lines:
                if (report := parse(line)) is not None:
                    self._handle_report(report)
        else:
            self.channel.send({name: to_text(data)})
            if len(data) < _FEW_BYTES and self.status is None:
                self.next_output = time.monotonic() + _OUTPUT_INTERVAL

    def _handle_report(self, message: Message) -> None:
        kind, value = type_and_value(message)
        if kind in ("joined", "left"):
            self.joined = kind == "joined"
        elif kind == "flight":
            self.rank_reader.open_record(value)
        else:
            self.channel.send(message)

    def _write_stdin(self) -> None:
        """Writes to the rank's standard input. When all is written, reports this, so that the launcher sends more."""
        try:
            self.stdin = self.stdin[os.write(self.pipes["in"], self.stdin[:_CHUNK]) :]
        except BrokenPipeError:
            os.close(self.pipes.pop("in"))
            self.stdin = b""
            return
        if not self.stdin:
            self.channel.send({"stdin_taken": True})

    def _signal_rank(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)  # It has not been reaped yet, so the pid is still the rank's.
            self.killed = self.killed or number == signal.SIGKILL

    def _reap(self) -> None:
        """Reaps children that have ended: the rank, and orphans of its processes."""
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.peak = usage.ru_maxrss << 10
                self._handle_ends({pid: status})
        self._handle_ends(reap_all())  # The rank may have ended between the two calls.

    def _handle_ends(self, statuses: dict[int, int]) -> None:
        """If the rank was reaped, records its end and kills what it left.

        statuses: the wait status of each reaped process, by pid
        """
        if self.pid in statuses and self.status is None:
            self.status = statuses[self.pid]
            self.peak = self.peak or resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
            # The processes that the rank leaves behind would keep its pipes open, and occupy memory.
            sweep(SWEEP_LIMIT)
            self.next_output = 0.0
            self.drain_deadline = time.monotonic() + _DRAIN_LIMIT

    # -- engine and launcher

    def _handle_signals(self, numbers: bytes) -> None:
        deadline = time.monotonic() + _PARENT_DEATH_LIMIT
        while signal.SIGTERM in numbers and self._dead_ancestor() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if (pid := self._dead_ancestor()) is not None:
            self.channel.send({"parent_lost": pid})
            kill_and_exit()
        for number in numbers:
            if number in ENDING_SIGNALS:
                # The engine may be ending the job, or have lost another rank. If this rank now fails, the launcher must
                # know that the signal may be the cause.
                self.channel.send({"signalled": number})
            if number != signal.SIGCHLD:
                self._signal_rank(number)
        self._reap()

    def _dead_ancestor(self) -> int | None:
        """The pid of an ancestor that has died, the agent supervisor or the engine; None if all are alive."""
        child = os.getpid()
        for pid in self.ancestors:
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

    def _handle_commands(self, messages: list[Message] | None) -> None:
        """Executes what the launcher has sent. messages: None if the connection is lost or not usable any more"""
        if messages is None:
            kill_and_exit()
        for message in messages:
            self._handle_command(*type_and_value(message))

    def _handle_command(self, command: str, value: Any) -> None:
        match command:
            case "heartbeat_timeout":
                self.heartbeat_timeout = float(value)
            case "signal":
                self._signal_rank(value)
            case "peer_failed":
                os.pwrite(self.page, b"\1", PEER_FAILED_AT)
                self._signal_rank(value)
            case "resize":
                os.pwrite(self.page, bytes([value]), RESIZE_AT)
            case "kill":
                self.killed = True
                self._handle_ends(sweep(SWEEP_LIMIT))
            case "stdin":
                self._receive_stdin(value)
            case "stacks":
                # The pid of a rank that has been reaped may belong to another process.
                text = self.stacks.request(time.monotonic()) if self.status is None else "it has ended\n"
                if text is not None:
                    self.channel.send({"stacks": text})
            case "pause":
                self.suspension.set(DEBUGGING, value)
            case "suspend":
                self.suspension.set(SUSPENDED, value)
            case "release":
                self.released = True

    def _receive_stdin(self, text: str) -> None:
        """Queues standard input for the rank. text: "" at the end of the input"""
        if "in" in self.pipes:
            self.stdin += to_bytes(text)
            if not text:
                os.close(self.pipes.pop("in"))

    # -- the end

    def _report_end(self) -> None:
        """Reports the rank's end once its pipes have been read to their end, or `drain_deadline` has passed."""
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


# Type of the value of each report that a rank may make.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "raised": dict,
    "refused": str,
    "leaving": int,
    "stopped": int,
    "resizable": int,
    "resizing": int,
    "held": int,
    "joining": (int, float, type(None)),
    "joined": bool,
    "left": bool,
    "flight": int,
    "debugging": bool,
    "quit": str,
}
# Fields of "raised", which become a `launcher.diagnosis.failures.Raised`, and their types.
_RAISED = {"type": str, "message": str, "traceback": str}
# More bytes than any report has: `launcher.agent.rank` shortens the texts of an exception.
_MAX_REPORT = 1 << 20


def parse(line: bytes) -> Message | None:
    """The report that a line holds; None if it is not a report.

    >>> parse(b'{"leaving": 3}'), parse(b'{"leaving": "x"}'), parse(b"hello")
    ({'leaving': 3}, None, None)
    """
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(report, dict):
        return None
    kind, value = type_and_value(report)
    if kind not in _TYPES or not isinstance(value, _TYPES[kind]):
        return None
    if kind == "raised" and {key: type(text) for key, text in report[kind].items()} != _RAISED:
        return None
    return report
