"""Environment of agents and ranks, and the command that the engine starts once for every rank.

MASTER_ADDR and MASTER_PORT are for other libraries, PyTorch's among them. Whether the port stays free is not certain:
it was a moment ago, and a restart has another one.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Mapping

from collectives.world import AGENT, ATTEMPT, BACKEND, DEBUG_RANK, STATE_MEMORY, STATE_MEMORY_NAME, TRACE
from launcher import engines, placement
from launcher.agent.rank import quote_colons
from launcher.engines import Engine, slurm
from launcher.job import Job
from launcher.protocol import ADDRESS, LAUNCHER_PID, SECRET

# Two of them are slots; agents need the rest.
_FILES_PER_RANK = 4
_AGENT_MAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "agent", "main.py")


def agent(job: Job) -> list[str]:
    """The command that starts an agent and its rank."""
    return [sys.executable, _AGENT_MAIN, *quote_colons(job.target)]


def agents_environment(job: Job, engine: Engine, address: str, secret: str) -> dict[str, str]:
    """What an agent finds in its environment. address: where the launcher listens"""
    # Only NCCL cannot share a GPU, and where another backend was asked for it is out of the question.
    share = job.share_gpu or job.backend in ("mpi", "single")
    rules = placement.rules(bind=job.bind, share=share, nodes=engines.ranks_per_host(job, engine))
    found = {ADDRESS: address, SECRET: secret, LAUNCHER_PID: str(os.getpid()), placement.PLACEMENT: rules}
    if engine.remote_hosts:
        found[STATE_MEMORY] = ""  # ranks there could not reach it
    return found


class StateMemory:
    """Memory in which the ranks on this machine leave their state to those of the next start: two slots for each.

    The launcher holds it, because nothing else outlives a start. It has no name in a file system, so that it is freed
    when the launcher and the ranks have ended, however they end.

    variable: what ranks find in their environment, "" where the system grants no such memory, or too few open files
    """

    def __init__(self, ranks: int) -> None:
        self._token = os.urandom(16).hex()
        self._fds: list[int] = []
        self.variable = ""
        if not self.grow(ranks):
            self.close()

    def grow(self, ranks: int) -> bool:
        """Makes slots for so many ranks, if there are fewer; False if the system does not grant them."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if 0 <= files < _FILES_PER_RANK * ranks:
            return False
        try:
            while len(self._fds) < 2 * ranks:
                self._fds.append(os.memfd_create(f"{STATE_MEMORY_NAME}-{self._token}"))
        except OSError:
            return False
        if self._fds:
            self.variable = " ".join(map(str, (self._token, os.getpid(), *self._fds)))
        return True

    def close(self) -> None:
        """Frees it, as soon as no rank has it mapped any more."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def ranks_environment(job: Job, attempt: int, state_memory: str) -> dict[str, str]:
    """What a rank finds in its environment, of the job's options and of the start that this is (0 first)."""
    found = {ATTEMPT: str(attempt), DEBUG_RANK: str(job.debug_rank), STATE_MEMORY: state_memory}
    if job.backend != "auto":
        found[BACKEND] = job.backend
    if job.trace is not None:
        found[TRACE] = os.path.abspath(job.trace)
    return found


def meeting(environ: Mapping[str, str], host: str, port: object) -> dict[str, str]:
    """What ranks find in their environment besides `environ`: where rank 0 is; the user's own values stay.

    >>> meeting({"MASTER_PORT": "29500"}, "127.0.0.1", 20417)
    {'MASTER_ADDR': '127.0.0.1'}
    """
    # In a rank of another job they are that one's, and its rank 0 listens there.
    own = () if AGENT in environ else environ
    return {name: str(value) for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if name not in own}


def host_of_rank_0(job: Job, engine: Engine, environ: Mapping[str, str]) -> str:
    """By which name or address the ranks of a settled job reach its rank 0: hosts are filled in order."""
    if not engine.remote_hosts:
        return "127.0.0.1"
    first = job.hosts[0].name if job.hosts else slurm.nodes(environ)[0]
    if first in engine.remote_hosts or not job.hosts:
        return first
    from launcher import network  # here, because a job on one machine needs none of it

    return network.addresses(engine.remote_hosts)[0]


def free_port() -> int:
    """A port that is free on this machine."""
    with socket.create_server(("", 0)) as any_port:
        return int(any_port.getsockname()[1])
