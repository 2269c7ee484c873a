"""The state of one moment, copied while training goes on, and the thread that writes it.

What only an optimizer's step changes, its parameters and their state, is copied by a thread during the next forward and
backward (NumPy lets go of the GIL for it), and the step waits for what is left. All else is copied at once. The memory
of the copies stays from one save to the next, so there is one copy, of what this rank writes, and never a second one.

Other code may change a parameter meanwhile. Its version tells: each write counts, once it is through. A write that
began before its copy was done may count a moment later; so versions are looked at when the thread that trains is known
to be at rest, or after it has had time enough to finish any write."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddp._device import CPU, device_of, on, to_device
from ddp._engine import Version
from ddp.checkpoint.state import ArraySource

Array = Any
_SMALL = 1 << 16  # bytes; copied at once: it takes less than to begin
_REST = 0.2  # s, and as long as the copying took: no single write takes longer


class Snapshot:
    """arrays: of the host, by name; whole once `copied` is set. intact: whether nothing changed while it was copied

    later: ids of the versions of tensors that only a step changes; buffers: memory to be used again, by name
    """

    def __init__(self, sources: Sequence[ArraySource], later: Collection[int], buffers: dict[str, Array]) -> None:
        self.arrays: dict[str, Array] = {}
        self.copied = threading.Event()
        self._looked = threading.Event()
        self.intact = True
        self._lock = threading.Lock()
        self._later: list[tuple[Version, int, Callable[[], None]]] = []
        for name in set(buffers) - {source.name for source in sources}:
            del buffers[name]
        for source in sources:
            array, version = source.array, source.version
            target = buffers.get(source.name)
            if target is None or target.shape != array.shape or target.dtype != array.dtype:
                target = buffers[source.name] = np.empty(array.shape, array.dtype)
            self.arrays[source.name] = target
            if version is not None and id(version) in later and array.nbytes > _SMALL:
                self._later.append((version, version.count, _copier(array, target)))
            else:
                target[...] = to_device(array, CPU)

    def copy(self) -> None:
        """Copies what was left for later; in a thread of its own."""
        begun = time.monotonic()
        try:
            for *_, copy in self._later:
                copy()
        finally:
            self.copied.set()
        self._looked.wait(_REST + time.monotonic() - begun)
        self._look()

    def wait(self) -> None:
        """Returns when everything may be changed. In the thread that trains."""
        self.copied.wait()
        self._look()

    def _look(self) -> None:
        with self._lock:
            if not self._looked.is_set():
                self.intact = all(version.count == count for version, count, _ in self._later)
                self._later = []  # the arrays may go
                self._looked.set()


def _copier(array: Array, target: Array) -> Callable[[], None]:
    """What copies an array, beside the stream that computes, and in order with what is to be computed of it now."""
    if isinstance(array, np.ndarray):
        return lambda: np.copyto(target, array)
    from ddp._cuda.stream_order import DeviceStream, StreamGuard  # only where there is a GPU

    where = device_of(array)
    with on(where):
        computed = where.xp.cuda.Event(disable_timing=True)
        computed.record()

    def copy() -> None:
        where.xp.cuda.Device(where.index).use()  # left again, a context would take memory of the first GPU
        stream = DeviceStream(where.xp, array.device.id, where.xp.cuda.Stream(non_blocking=True))
        with StreamGuard(stream):
            stream.wait(computed)
            target[...] = where.xp.ascontiguousarray(array).get(stream=stream.cupy_stream)

    return copy


_log = logging.getLogger("ddp.checkpoint")
_under_way: set[BackgroundSave] = set()
_NICE = 19  # next to nothing, where a thread that trains wants the same core


class BackgroundSave:
    """One save under way. A process that ends waits for it.

    write: `Store.write` of what the snapshot holds, but for its `ready`; done: called when it is over
    """

    def __init__(
        self, snapshot: Snapshot, write: Callable[[Callable[[], bool]], Path | str | None], done: Callable[[], None]
    ) -> None:
        self.snapshot = snapshot
        self._write, self._done = write, done
        self._path: Path | str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="save of a checkpoint")
        _under_way.add(self)
        self._thread.start()

    def result(self) -> Path | str | None:
        """Waits for its end: the checkpoint; None if the state was changed meanwhile and has to be saved anew.

        The same on all ranks. Raises: CheckpointError on all of them, and there is no checkpoint of this step.
        """
        self.snapshot.wait()
        self._thread.join()
        _under_way.discard(self)
        if self._error is not None:
            raise self._error
        return self._path

    def _run(self) -> None:
        try:
            self._path = self._write(self._ready)
        except BaseException as error:  # raised where the ranks look at the result
            self._error = error
        finally:
            self.snapshot.copied.set()  # also if the ranks did not come as far as to copy
            self._done()

    def _ready(self) -> bool:
        self.snapshot.copy()
        # Leaves the cores to training: on Linux a thread has a priority, which those that it starts inherit.
        with contextlib.suppress(OSError):  # not allowed: it saves at the usual priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        return self.snapshot.intact


def _finish() -> None:
    """Waits for the saves under way when the process ends, and logs their errors."""
    for saving in tuple(_under_way):
        try:
            if saving.result() is None:
                _log.error("a save was given up: parameters were changed while they were copied, and the process ends")
        except Exception as error:
            _log.error("a save failed while the process was ending: %s: %s", type(error).__name__, error)


# `atexit` runs after the interpreter has joined all threads and shut down the pools of `concurrent.futures`, and a save
# needs these. What they register with themselves runs before, the latest first.
threading._register_atexit(_finish)  # type: ignore[attr-defined]  # no public call runs so early
