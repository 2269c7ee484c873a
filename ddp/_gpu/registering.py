"""Blocks of other processes as pinned memory: what workers write is copied to a GPU from where they wrote it.

To register memory takes as long as several copies of it, so it is done once, for a block that comes again and again:
one that is seen for the first time may have come alone. It ends with the block: when its owner drops it, or has been
closed or killed, and no copy holds its memory any more; the mapping is there until then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from typing import Any

from ddp import _device
from ddp._block import Block

_PORTABLE = 1  # cudaHostRegisterPortable, which CuPy has no name for: pinned for every GPU

_known: weakref.WeakKeyDictionary[Block, bool] = weakref.WeakKeyDictionary()  # whether it is registered
_refused = False
_looking = threading.Lock()


def registered(xp: Any, block: Block) -> bool:
    """Whether copies to a GPU may read the block where it is: from the second time on, if CUDA can pin it."""
    global _refused
    with _looking:
        found = _known.get(block)
        if found is None:
            _known[block] = False
            return False
        if found or _refused or _device.capturing.now is not None:
            return found
        start = block._bytes.__array_interface__["data"][0]
        runtime = xp.cuda.runtime
        try:
            runtime.hostRegister(start, block.nbytes, _PORTABLE)
        except Exception as error:  # a limit on locked memory, an old kernel, a driver that cannot
            _refused = True
            warnings.warn(
                f"pin_memory=True: CUDA cannot pin the memory of workers ({error}), so that batches are copied once "
                "more on their way",
                stacklevel=2,
            )
            return False
        # The weak reference dies before the mapping does. The end of the process undoes all by itself.
        weakref.finalize(block, _unregister, runtime, start, os.getpid()).atexit = False
        _known[block] = True
        return True


def _unregister(runtime: Any, start: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the memory, and not what CUDA knows of it
        with contextlib.suppress(Exception):  # after an error of the GPU nothing works any more
            runtime.hostUnregister(start)


def count() -> int:
    """How many blocks are registered."""
    return sum(list(_known.values()))
