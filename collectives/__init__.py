"""Collectives for NumPy and CuPy arrays: reduce, broadcast, gather, scatter and kin, over shared memory, MPI and NCCL.

    import collectives
    comm = collectives.init()
    total = comm.all_reduce(array)

This file imports nothing until asked: the launcher and its agents read `collectives.world` and have no use for NumPy.
"""

from __future__ import annotations

__version__ = "0.1.0.dev0"

TYPE_CHECKING = False  # not of `typing`, whose import would cost every agent a tenth of its memory
if TYPE_CHECKING:
    from typing import Any

    from collectives.backends.nccl.library import NcclConfig as NcclConfig
    from collectives.communicator import Communicator as Communicator
    from collectives.engine.call import Work as Work
    from collectives.engine.call import skip_frames as skip_frames
    from collectives.errors import ArgumentError as ArgumentError
    from collectives.errors import BackendError as BackendError
    from collectives.errors import CollectiveInterrupted as CollectiveInterrupted
    from collectives.errors import CollectivesError as CollectivesError
    from collectives.errors import CollectiveTimeout as CollectiveTimeout
    from collectives.errors import CommunicatorClosed as CommunicatorClosed
    from collectives.errors import DtypeError as DtypeError
    from collectives.errors import MismatchError as MismatchError
    from collectives.errors import NcclError as NcclError
    from collectives.errors import PeerLeft as PeerLeft
    from collectives.errors import WorldError as WorldError
    from collectives.flight.recorder import mark_step as mark_step
    from collectives.reduction import ReduceOp as ReduceOp
    from collectives.start import init as init
    from collectives.start import run_threads as run_threads

_HOMES = {
    "backends.nccl.library": "NcclConfig",
    "communicator": "Communicator",
    "engine.call": "Work skip_frames",
    "errors": "ArgumentError BackendError CollectiveInterrupted CollectiveTimeout CollectivesError CommunicatorClosed "
    "DtypeError MismatchError NcclError PeerLeft WorldError",
    "flight.recorder": "mark_step",
    "reduction": "ReduceOp",
    "start": "init run_threads",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"collectives.{_HOME[name]}"), name)
    globals()[name] = value
    return value
