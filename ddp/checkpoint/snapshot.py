"""Copies the state of one moment while training goes on, and writes it in a thread.

Parameters and optimizer state change only in an optimizer's step. A thread copies those above 64 KiB during the next
forward and backward (NumPy releases the GIL meanwhile), and the next step waits until they are copied. Everything else
is copied at once. The memory of the copies is used again by later saves, so there is never more than one copy of what a
rank writes.

Other code may change a parameter during the copy. A write increments the version of its tensor, as a rule only when the
write has ended. So versions are compared when the training thread is known to write nothing, or after a pause in which
any write would have ended."""

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
# Arrays up to this size (bytes) are copied at once.
_SMALL = 1 << 16
# After the copy, versions are compared only when this time (s) plus the duration of the copy has passed. A write
# increments its tensor's version when it ends, and by then any write that overlapped the copy has ended.
_REST = 0.2


class Snapshot:
    """A copy of the state. `copy` completes it.

    later: ids of the versions of tensors that only a step changes. `copy` copies the large ones; the constructor copies
    everything else
    buffers: memory of earlier copies by name, which is used again
    arrays: the copies on the host, by name, complete once `copied` is set; intact: False if a tensor was changed
    before its copy was complete
    """

    def __init__(self, sources: Sequence[ArraySource], later: Collection[int], buffers: dict[str, Array]) -> None:
        self.arrays: dict[str, Array] = {}
        self.copied = threading.Event()
        self._compared = threading.Event()
        self.intact = True
        self._lock = threading.Lock()
        self._later: list[tuple[Version, int, Callable[[], None]]] = []
        for name in set(buffers) - {source.name for source in sources}:
            del buffers[name]
        for source in sources:
            array = source.array
            version = source.version
            target = buffers.get(source.name)
            if target is None or target.shape != array.shape or target.dtype != array.dtype:
                target = buffers[source.name] = np.empty(array.shape, array.dtype)
            self.arrays[source.name] = target
            if version is not None and id(version) in later and array.nbytes > _SMALL:
                self._later.append((version, version.count, _copier(array, target)))
            else:
                target[...] = to_device(array, CPU)

    def copy(self) -> None:
        """Copies the large tensors that change only in an optimizer step. Runs in the thread of the save."""
        begun = time.monotonic()
        try:
            for *_, copy in self._later:
                copy()
        finally:
            self.copied.set()
        self._compared.wait(_REST + time.monotonic() - begun)
        self._compare_versions()

    def wait(self) -> None:
        """Waits until everything has been copied, so that the tensors may be changed. Called in the training thread."""
        self.copied.wait()
        self._compare_versions()

    def _compare_versions(self) -> None:
        with self._lock:
            if not self._compared.is_set():
                self.intact = all(version.count == count for version, count, _ in self._later)
                self._later = []  # frees the arrays
                self._compared.set()


def _copier(array: Array, target: Array) -> Callable[[], None]:
    """A function that copies `array` to `target`. On a GPU it uses another stream, after the work submitted so far."""
    if isinstance(array, np.ndarray):
        return lambda: np.copyto(target, array)
    from ddp._cuda.stream_order import DeviceStream, StreamGuard  # needs a GPU

    device = device_of(array)
    xp = device.xp
    with on(device):
        computed = xp.cuda.Event(disable_timing=True)
        computed.record()

    def copy() -> None:
        # Not `with Device`: at its end CuPy would select the thread's previous device, the first GPU, and take memory
        # there.
        xp.cuda.Device(device.index).use()
        stream = DeviceStream(xp, array.device.id, xp.cuda.Stream(non_blocking=True))
        with StreamGuard(stream):
            stream.wait(computed)
            target[...] = xp.ascontiguousarray(array).get(stream=stream.cupy_stream)

    return copy


_log = logging.getLogger("ddp.checkpoint")
_unfinished: set[BackgroundSave] = set()
# The lowest priority, so that training threads get the cores.
_NICE = 19


class BackgroundSave:
    """A save that runs in a thread. The process waits for the save before it ends.

    write: `Store.write` with all arguments but `ready`; done: called at the end
    """

    def __init__(
        self, snapshot: Snapshot, write: Callable[[Callable[[], bool]], Path | str | None], done: Callable[[], None]
    ) -> None:
        self.snapshot = snapshot
        self._write = write
        self._done = done
        self._path: Path | str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="save of a checkpoint")
        self._thread.start()
        _unfinished.add(self)  # last: if the thread cannot start, the process must not wait for it

    def result(self) -> Path | str | None:
        """Waits for the end of the save. Returns the checkpoint, or None if the state was changed during the copy.

        Every rank gets the same result.

        Raises: CheckpointError on every rank if the save has failed; PeerLeft or a related error if a rank has ended.
        """
        self.snapshot.wait()
        self._thread.join()
        _unfinished.discard(self)
        if self._error is not None:
            raise self._error
        return self._path

    def _run(self) -> None:
        try:
            self._path = self._write(self._ready)
        except BaseException as error:  # raised by `result`
            self._error = error
        finally:
            self.snapshot.copied.set()  # `wait` must return, also if the save failed before the copy
            self._done()

    def _ready(self) -> bool:
        self.snapshot.copy()
        # Lowers the priority of this thread. On Linux each thread has a priority, which new threads inherit.
        with contextlib.suppress(OSError):  # if this is forbidden, the save runs at normal priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        return self.snapshot.intact


def _wait_for_saves() -> None:
    """Waits for unfinished saves when the process ends, and logs their errors."""
    for save in tuple(_unfinished):
        try:
            if save.result() is None:
                _log.error("a save was given up: parameters were changed while they were copied, and the process ends")
        except Exception as error:
            _log.error("a save failed while the process was ending: %s: %s", type(error).__name__, error)


# Functions of `atexit` run too late: the interpreter has already joined all threads that are not daemons, and has shut
# down the pools of `concurrent.futures`, which a save needs. Functions registered here run earlier, the latest first.
threading._register_atexit(_wait_for_saves)  # type: ignore[attr-defined]  # no public call runs so early
