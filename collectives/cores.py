"""How many cores a rank has for itself, and what follows: threads of BLAS, and a word where an engine gave it too few.

ddp-launch sets OMP_NUM_THREADS before NumPy is loaded. Under a bare mpiexec or srun nobody does: each rank's BLAS would
start a thread for every core of the machine, and Open MPI's default would put all of these on one core.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_log = logging.getLogger("collectives")

#: Whoever sets one of these has decided.
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "GOTO_NUM_THREADS")
_UNBOUND = {
    "mpich": "mpiexec -bind-to none",
    "openmpi": "mpiexec --bind-to none",
    "slurm": "srun --cpus-per-task, or --cpu-bind=none",
}


class Cores(NamedTuple):
    """mine: the cores that a rank may run on; starters: how many the process may that started it"""

    mine: frozenset[int]
    starters: int


def cores_here(environ: Mapping[str, str] = os.environ) -> Cores:
    """This rank's. The starter is the engine's process on this node, which binds its ranks, but not itself."""
    mine = frozenset(os.sched_getaffinity(0))
    try:
        starters = len(os.sched_getaffinity(os.getppid()))
    except OSError:  # it runs as somebody else, or in another namespace
        starters = len(mine)
    allocated = environ.get("SLURM_CPUS_ON_NODE", "")
    if allocated.isdigit():  # slurmstepd stands outside the allocation
        starters = min(starters, int(allocated))
    return Cores(mine, max(starters, len(mine)))


def share(node: Sequence[Cores], local_rank: int) -> int:
    """The cores that are a rank's own, at least 1: each core is split among the ranks that may run on it.

    >>> both = Cores(frozenset(range(8)), 8)
    >>> share([both, both], 0), share([Cores(frozenset({0, 1}), 8), Cores(frozenset({2}), 8)], 0)
    (4, 2)
    """
    own = sum(1 / sum(core in other.mine for other in node) for core in node[local_rank].mine)
    return max(1, int(own + 1e-6))  # three thirds are one


def too_narrow(node: Sequence[Cores]) -> list[int]:
    """The local ranks that are bound to fewer cores than an even split of their node would give them.

    >>> too_narrow([Cores(frozenset({core}), 8) for core in range(2)])
    [0, 1]
    """
    return [rank for rank, cores in enumerate(node) if len(cores.mine) < cores.starters // len(node)]


def threads(node: Sequence[Cores], local_rank: int, environ: Mapping[str, str]) -> int | None:
    """How many threads BLAS may have on this rank; None where it is right as it is, or not ours to say."""
    own = share(node, local_rank)
    if own == len(node[local_rank].mine) or any(environ.get(name) for name in _VARIABLES):
        return None
    return own


def settle(node: Sequence[Cores], local_rank: int, ranks: Sequence[int], engine: str) -> None:
    """Limits this process's BLAS to its share of the node's cores, for good; warns where an engine bound too tightly.

    node: of all ranks of this node; ranks: their numbers in the world; engine: as in `World`
    """
    limit = threads(node, local_rank, os.environ)
    if limit is not None:
        from threadpoolctl import threadpool_limits  # here, as a world of one and a launcher's rank do without

        threadpool_limits(limit)
        os.environ[_VARIABLES[0]] = str(limit)  # for what is loaded later, and for children
        if ranks[local_rank] == 0:
            _log.info("BLAS threads of rank 0: %d (%d ranks on its node); OMP_NUM_THREADS would win", limit, len(node))
    narrow = too_narrow(node)
    if narrow and narrow[0] == local_rank:
        _log.warning("%s", narrow_text(node, narrow, ranks, engine))


def narrow_text(node: Sequence[Cores], narrow: Sequence[int], ranks: Sequence[int], engine: str) -> str:
    """What is said of the local ranks `narrow`, and what mends it."""
    first = node[narrow[0]]
    others = f" (like {len(narrow) - 1} more of its node)" if len(narrow) > 1 else ""
    return (
        f"rank {ranks[narrow[0]]} is bound to {len(first.mine)} of {first.starters} cores{others}, and an even split "
        f"would be {first.starters // len(node)}: {_UNBOUND.get(engine, 'do not bind ranks')}"
    )
