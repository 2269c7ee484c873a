"""Who starts the ranks: an engine that exists, never a home-made one, behind one small protocol.

MPICH's or Intel's hydra, Open MPI's prterun, Slurm's srun: each gives the ranks their places and starts agents,
nothing more. A wrong engine is worse than none (each of its ranks would believe that it is alone), so it is chosen with
care: inside an allocation srun, if it and the MPI speak a common language; else the mpiexec beside this Python; else
that on PATH.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from launcher.engines import mpiexec, slurm
from launcher.engines.mpiexec import INTEL, MPICH, OPENMPI
from launcher.errors import UsageError
from launcher.job import Job
from launcher.network import fill_hosts

__all__ = ["Engine", "choose_engine", "ranks_per_host", "resolve_size"]


class Engine(Protocol):
    """Starts the ranks of a job."""

    @property
    def name(self) -> str:
        """What messages call it: "mpiexec", "srun"."""

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Names of the hosts besides this one on which it may start ranks."""

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """The command that starts the command `rank` once for every rank, each with the environment `environ`."""

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        """The environment for all that, from that of the ranks. scratch: a folder of this job alone, for its files"""


def resolve_size(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with the number of its ranks: as asked for, else the sum of the hosts' slots, else as many as an
    allocation of Slurm has tasks, else 1. A job that can do without hosts, and names none, has those of
    the allocation.

    Raises: UsageError if there are more ranks than slots, or no hosts to do without.
    """
    hosts = job.hosts
    slots, what, where = None, "slot", "the hosts have"
    if hosts:
        slots = sum(host.slots for host in hosts)
    elif job.engine in ("auto", "slurm"):
        slots, what, where = slurm.tasks(environ), "task", "the allocation has"
        if job.min_ranks is not None:
            hosts = slurm.hosts(environ)
    n = job.n or slots or 1
    if slots is not None and n > slots:
        raise UsageError(f"{n} ranks were asked for, and {where} {slots} {what}{'' if slots == 1 else 's'}")
    if job.min_ranks is not None and not hosts:
        raise UsageError("the smallest number of ranks (min_ranks) needs hosts to do without")
    if len(hosts) == 1:
        hosts = job.hosts  # a single one cannot be done without
    return job if (job.n, job.hosts) == (n, hosts) else replace(job, n=n, hosts=hosts)


def choose_engine(job: Job, environ: Mapping[str, str]) -> Engine:
    """The engine for a settled job.

    Raises: UsageError if there is none, not the one asked for, or one that does not fit the MPI of this Python.
    """
    from launcher import network  # here and below, because a world of one needs none of it

    elsewhere = tuple(host.name for host in job.hosts if not network.is_here(host.name))
    allocated = slurm.inside(environ) and not (job.hosts and not elsewhere)
    away = elsewhere or (slurm.elsewhere(environ) if allocated else ())
    if job.engine == "auto" and job.size == 1 and not away:
        return SingleEngine()
    if job.engine == "slurm" or (job.engine == "auto" and allocated):
        srun = slurm.find(environ)
        if srun is None and job.engine == "slurm":
            raise UsageError("--engine slurm: there is no srun on PATH")
        if srun is not None:
            family = mpiexec.family_of_this_python(environ)
            kind = slurm.language(family, srun)
            if kind is not None:
                return slurm.SlurmEngine(srun, kind, job.size, job.hosts, away, environ.get("SLURM_CPUS_PER_TASK"))
            if job.engine == "slurm":
                raise UsageError(f"--engine slurm: {slurm.silence(family, srun)}")
    program, family = mpiexec.find_mpiexec_for(job.engine, environ)
    mpiexec.check_library(program, family, environ)
    # Without hosts of its own, an engine in an allocation of several finds them itself.
    hosts = job.hosts if elsewhere else ()
    here = network.addresses(elsewhere)[0] if elsewhere else None
    if family == OPENMPI:
        from launcher.engines.openmpi import OpenMpiEngine

        return OpenMpiEngine(program, job.size, hosts, away)
    from launcher.engines.mpich import MpichEngine

    assert family in (MPICH, INTEL)
    return MpichEngine(program, job.size, hosts, away, intel=family == INTEL, here=here)


def ranks_per_host(job: Job, engine: Engine) -> tuple[int, ...] | None:
    """How many ranks each host of a settled job has, in their order; None if the engine alone knows, and tells them."""
    if engine.name == "srun" or (engine.elsewhere and not job.hosts):
        return None
    return tuple(slots for _, slots in fill_hosts(job.size, job.hosts)) or (job.size,)


class SingleEngine:
    """A world of one needs no engine: its agent is started directly."""

    name = "the agent"
    elsewhere: tuple[str, ...] = ()

    def command(self, rank: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """As `Engine.command`."""
        return list(rank)

    def environment(self, environ: Mapping[str, str], scratch: str) -> dict[str, str]:
        """As `Engine.environment`."""
        return mpiexec.without_outer_mpi(environ)
