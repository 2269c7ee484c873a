"""How many cores a rank has for itself, and so threads of BLAS.

ddp-launch sets OMP_NUM_THREADS before NumPy is loaded. Under a bare mpiexec or srun nothing does: each rank's BLAS
would start a thread for every core of the machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

_log = logging.getLogger("collectives")

#: The user who sets one of these has decided.
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "GOTO_NUM_THREADS")

#: Those that a rank may run on.
Cores = frozenset[int]


def share(node: Sequence[Cores], local_rank: int) -> int:
    """The cores that are a rank's own, at least 1: each core is split among the ranks that may run on it.

    >>> share([frozenset(range(8))] * 2, 0), share([frozenset({0, 1}), frozenset({2})], 0)
    (4, 2)
    """
    own = sum(1 / sum(core in other for other in node) for core in node[local_rank])
    return max(1, int(own + 1e-6))  # three thirds are one


def threads(node: Sequence[Cores], local_rank: int, environ: Mapping[str, str]) -> int | None:
    """How many threads BLAS may have on this rank; None where it is right as it is, or not ours to say."""
    own = share(node, local_rank)
    if own == len(node[local_rank]) or any(environ.get(name) for name in _VARIABLES):
        return None
    return own


def limit_threads(node: Sequence[Cores], local_rank: int) -> None:
    """Limits this process's BLAS to its share of the node's cores, for good. node: of all ranks of this node"""
    limit = threads(node, local_rank, os.environ)
    if limit is not None:
        from threadpoolctl import threadpool_limits  # here, as a world of one and a launcher's rank do without

        threadpool_limits(limit)
        os.environ[_VARIABLES[0]] = str(limit)  # for what is loaded later, and for children
        _log.debug("BLAS threads: %d (%d ranks on this node); OMP_NUM_THREADS would win", limit, len(node))
