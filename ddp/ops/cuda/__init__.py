"""The ops as CUDA kernels: which stand in tables keyed by the name of the array module, or beside each op.

Nothing here is executed before a process meets a GPU: `ddp._device` calls `load` then. What other modules name of it
they get as modules that are executed when first looked into, so that a process without a GPU pays for none.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from ddp._device import meeting
from ddp._later import later

if TYPE_CHECKING:
    from ddp.ops.cuda import _source as _source
    from ddp.ops.cuda import advancing as advancing
    from ddp.ops.cuda import bounds as bounds
    from ddp.ops.cuda import clipping as clipping
    from ddp.ops.cuda import products as products
    from ddp.ops.cuda import tables as tables
    from ddp.ops.cuda import updates as updates
else:
    for _name in ("_source", "advancing", "bounds", "clipping", "products", "tables", "updates"):
        globals()[_name] = later(f"{__name__}.{_name}")

# These give the ops their kernels, the later ones on top of the earlier; and the rest, so that no two threads begin it.
_GIVING = ("entries", "images", "pairs")
_REST = ("advancing", "bounds", "clipping", "tables", "updates")
_lock = threading.Lock()
_loaded: list[bool] = []


def load() -> None:
    """Gives the ops their kernels, once in a process; nothing is compiled yet."""
    with _lock:
        if not _loaded:
            for name in (*_GIVING, *_REST):
                vars(importlib.import_module(f"{__name__}.{name}"))
            _loaded.append(True)


meeting.append(load)


def __getattr__(name: str) -> Any:
    """`SOURCES` holds every source: tests compile each for the GPUs we know, and run it on the CPU."""
    if name == "SOURCES":
        load()
        return _source.SOURCES
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
