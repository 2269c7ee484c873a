"""Engines: what starts the ranks of a job. One file per engine; `engine.py` says what a new one needs.

An engine gives the ranks their numbers and hosts, starts the agents, and lets the ranks' MPI connect them. The engines
are our own PMI server for MPICH on one host (`local`), MPICH's or Intel's hydra, Open MPI's mpiexec, and Slurm's srun.
If the engine did not fit the MPI that ranks load, each rank would form a world of its own. So the MPI decides which
engine starts several ranks. In an allocation it is srun, if srun and the MPI speak the same protocol. Otherwise it is
the engine for the first mpiexec that is found: in this Python's folder, then on PATH. `local` starts a single rank on
this machine, which needs no MPI.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace

from launcher import network
from launcher.engines import slurm
from launcher.engines.engine import REGISTRY, Engine, StartRequest
from launcher.engines.local import LocalEngine
from launcher.errors import UsageError, plural
from launcher.job import Job

__all__ = ["Engine", "choose_engine", "ranks_per_host", "resolve_size"]

for _file in sorted(os.listdir(os.path.dirname(__file__))):
    if _file.endswith(".py") and not _file.startswith("_"):
        importlib.import_module(f"{__name__}.{_file[:-3]}")


def resolve_size(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with its number of ranks.

    If it has `min_ranks` and names no hosts, it also gets the hosts of the allocation, if these are several. The number
    is `job.n`, else the sum of the hosts' slots, else Slurm's number of tasks if srun may be chosen, else 1.

    Raises: UsageError if there is no such engine, if there are more ranks than slots or tasks, or if `min_ranks` is
        given and no hosts are known; what `slurm.hosts` raises.
    """
    engine_names = ("auto", *sorted(REGISTRY))
    if job.engine not in engine_names:
        raise UsageError(f"the engine should be one of {', '.join(engine_names)}, not {job.engine!r}")
    hosts = job.hosts
    slots = None
    if hosts:
        slots = sum(host.slots for host in hosts)
        capacity = f"the hosts have {plural(slots, 'slot')}"
    elif job.engine in ("auto", "slurm"):
        slots = slurm.tasks(environ)
        capacity = f"the allocation has {plural(slots or 0, 'task')}"
        if job.min_ranks is not None:
            hosts = slurm.hosts(environ)
    n = job.n or slots or 1
    if slots is not None and n > slots:
        raise UsageError(f"{n} ranks were asked for, and {capacity}")
    if job.min_ranks is not None and not hosts:
        raise UsageError("the smallest number of ranks (min_ranks) needs hosts to do without")
    if len(hosts) == 1:
        hosts = job.hosts  # Without its only host the job cannot continue.
    return replace(job, n=n, hosts=hosts)


def choose_engine(job: Job, environ: Mapping[str, str]) -> Engine:
    """The engine for a job. job: as `resolve_size` returned it

    Raises: UsageError if no engine is found, if the requested engine cannot be used, if the mpiexec does not fit this
        Python's MPI, or if the names of the allocation's nodes cannot be found.
    """
    named = tuple(host.name for host in job.hosts if not network.is_here(host.name))
    allocated = slurm.inside(environ) and not (job.hosts and not named)
    remote_hosts = named or (slurm.remote_hosts(environ) if allocated else ())
    if job.engine == "auto" and job.size == 1 and not remote_hosts:
        return LocalEngine(1)
    request = StartRequest(
        job=job,
        environ=environ,
        # If the user has named no hosts, an engine finds the hosts of an allocation itself.
        hosts=job.hosts if named else (),
        remote_hosts=remote_hosts,
        allocated=allocated,
        local_address=network.addresses(named)[0] if named else None,
    )
    if job.engine != "auto":
        engine = REGISTRY[job.engine].select(request)
        assert engine is not None
        return engine
    for cls in sorted(REGISTRY.values(), key=lambda cls: cls.priority):
        if (engine := cls.select(request)) is not None:
            return engine
    raise UsageError("no engine found that could start several ranks: pip install mpich")


def ranks_per_host(job: Job, engine: Engine) -> tuple[int, ...] | None:
    """The number of ranks on each host, in the hosts' order; None if only the engine knows them."""
    if not engine.fills_in_order or (engine.remote_hosts and not job.hosts):
        return None
    return tuple(slots for _, slots in network.fill_hosts(job.size, job.hosts)) or (job.size,)
