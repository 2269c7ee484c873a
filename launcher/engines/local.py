"""Engine for one host under MPICH: a fork of the reaper starts the agents, and is the PMI server of their ranks.

Unlike mpiexec it listens on no network: each rank inherits one end of a socket pair, on which MPICH speaks PMI-1.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from collectives.backends.mpi.pmi_server import KeyValueSpace
from launcher.engines.engine import Engine, StartRequest, register
from launcher.engines.mpiexec import MPICH, without_outer_mpi
from launcher.errors import UsageError
from launcher.linux import fork, reap_all, signal_pipe

_NAME = "ddp_pmi_server"  # of the process, too: no longer than the kernel's 15 characters
_CHUNK = 1 << 16
_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


@register("local")
@dataclass(frozen=True)
class LocalEngine(Engine):
    """Starts `n` ranks on this machine. A world of one needs no MPI: its agent takes the engine's place."""

    n: int
    name: str = _NAME
    remote_hosts: tuple[str, ...] = ()
    priority = 20

    def __post_init__(self) -> None:
        if self.n == 1:  # messages name what died
            object.__setattr__(self, "name", "the agent")

    @classmethod
    def select(cls, request: StartRequest) -> Engine | None:
        """As `Engine.select`."""
        if not request.remote_hosts:
            return cls(request.job.size) if request.mpiexec[1] == MPICH else None
        if request.job.engine == "local":
            raise UsageError(f"--engine local starts ranks on this machine alone, not on {request.remote_hosts[0]}")
        return None

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """The command of each rank."""
        return list(rank)

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        """As `Engine.environment`."""
        size = {} if self.n == 1 else {"PMI_SIZE": str(self.n), "MPI_LOCALNRANKS": str(self.n)}
        return without_outer_mpi(environ) | size

    def start(self, rank: Sequence[str], environ: Mapping[str, str]) -> int:
        """As `Engine.start`."""
        return super().start(rank, environ) if self.n == 1 else _serve(self.n, rank, environ)


def _serve(n: int, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Starts the agents and answers their ranks until all agents have ended; 1 if one of them has failed, else 0."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:  # a sandbox may refuse it
        comm.write(_NAME)
    signals = signal_pipe((signal.SIGCHLD, *_PASSED_ON))
    # By the mapping, ranks know that they share a node, and speak through shared memory.
    space = KeyValueSpace(n, {"PMI_process_mapping": f"(vector,(0,1,{n}))"})
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    agents: set[int] = set()
    clients: dict[int, _Client] = {}
    for rank in range(n):
        ours, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        pmi = {"PMI_RANK": str(rank), "PMI_FD": str(theirs.fileno()), "MPI_LOCALRANKID": str(rank)}
        # A session each, as under mpiexec: Linux shares a busy machine's cores between sessions, not processes.
        agents.add(fork(partial(os.posix_spawn, command[0], [*command], {**environ, **pmi}, setsid=True)))
        theirs.close()
        clients[ours.fileno()] = _Client(ours)
        poll.register(ours, select.POLLIN)
    failed = False
    while agents:
        for fd, _ in poll.poll():
            if fd == signals:
                for number in set(os.read(signals, _CHUNK)) & _PASSED_ON:
                    for pid in agents:  # not reaped yet, so the pid is the agent's
                        os.kill(pid, number)
                ended = reap_all()
                agents -= ended.keys()
                failed |= any(ended.values())
            elif not clients[fd].receive(space):
                poll.unregister(fd)
                clients.pop(fd).socket.close()
    return int(failed)


class _Client:
    """The connection of one rank's MPI."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._read = b""

    def receive(self, space: KeyValueSpace) -> bool:
        """Answers what the rank has asked; False once it has closed the connection."""
        try:
            data = self.socket.recv(_CHUNK)
        except OSError:
            return False
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            space.answer(line.decode(errors="replace"), self._send)
        return bool(data)

    def _send(self, line: str) -> None:
        # If the rank has ended, SIGPIPE would kill this process, which does not ignore it.
        with contextlib.suppress(OSError):
            self.socket.sendall(line.encode() + b"\n", socket.MSG_NOSIGNAL)
