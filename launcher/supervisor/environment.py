"""Environment of agents and ranks, memory for their state, and the command that the engine starts once for every rank.

MASTER_ADDR and MASTER_PORT are for other libraries, such as PyTorch. Another program may take the port before rank 0
listens on it. Unless the user has set MASTER_PORT, every restart chooses a new one.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Mapping

from collectives.errors import ROOT
from collectives.world import AGENT, ATTEMPT, BACKEND, DEBUG_RANK, STATE_HELD, STATE_MEMORY, STATE_MEMORY_NAME, TRACE
from launcher import engines, network, placement
from launcher.agent.rank import quote_colons
from launcher.engines import Engine, slurm
from launcher.job import Job
from launcher.protocol import ADDRESS, LAUNCHER_HOST, LAUNCHER_PID, SECRET
from launcher.supervisor.rank_table import RankTable
from launcher.supervisor.reaper import Reaper

# Open files of the launcher per rank: two slots of the state memory, the connection of its agent, and one in reserve.
_FILES_PER_RANK = 4
_AGENT_MAIN = os.path.join(ROOT, "launcher", "agent", "main.py")


def agent_command(job: Job) -> list[str]:
    """The command that starts an agent and its rank."""
    return [sys.executable, _AGENT_MAIN, *quote_colons(job.target)]


def agents_environment(job: Job, engine: Engine, address: str, secret: str) -> dict[str, str]:
    """The variables for agents. Each agent removes them before it starts its rank.

    address, secret: of the launcher's `Listener`
    """
    # These backends work for ranks that share a GPU. NCCL before 2.30 refuses such ranks.
    share_gpu = job.share_gpu or job.backend in ("mpi", "single")
    rules = placement.rules(bind=job.bind, share_gpu=share_gpu, nodes=engines.ranks_per_host(job, engine))
    return {
        ADDRESS: address,
        SECRET: secret,
        LAUNCHER_HOST: os.uname().nodename,
        LAUNCHER_PID: str(os.getpid()),
        placement.PLACEMENT: rules,
    }


class StateMemory:
    """Memory in which the ranks store their state for the next start of the job: two slots per rank.

    The launcher holds the memory, because nothing else on this machine lives longer than one start. A rank that cannot
    open the launcher's memory, such as a rank on another host, stores its state in memory that its agent holds. These
    agents stay until the ranks of a later start have copied their own state, or `copy_limit` has passed. The memory has
    no name in a file system, so that it is freed when launcher, agents and ranks have ended, however they end.

    ranks: number of ranks; 0: there is no memory
    held: number of the newest start whose ranks have all copied their state; -1: none
    """

    #: Time limit (s) for keeping agents, from the moment when all ranks of the next start have begun their loop. It
    #: holds even if these ranks have not copied their own state by then.
    copy_limit = 600.0

    def __init__(self, ranks: int) -> None:
        self.held = -1
        self._token = os.urandom(16).hex()
        self._fds: list[int] = []
        # The agents that are kept, all of one start: their connections, and their reaper.
        self._kept: tuple[RankTable, Reaper] | None = None
        self._ending: list[Reaper] = []  # Reapers that are killing agents that are not needed any more.
        if not self.grow(ranks):
            self.close()

    @property
    def variable(self) -> str:
        """The value of `collectives.world.STATE_MEMORY` for the ranks.

        "" if there are no slots: the job has no restarts, or the system grants no memory or too few open files.
        """
        if not self._fds:
            return ""
        slots = [f"{os.getpid()}/fd/{fd}" for fd in self._fds]
        if self._kept is not None:
            slots += self._kept[0].slots()
        return " ".join([self._token, *slots])

    def keep(self, ranks: RankTable, reaper: Reaper) -> None:
        """Keeps the agents of a start that has ended. `complete` has released the agents of earlier starts."""
        self._kept = ranks, reaper

    def complete(self, start: int) -> None:
        """Called when all ranks of this start have copied their state: the state of earlier starts is obsolete."""
        self.held = start
        self.release()

    def release(self) -> None:
        """Ends the agents that were kept for their memory. Does not wait for their end."""
        if self._kept is not None:
            ranks, reaper = self._kept
            ranks.close()
            reaper.end()
            while self._ending:  # Reapers of earlier starts have ended by now.
                self._ending.pop().close()
            self._ending.append(reaper)
            self._kept = None

    def grow(self, ranks: int) -> bool:
        """Makes slots for this many ranks, if there are fewer. Returns: False if the system does not grant them"""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if 0 <= files < _FILES_PER_RANK * ranks:
            return False
        try:
            while len(self._fds) < 2 * ranks:
                self._fds.append(os.memfd_create(f"{STATE_MEMORY_NAME}-{self._token}"))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Ends the agents that were kept, and closes the memory. It is freed once no rank has it open or mapped."""
        self.release()
        for reaper in self._ending:
            reaper.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def ranks_environment(job: Job, attempt: int, memory: StateMemory) -> dict[str, str]:
    """The variables that tell ranks the job's options and where to store their state.

    attempt: number of the start, 0 for the first
    """
    variables = {ATTEMPT: str(attempt), DEBUG_RANK: str(job.debug_rank)}
    variables |= {STATE_MEMORY: memory.variable, STATE_HELD: str(memory.held)}
    if job.backend != "auto":
        variables[BACKEND] = job.backend
    if job.trace is not None:
        variables[TRACE] = os.path.abspath(job.trace)
    return variables


def master_address(environ: Mapping[str, str], host: str, port: object) -> dict[str, str]:
    """Variables to add to `environ` that say where rank 0 is. Leaves out those that the user has set in `environ`.

    >>> master_address({"MASTER_PORT": "29500"}, "127.0.0.1", 20417)
    {'MASTER_ADDR': '127.0.0.1'}
    """
    # In a rank of another job, these variables belong to that job, whose rank 0 uses the port. So they are replaced.
    user_variables = () if AGENT in environ else environ
    variables = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return {name: value for name, value in variables.items() if name not in user_variables}


def host_of_rank_0(job: Job, engine: Engine, environ: Mapping[str, str]) -> str:
    """The name or address at which the ranks reach rank 0, which is on the first host."""
    if not engine.remote_hosts:
        return "127.0.0.1"
    first = job.hosts[0].name if job.hosts else slurm.nodes(environ)[0]
    if first in engine.remote_hosts or not job.hosts:
        return first
    return network.addresses(engine.remote_hosts)[0]


def free_port() -> int:
    """A TCP port that is free on this machine at this moment."""
    with socket.create_server(("", 0)) as any_port:
        return int(any_port.getsockname()[1])
