"""The state of one moment, copied while training goes on.

What only an optimizer's step changes, its parameters and their state, is copied by a thread beside the next forward and
backward (NumPy lets go of the GIL for it), and the step waits for what is left. All else is copied at once. The memory
of the copies stays from one save to the next, so there is one copy, of what this rank writes, and never a second one.

Somebody else may change a parameter meanwhile. Its version tells: each write counts, once it is through. A write that
began before its copy was done may count a moment later; so versions are looked at when the thread that trains is known
to be at rest, or after it has had time enough to finish any write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ddp._device import CPU, device_of, on, place
from ddp.checkpoint._state import Source

Array = Any
_SMALL = 1 << 16  # bytes; copied at once: it takes less than to begin
_REST = 0.2  # s, and as long as the copying took: no single write takes longer


class Snapshot:
    """arrays: of the host, by name; whole once `copied` is set.

    later: ids of the versions of tensors that nobody but a step changes; room: memory to be used again, by name
    """

    def __init__(self, sources: Sequence[Source], later: Collection[int], room: dict[str, Array]) -> None:
        self.arrays: dict[str, Array] = {}
        self.copied = threading.Event()
        self._looked = threading.Event()
        self._intact = True
        self._lock = threading.Lock()
        self._later: list[tuple[Source, int, Any]] = []
        for name in set(room) - {source.name for source in sources}:
            del room[name]
        for source in sources:
            array, version = source.array, source.version
            target = room.get(source.name)
            if target is None or target.shape != array.shape or target.dtype != array.dtype:
                target = room[source.name] = np.empty(array.shape, array.dtype)
            self.arrays[source.name] = target
            if version is not None and id(version) in later and array.nbytes > _SMALL:
                self._later.append((source, version.count, _mark(array)))
            else:
                _copy(array, target, None)

    def copy(self) -> None:
        """Copies what was left for later; in a thread of its own."""
        begun = time.monotonic()
        try:
            for source, _, mark in self._later:
                _copy(source.array, self.arrays[source.name], mark)
        finally:
            self.copied.set()
        self._looked.wait(_REST + time.monotonic() - begun)
        self._look()

    def wait(self) -> None:
        """Returns when everything may be changed. In the thread that trains."""
        self.copied.wait()
        self._look()

    @property
    def intact(self) -> bool:
        """Whether nobody changed what was being copied. After `copy`."""
        return self._intact

    def _look(self) -> None:
        with self._lock:
            if not self._looked.is_set():
                self._intact = all(source.version.count == count for source, count, _ in self._later if source.version)
                self._later = []  # the arrays may go
                self._looked.set()


def _mark(array: Array) -> Any:
    """Behind what the device has still to compute of the array; None on the host."""
    if isinstance(array, np.ndarray):
        return None
    where = device_of(array)
    with on(where):
        event = where.xp.cuda.Event(disable_timing=True)
        event.record()
        return event


def _copy(array: Array, target: Array, mark: Any) -> None:
    """mark: of an array on a device, which is then copied beside the stream that computes"""
    if isinstance(array, np.ndarray):
        np.copyto(target, array)
    elif mark is None:
        target[...] = place(array, CPU)
    else:
        from ddp._gpu.streams import Inside, Lane  # only where there is a GPU

        where = device_of(array)
        with on(where), Inside(Lane(where.xp, array.device.id, where.xp.cuda.Stream(non_blocking=True))) as lane:
            lane.wait(mark)
            target[...] = where.xp.ascontiguousarray(array).get(stream=lane.stream)
