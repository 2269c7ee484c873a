"""Collectives for NumPy and CuPy arrays: reduce, broadcast, gather, scatter and more, over shared memory, MPI and NCCL.

    import collectives
    comm = collectives.init()
    total = comm.all_reduce(array)

Importing this package loads neither NumPy nor its own modules. So the launcher and its agents can import single small
modules, such as `collectives.world` and `collectives.errors`.
"""

from __future__ import annotations

__version__ = "0.1.0.dev0"

# `TYPE_CHECKING` is not imported from `typing`: that import would cost every agent a tenth of its memory.
TYPE_CHECKING = False
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

# For each public name, its module, which `__getattr__` imports when the name is first used.
_MODULES = {
    "ArgumentError": "errors",
    "BackendError": "errors",
    "CollectiveInterrupted": "errors",
    "CollectiveTimeout": "errors",
    "CollectivesError": "errors",
    "Communicator": "communicator",
    "CommunicatorClosed": "errors",
    "DtypeError": "errors",
    "MismatchError": "errors",
    "NcclConfig": "backends.nccl.library",
    "NcclError": "errors",
    "PeerLeft": "errors",
    "ReduceOp": "reduction",
    "Work": "engine.call",
    "WorldError": "errors",
    "init": "start",
    "mark_step": "flight.recorder",
    "run_threads": "start",
    "skip_frames": "engine.call",
}

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"collectives.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
