"""Engine for MPICH on one host: a child of the reaper starts the agents, and is the PMI server of their ranks.

Unlike mpiexec it does not listen on a network: each rank inherits one end of a socket pair, and its MPICH speaks PMI-1
on it.
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
from launcher.linux import FORWARDED_SIGNALS, fork, reap_all, signal_pipe

# Name of the engine and of its process, for which the kernel keeps only 15 characters.
_NAME = "ddp_pmi_server"
_CHUNK = 1 << 16


@register("local")
@dataclass(frozen=True)
class LocalEngine(Engine):
    """Starts `n` ranks on this machine. A world of one needs no MPI: its agent replaces the engine's process."""

    n: int
    name: str = _NAME
    remote_hosts: tuple[str, ...] = ()
    priority = 20

    def __post_init__(self) -> None:
        if self.n == 1:
            object.__setattr__(self, "name", "the agent")  # If that process dies, messages must name the agent.

    @classmethod
    def select(cls, request: StartRequest) -> Engine | None:
        if not request.remote_hosts:
            return cls(request.job.size) if request.mpiexec[1] == MPICH else None
        if request.job.engine == "local":
            raise UsageError(f"--engine local starts ranks on this machine alone, not on {request.remote_hosts[0]}")
        return None

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        return list(rank)

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        size = {} if self.n == 1 else {"PMI_SIZE": str(self.n), "MPI_LOCALNRANKS": str(self.n)}
        return without_outer_mpi(environ) | size

    def start(self, rank: Sequence[str], environ: Mapping[str, str]) -> int:
        return super().start(rank, environ) if self.n == 1 else _serve(self.n, rank, environ)


def _serve(n: int, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Starts the agents, and serves their ranks until all agents have ended. Returns: 1 if an agent failed, else 0"""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:  # A sandbox may refuse it.
        comm.write(_NAME)
    signals = signal_pipe((signal.SIGCHLD, *FORWARDED_SIGNALS))
    # The mapping tells ranks that they share a node, so that MPICH uses shared memory.
    space = KeyValueSpace(n, {"PMI_process_mapping": f"(vector,(0,1,{n}))"})
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    agents: set[int] = set()
    clients: dict[int, _Client] = {}
    for rank in range(n):
        server_end, rank_end = socket.socketpair()
        rank_end.set_inheritable(True)
        pmi = {"PMI_RANK": str(rank), "PMI_FD": str(rank_end.fileno()), "MPI_LOCALRANKID": str(rank)}
        # One session per agent, as under mpiexec: Linux's autogroup divides a busy machine's cores among sessions, not
        # among processes.
        agents.add(fork(partial(os.posix_spawn, command[0], [*command], {**environ, **pmi}, setsid=True)))
        rank_end.close()
        clients[server_end.fileno()] = _Client(server_end)
        poll.register(server_end, select.POLLIN)
    failed = False
    while agents:
        for fd, _ in poll.poll():
            if fd == signals:
                for number in set(os.read(signals, _CHUNK)).intersection(FORWARDED_SIGNALS):
                    for pid in agents:  # They have not been reaped yet, so the pids are still theirs.
                        os.kill(pid, number)
                statuses = reap_all()
                agents -= statuses.keys()
                failed |= any(statuses.values())
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
        """Answers the requests that have come. Returns: False once the rank has closed the connection"""
        try:
            data = self.socket.recv(_CHUNK)
        except OSError:
            return False
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            space.answer(line.decode(errors="replace"), self._send)
        return bool(data)

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # The rank has ended.
            self.socket.sendall(line.encode() + b"\n", socket.MSG_NOSIGNAL)  # SIGPIPE would kill this process.
