"""Numbers on their way from a device to the host: asked for as they are computed, and read when they are there.

Reading an array of a GPU waits for all that was launched before, the step that has just been handed over included. A
copy into pinned memory that is asked for in time waits for what stands before it, and is over when it is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray


class Arriving:
    """What an array holds now. array: contiguous, of `xp`, whose current stream computes it"""

    def __init__(self, array: Array, xp: Any) -> None:
        self._host: np.ndarray[Any, Any] = array
        self._event: Any = None
        if xp is not np:
            memory = xp.cuda.alloc_pinned_memory(max(array.nbytes, 1))
            self._host = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
            self._source = array  # copied from until the event has passed
            array.get(out=self._host, blocking=False)
            self._event = xp.cuda.Event(block=False, disable_timing=True)
            self._event.record()

    def read(self) -> np.ndarray[Any, Any]:
        """The numbers; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
