"""Base class and registry of engines: what starts the ranks of a job.

A new engine is one file in this folder: a subclass of `Engine` with `@register("its-name")`. From then on
`--engine its-name` asks for it, and `--engine auto` asks its `select` in the order of `priority`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

from launcher.engines import mpiexec
from launcher.errors import UsageError
from launcher.job import Job
from launcher.linux import missing_shm
from launcher.network import Host


@dataclass(frozen=True, kw_only=True)
class StartRequest:
    """A job that an engine is wanted for.

    hosts: those that were named, if they are not only this machine; remote_hosts: hosts besides this one
    allocated: inside an allocation of a cluster's scheduler; local_address: how remote hosts reach this one
    """

    job: Job
    environ: Mapping[str, str]
    hosts: tuple[Host, ...] = ()
    remote_hosts: tuple[str, ...] = ()
    allocated: bool = False
    local_address: str | None = None

    @cached_property
    def mpiexec(self) -> tuple[str, str]:
        """Path and family of the mpiexec to use.

        Raises: UsageError if there is none, or one of another MPI, or if MPICH would lack shared memory on this
            machine, where the whole job runs.
        """
        program, family = mpiexec.find_mpiexec_for(self.job.engine, self.environ)
        mpiexec.check_library(program, family, self.environ)
        shares = self.job.size > 1 and not self.remote_hosts and self.job.backend != "single"
        if family == mpiexec.MPICH and shares and (missing := missing_shm(self.job.size)):
            raise UsageError(": ".join(missing))
        return program, family


class Engine(ABC):
    """Starts the ranks of a job.

    name: what messages call it: "mpiexec", "srun"
    remote_hosts: names of the hosts besides this one on which it may start ranks
    """

    #: Engines of a lower number are asked first by `--engine auto`.
    priority: ClassVar[int] = 50
    #: Whether hosts are filled in order, so that the launcher knows how many ranks each has.
    fills_in_order: ClassVar[bool] = True

    name: str
    remote_hosts: tuple[str, ...]

    @classmethod
    @abstractmethod
    def select(cls, request: StartRequest) -> Engine | None:
        """The engine for a job; None if another one should start it.

        Raises: UsageError if it was asked for by name (`request.job.engine`) and cannot start the job.
        """

    @abstractmethod
    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """The command that starts the command `rank` once for every rank, each with the environment `environ`."""

    def start(self, rank: Sequence[str], environ: Mapping[str, str]) -> int:
        """Runs the engine in this process, a fork of the reaper; returns its exit code if no program replaces it."""
        command = self.command(rank, environ)
        os.execve(command[0], command, environ)

    @abstractmethod
    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        """The environment for all that, from that of the ranks. scratch: a folder of this job alone, for its files"""


@dataclass(frozen=True)
class MpiexecEngine(Engine):
    """`mpiexec` of path `mpiexec`, for `n` ranks.

    hosts: where to start them; none: on this machine, or where an allocation says
    remote_hosts: hosts besides this one
    """

    mpiexec: str
    n: int
    hosts: tuple[Host, ...] = ()
    remote_hosts: tuple[str, ...] = ()
    name: str = "mpiexec"


REGISTRY: dict[str, type[Engine]] = {}
E = TypeVar("E", bound="type[Engine]")


def register(name: str) -> Callable[[E], E]:
    """Makes an engine known under the name that `--engine` takes."""

    def add(cls: E) -> E:
        REGISTRY[name] = cls
        return cls

    return add
