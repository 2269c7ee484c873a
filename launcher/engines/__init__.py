"""Engines: what starts the ranks of a job. One file an engine; `engine.py` says what a new one needs.

MPICH's or Intel's hydra, Open MPI's prterun, Slurm's srun: each gives the ranks their places and starts agents, nothing
more. With a wrong engine each rank would believe that it is alone, so it is chosen with care: in an allocation srun,
if it and the MPI speak a common language; else the mpiexec beside this Python; else the one on PATH.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace

from launcher.engines import slurm
from launcher.engines.engine import REGISTRY, Engine, StartRequest
from launcher.engines.local import LocalEngine
from launcher.errors import UsageError
from launcher.job import Job
from launcher.network import fill_hosts

__all__ = ["Engine", "choose_engine", "ranks_per_host", "resolve_size"]

for _file in sorted(os.listdir(os.path.dirname(__file__))):
    if _file.endswith(".py") and not _file.startswith("_"):
        importlib.import_module(f"{__name__}.{_file[:-3]}")


def resolve_size(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with the number of its ranks: as asked for, else the sum of the hosts' slots, else as many as an
    allocation of Slurm has tasks, else 1. A job that can do without hosts, and names none, has those of
    the allocation.

    Raises: UsageError if there is no such engine, if there are more ranks than slots, or no hosts to do without.
    """
    known = ("auto", *sorted(REGISTRY))
    if job.engine not in known:
        raise UsageError(f"the engine should be one of {', '.join(known)}, not {job.engine!r}")
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
    """The engine for a job whose size is resolved.

    Raises: UsageError if there is none, not the one asked for, or one that does not fit the MPI of this Python.
    """
    from launcher import network  # here, because a world of one needs none of it

    named = tuple(host.name for host in job.hosts if not network.is_here(host.name))
    allocated = slurm.inside(environ) and not (job.hosts and not named)
    remote_hosts = named or (slurm.remote_hosts(environ) if allocated else ())
    if job.engine == "auto" and job.size == 1 and not remote_hosts:
        return LocalEngine(1)
    request = StartRequest(
        job=job,
        environ=environ,
        # Without hosts of its own, an engine in an allocation of several finds them itself.
        hosts=job.hosts if named else (),
        remote_hosts=remote_hosts,
        allocated=allocated,
        local_address=network.addresses(named)[0] if named else None,
    )
    if job.engine != "auto":
        engine = REGISTRY[job.engine].select(request)
        assert engine is not None
        return engine
    for kind in sorted(REGISTRY.values(), key=lambda each: each.priority):
        if (engine := kind.select(request)) is not None:
            return engine
    raise UsageError("no engine found that could start several ranks: pip install mpich")


def ranks_per_host(job: Job, engine: Engine) -> tuple[int, ...] | None:
    """How many ranks each host has, in the hosts' order; None if only the engine knows, and tells the ranks."""
    if not engine.fills_in_order or (engine.remote_hosts and not job.hosts):
        return None
    return tuple(slots for _, slots in fill_hosts(job.size, job.hosts)) or (job.size,)
