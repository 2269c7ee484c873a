"""Base class and registry of engines, which start the ranks of a job.

A new engine is one file in this folder: a subclass of `Engine` with `@register("its-name")`. Then `--engine its-name`
selects it. `--engine auto` calls `select` of the engines in the order of their `priority`, until one returns an engine.
An engine that uses `StartRequest.mpiexec` also needs a row in `launcher.engines.mpiexec._CANDIDATES`.
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
    """A job, and what the choice of its engine depends on.

    hosts: the hosts of the job; empty if it names no hosts, or only this machine
    remote_hosts: hosts other than this one
    allocated: whether this process runs in a Slurm allocation; False if the job names this machine only
    local_address: the address by which remote hosts reach this one; None if the job names no remote hosts
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

        Raises: UsageError if there is none, or one cannot be run; if it belongs to another MPI than the one that the
            ranks load; or if all ranks run on this machine, which has too little shared memory for MPICH.
        """
        program, family = mpiexec.find_mpiexec_for(self.job.engine, self.environ)
        mpiexec.check_library(program, family, self.environ)
        shares_memory = self.job.size > 1 and not self.remote_hosts and self.job.backend != "single"
        if family == mpiexec.MPICH and shares_memory and (reason_and_fix := missing_shm(self.job.size)):
            raise UsageError(": ".join(reason_and_fix))
        return program, family


class Engine(ABC):
    """Starts the ranks of a job.

    name: as messages call it: "mpiexec", "srun"
    remote_hosts: names of the hosts other than this one on which it may start ranks
    """

    #: `--engine auto` tries engines with lower numbers first.
    priority: ClassVar[int] = 50
    #: The variable in which the user names a program to use instead of ssh; "": there is no such variable.
    shell_variable: ClassVar[str] = ""
    #: Whether it fills hosts in their order, so that the launcher knows how many ranks each host has.
    fills_in_order: ClassVar[bool] = True

    name: str
    remote_hosts: tuple[str, ...]

    @classmethod
    @abstractmethod
    def select(cls, request: StartRequest) -> Engine | None:
        """The engine for a job; None if it cannot start this job.

        Raises: UsageError if the engine was asked for by name (`request.job.engine`) and cannot start the job; what
            `request.mpiexec` raises, if the engine uses an mpiexec.
        """

    @abstractmethod
    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """The engine's command, which starts one agent per rank. rank: an agent's command; environ: its environment"""

    def start(self, rank: Sequence[str], environ: Mapping[str, str]) -> int:
        """Runs the engine in this process, a child of the reaper: replaces the process, or returns the exit code."""
        command = self.command(rank, environ)
        os.execve(command[0], command, environ)

    @abstractmethod
    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        """The environment for the engine and all ranks, made from `environ`. scratch: a folder for the job's files"""


@dataclass(frozen=True)
class MpiexecEngine(Engine):
    """Starts `n` ranks by an mpiexec.

    mpiexec: its path
    hosts: where to start ranks; empty: on this machine, or on the hosts of the allocation
    remote_hosts: hosts other than this one
    """

    mpiexec: str
    n: int
    hosts: tuple[Host, ...] = ()
    remote_hosts: tuple[str, ...] = ()
    name: str = "mpiexec"


REGISTRY: dict[str, type[Engine]] = {}
E = TypeVar("E", bound="type[Engine]")


def register(name: str) -> Callable[[E], E]:
    """Class decorator that registers an engine under a name for `--engine`."""

    def add(cls: E) -> E:
        REGISTRY[name] = cls
        return cls

    return add
