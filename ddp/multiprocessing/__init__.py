"""Tensors in memory that processes share: queues pass handles, never contents.

The package has the public names of the standard library's `multiprocessing`, except `reducer`. docs/data.md says how
long shared memory lives. Processes are spawned unless `set_start_method` says otherwise.
"""

from typing import TYPE_CHECKING, Any

from ddp.multiprocessing import processes
from ddp.multiprocessing.processes import *

# As in the standard library's `multiprocessing/__init__.py`: the names here are methods of the default context.
_of_context = {
    name: getattr(processes.default, name)
    for name in dir(processes.default)
    if not name.startswith("_") and name not in ("Process", "reducer")
}
globals().update(_of_context)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = [*(name for name, value in _of_context.items() if not isinstance(value, type)), *processes.__all__]
