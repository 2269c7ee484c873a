"""The process beside every rank: forks it, and carries what must not go through the MPI engine.

Engines tear lines, kill survivors before these can speak, and leave orphans. A keeper is the rank's parent and
subreaper: it hands output, exit status and signals over one connection to the launcher, and takes the rank and all it
started down when the launcher, the engine or itself dies. Started by path, so that no module in the user's working
folder can take the place of ours.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Not this folder but the one that holds the package; the rank replaces it by the script's.
    sys.path[0] = __file__.rpartition("/launcher/")[0]

import os
import resource
import select
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from collectives.world import KEEPER, REPORT, promised
from launcher import rank
from launcher.process import become_subreaper, die_with_parent, fill_standard_streams, reap_all, sweep
from launcher.shield import unshield

if TYPE_CHECKING:
    from launcher.wire import Message

_CHUNK = 1 << 16
# A rank whose output the launcher does not take in time is made to wait, as on a full pipe.
_BACKLOG = 1 << 20
# What is left in a rank's pipes after its end is read at once; only a process beyond our reach can keep them open.
_DRAIN_LIMIT = 1.0
_HANDSHAKE_LIMIT = 20.0
_SWEEP_LIMIT = 2.0


def main(args: Sequence[str]) -> NoReturn:
    """Forks the rank that runs `args` (`SCRIPT ARGS...` or `-m MODULE ARGS...`) and keeps it until its end."""
    engine = os.getppid()
    world = promised()
    number, size = (world.rank, world.size) if world else (0, 1)
    local = world.local_rank if world and world.local_rank is not None else number
    local_size = world.local_size if world and world.local_size is not None else size
    # Taken out, so that nothing the rank starts inherits them.
    address, secret = os.environ.pop("DDP_LAUNCH_ADDRESS"), os.environ.pop("DDP_LAUNCH_SECRET")

    fill_standard_streams()
    become_subreaper()
    keeper = os.getpid()
    ours, theirs = _pipes()
    pid = os.fork()
    if pid == 0:
        die_with_parent(keeper)
        for fd in ours.values():
            os.close(fd)
        if number != 0:
            os.close(theirs["in"])
            theirs["in"] = os.open(os.devnull, os.O_RDONLY)
        for name, fd in (("in", 0), ("out", 1), ("err", 2)):
            os.dup2(theirs[name], fd)
            os.close(theirs[name])
        # `\r` counts as a line end here, so that progress bars show.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a file that Python itself opened
        os.environ.update(
            {KEEPER: str(keeper), REPORT: str(theirs["report"]), "RANK": str(number), "WORLD_SIZE": str(size)},
            LOCAL_RANK=str(local),
            LOCAL_WORLD_SIZE=str(local_size),
        )
        rank.run(unshield(args))
    for fd in theirs.values():
        os.close(fd)
    # A signal may come from the engine (it ends the job) or from the kernel (the engine has died).
    die_with_parent(engine, signal.SIGTERM)
    identity = {"rank": number, "size": size, "pid": pid, "keeper": keeper, "engine": engine, "name": _name(engine)}
    _Keeper(pid, ours, engine, identity).keep(address, secret)


def _pipes() -> tuple[dict[str, int], dict[str, int]]:
    """The keeper's and the rank's ends of the rank's standard streams and of its reports."""
    ours, theirs = {}, {}
    for name in ("out", "err", "report"):
        ours[name], theirs[name] = os.pipe()
    theirs["in"], ours["in"] = os.pipe()
    for fd in ours.values():
        os.set_blocking(fd, False)
    return ours, theirs


