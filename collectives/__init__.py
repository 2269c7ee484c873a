"""Collectives for NumPy arrays: reduce, broadcast, gather, scatter, all-reduce, all-gather, over MPI or alone.

import collectives
comm = collectives.init()
total = comm.all_reduce(array)
"""

from collectives.communicator import Communicator
from collectives.errors import (
    ArgumentError,
    BackendError,
    CollectiveInterrupted,
    CollectivesError,
    CollectiveTimeout,
    CommunicatorClosed,
    DtypeError,
    MismatchError,
    PeerLeft,
    WorldError,
)
from collectives.progress import Work
from collectives.reduction import ReduceOp
from collectives.simulation import run_threads
from collectives.start import init
from collectives.version import __version__

__all__ = [
    "ArgumentError",
    "BackendError",
    "CollectiveInterrupted",
    "CollectiveTimeout",
    "CollectivesError",
    "Communicator",
    "CommunicatorClosed",
    "DtypeError",
    "MismatchError",
    "PeerLeft",
    "ReduceOp",
    "Work",
    "WorldError",
    "__version__",
    "init",
    "run_threads",
]
