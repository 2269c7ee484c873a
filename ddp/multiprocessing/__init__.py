"""Tensors in memory that processes share: queues pass handles, never contents.

Everything of the standard library's `multiprocessing`, under the same names; see docs/data.md for how long shared
memory lives. Processes are spawned unless `set_start_method` says otherwise.
"""

from typing import TYPE_CHECKING, Any

from ddp.multiprocessing.contexts import Process, default
from ddp.multiprocessing.spawning import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
    start_processes,
)

# As in the standard library's own `multiprocessing/__init__.py`: its names are the methods of the default context.
_OF_CONTEXT = [name for name in dir(default) if not name.startswith("_") and name not in ("Process", "reducer")]
globals().update((name, getattr(default, name)) for name in _OF_CONTEXT)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = [
    *(name for name in _OF_CONTEXT if not isinstance(getattr(default, name), type)),
    "Process",
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "spawn",
    "start_processes",
]
