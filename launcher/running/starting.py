"""What an engine is told to start, once for every rank: a keeper, and what this one and its rank must know.

Apart from `launcher.running.attempt`, which starts it, because `--dry-run` only shows it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from collectives.world import ATTEMPT, BACKEND, DEBUG_RANK, TRACE
from launcher import engines, seat
from launcher.engines import Engine
from launcher.job import Job
from launcher.shield import shield
from launcher.wire import ADDRESS, LAUNCHER, SECRET

_KEEPER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "keeper.py")


def keeper(job: Job) -> list[str]:
    """The command that starts a keeper and its rank."""
    return [sys.executable, _KEEPER, *shield(job.target)]


def keepers_environment(job: Job, engine: Engine, address: str, secret: str) -> dict[str, str]:
    """What a keeper finds in its environment. address: where the launcher listens"""
    # Only NCCL cannot share a GPU, and where another backend was asked for it is out of the question.
    share = job.share_gpu or job.backend in ("mpi", "single")
    rules = seat.rules(bind=job.bind, share=share, nodes=engines.filled(job, engine), files=job.log_dir is not None)
    return {ADDRESS: address, SECRET: secret, LAUNCHER: str(os.getpid()), seat.SEAT: rules}


def ranks_environment(job: Job, attempt: int) -> dict[str, str]:
    """What a rank finds in its environment, of the job's options and of the start that this is (0 first)."""
    found = {ATTEMPT: str(attempt), DEBUG_RANK: str(job.debug_rank)}
    if job.backend != "auto":
        found[BACKEND] = job.backend
    if job.trace is not None:
        found[TRACE] = os.path.abspath(job.trace)
    return found


def threads(job: Job, engine: Engine, environ: Mapping[str, str], cores: int) -> str | None:
    """What the user should know of the threads that ranks may use; None if he has chosen, or there is nothing to share.

    cores: of this machine
    """
    if seat.THREADS in environ or job.size == 1:
        return None
    if engines.filled(job, engine) != (job.size,):
        return f"{seat.THREADS} is the number of each host's cores / ranks, unless you set it"
    return f"{seat.THREADS} is {max(1, cores // job.size)} ({cores} cores / {job.size} ranks), unless you set it"