class _Keeper:
    """The state of one watch: what is still open, what has been learned, what must still be told."""

    def __init__(self, pid: int, pipes: dict[str, int], engine: int, identity: Message) -> None:
        self.pid = pid
        self.pipes = pipes
        self.engine = engine
        self.identity = identity
        self.report = b""
        self.joined = False  # others may wait for this rank
        self.stdin = b""
        self.status: int | None = None
        self.drain_deadline = float("inf")
        self.told = False
        self.released = False

    def keep(self, address: str, secret: str) -> NoReturn:
        """Watches the rank to its end, and ends like it."""
        self.wakeup, signals = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(signals, False)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: None)
        self._connect(address, secret)
        self._reap()  # a rank may have ended before SIGCHLD had a handler
        while not self.released:
            self._turn()
        self._leave()

    def _connect(self, address: str, secret: str) -> None:
        import socket

        from launcher.wire import Channel, WireError, nonce, proof, proves

        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + _HANDSHAKE_LIMIT
        try:
            channel = Channel(socket.create_connection((host, int(port)), timeout=_HANDSHAKE_LIMIT), trusted=True)
            challenge = nonce()
            channel.send({"challenge": challenge})
            messages: list[Message] = []
            while not any("answer" in message for message in messages):
                if not select.select([channel], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise WireError("no answer in time")
                news = channel.receive()
                if news is None:
                    raise WireError("closed during the handshake")
                for message in news:
                    if "challenge" in message:
                        answer = proof(secret, "keeper", str(message["challenge"]))
                        channel.send({"answer": answer, **self.identity})
                messages += news
            if not proves(next(m["answer"] for m in messages if "answer" in m), secret, "launcher", challenge):
                raise WireError("the other side does not know the secret of this job")
        except (OSError, WireError) as error:
            print(f"keeper of rank {self.identity['rank']}: no connection to the launcher: {error}", file=sys.stderr)
            self._end_at_once()
        self.channel = channel
        self._obey(messages)  # orders may have come with the answer

    def _turn(self) -> None:
        """Waits until something happens, and deals with it."""
        reading: list[int] = [self.wakeup, self.channel.fileno()]
        if self.channel.backlog < _BACKLOG:
            reading += [self.pipes[name] for name in ("out", "err") if name in self.pipes]
        if "report" in self.pipes:
            reading.append(self.pipes["report"])
        writing = [self.channel.fileno()] if self.channel.backlog else []
        if self.stdin and "in" in self.pipes:
            writing.append(self.pipes["in"])
        timeout = None if self.drain_deadline == float("inf") else max(0.0, self.drain_deadline - time.monotonic())
        readable, writable, _ = select.select(reading, writing, [], timeout)
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
        self._tell_end()

    def _carry(self, name: str) -> None:
        import json

        from launcher.wire import to_text

        data = os.read(self.pipes[name], _CHUNK)
        if not data:
            os.close(self.pipes.pop(name))
        elif name == "report":
            *lines, self.report = (self.report + data).split(b"\n")
            for line in lines:
                self._take_report(json.loads(line))
        else:
            self.channel.send({name: to_text(data)})

    def _take_report(self, message: Message) -> None:
        if "joined" in message or "left" in message:
            self.joined = "joined" in message
        else:
            self.channel.send(message)

    def _feed(self) -> None:
        """Passes stdin on; the launcher sends more when it hears that this has been taken."""
        try:
            self.stdin = self.stdin[os.write(self.pipes["in"], self.stdin[:_CHUNK]) :]
        except BrokenPipeError:
            os.close(self.pipes.pop("in"))
            self.stdin = b""
            return
        if not self.stdin:
            self.channel.send({"took": True})

    def _handle_signals(self, numbers: bytes) -> None:
        if os.getppid() != self.engine:
            self.channel.send({"lost": True})
            self._end_at_once()
        for number in numbers:
            if number != signal.SIGCHLD:
                self.channel.send({"asked": number})
                self._signal(number)
        self._reap()

    def _reap(self) -> None:
        """Buries whoever has ended: the rank, or orphans of its own that came to us."""
        self._bury(reap_all())

    def _signal(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)  # not reaped yet, so the pid is the rank's

    def _receive(self) -> list[Message] | None:
        from launcher.wire import WireError

        try:
            return self.channel.receive()
        except WireError as error:
            print(f"keeper: {error}", file=sys.stderr)
            return None

    def _obey(self, messages: list[Message] | None) -> None:
        from launcher.wire import to_bytes

        if messages is None:  # the launcher has gone
            self._end_at_once()
        for message in messages:
            if "signal" in message:
                self._signal(int(message["signal"]))
            if "kill" in message:
                self._bury(sweep(_SWEEP_LIMIT))
            if "stdin" in message and "in" in self.pipes:
                self.stdin += to_bytes(message["stdin"])
                if not message["stdin"]:
                    os.close(self.pipes.pop("in"))
            if "release" in message:
                self.released = True

    def _bury(self, ended: dict[int, int]) -> None:
        if self.pid in ended:
            self.status = ended[self.pid]
            # What the rank leaves behind would hold its pipes open, and the machine's memory.
            sweep(_SWEEP_LIMIT)
            self.drain_deadline = time.monotonic() + _DRAIN_LIMIT

    def _tell_end(self) -> None:
        """Reports the rank's end, once everything that it said has been sent before."""
        if self.status is None or self.told:
            return
        if time.monotonic() < self.drain_deadline and not self.pipes.keys().isdisjoint(("out", "err", "report")):
            return
        self.told = True
        self.drain_deadline = float("inf")
        for name in list(self.pipes):
            os.close(self.pipes.pop(name))
        self.channel.send({"end": os.waitstatus_to_exitcode(self.status), "deserted": self.joined})

    def _leave(self) -> NoReturn:
        """Ends as the rank did, for whoever watches the keeper."""
        assert self.status is not None
        code = os.waitstatus_to_exitcode(self.status)
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank's core is the one of interest
            if -code not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 128 - code)

    def _end_at_once(self) -> NoReturn:
        sweep(_SWEEP_LIMIT)
        os._exit(1)


def _name(pid: int) -> str:
    """The command name of a process, "" if it has gone."""
    try:
        with open(f"/proc/{pid}/comm") as comm:
            return comm.read().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
