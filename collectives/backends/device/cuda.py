"""The one module of `collectives` that speaks to CuPy: streams, events, pinned memory, and who a device is.

Everything above asks a `Cuda` for what it needs, so a test can put recording streams in CuPy's place.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from collectives.errors import CollectivesError, DtypeError
from collectives.reduction import Array

_log = logging.getLogger("collectives")
#: The driver's folder: one entry a GPU of the machine.
_GPUS = Path("/proc/driver/nvidia/gpus")
# Result codes of cudaEventQuery. CuPy's own `Event.done` takes any error for "not finished".
_SUCCESS, _NOT_READY = 0, 600
# What CuPy names the default stream that each thread has of its own.
_PER_THREAD = 2


def take_local_gpu(local_rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Makes a GPU of its own current for this thread: the one of the local rank's number, counted round.

    Who has chosen a device before, or is shown one alone, keeps it.
    """
    if shown_alone(environ.get("CUDA_VISIBLE_DEVICES")) or ("cupy" not in sys.modules and not _several()):
        return
    if why_absent() is not None:
        return
    try:
        load().take_turns(local_rank)
    except CollectivesError as error:  # the first array on a GPU will say so; without one none is needed
        _log.info("no GPU is taken: %s", error)


def shown_alone(visible: str | None) -> bool:
    """True if CUDA shows one device or none, by the value of CUDA_VISIBLE_DEVICES, None where it is not set.

    >>> [shown_alone(value) for value in (None, "0,1", "3", "", "-1", "MIG-4e1c")]
    [False, False, True, True, True, True]
    """
    return visible is not None and "," not in visible.strip(", ")


def _several() -> bool:
    try:
        return len(os.listdir(_GPUS)) > 1
    except OSError:  # no driver; or one that shows itself otherwise, and then libcuda is asked
        return not _GPUS.parents[1].exists()


def why_absent() -> str | None:
    """Why this process cannot use CuPy, found without importing it; None where nothing speaks against it."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no CUDA driver (libcuda.so.1)"
    return None


def load(index: int | None = None) -> Cuda:
    """A device by its number, None for this thread's current one.

    Raises: CollectivesError if CuPy or the device cannot be used.
    """
    try:
        import cupy

        return Cuda(cupy, cupy.cuda.runtime.getDevice() if index is None else index)
    except Exception as error:  # a broken installation raises whatever it likes
        raise CollectivesError(f"CuPy cannot use a GPU here: {type(error).__name__}: {error}") from error


class Cuda:
    """One CUDA device, through CuPy.

    xp: the array module; index: the device's number in this process
    """

    def __init__(self, cupy: Any, index: int) -> None:
        self.xp = cupy
        self.index = index
        self._runtime = cupy.cuda.runtime

    def identity(self) -> str:
        """What tells this GPU, or this slice of one, from every other of its machine."""
        # Slices share the bus id; the uuid is cut short at its first zero byte by some versions of CuPy.
        uuid = bytes(self._runtime.getDeviceProperties(self.index).get("uuid") or b"").hex()
        return f"{self._runtime.deviceGetPCIBusId(self.index)} {uuid}".rstrip()

    def take_turns(self, local_rank: int) -> None:
        """Ranks of one node that were given no device each take their own, in this thread. Index: where it now is."""
        count = self._runtime.getDeviceCount()
        if self.index == 0 and local_rank % count:
            self.index = local_rank % count
            self.use()

    def use(self) -> None:
        """Makes it the calling thread's current device.

        A thread of ours that works on a device starts so: a new thread's current device is the first one, and to come
        back to that from a context of another one makes CUDA take memory there.
        """
        self.xp.cuda.Device(self.index).use()

    # Arrays ----------------------------------------------------------------------------------------------------------

    def as_array(self, x: Any, what: str = "x") -> Any:
        """x as a CuPy array that shares its memory.

        Raises: DtypeError if x is no array on a GPU, or on another than this one.
        """
        if not isinstance(x, self.xp.ndarray):
            with self.on(self.current_stream()):
                try:
                    x = self.xp.asarray(x) if hasattr(x, "__cuda_array_interface__") else self.xp.from_dlpack(x)
                except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
                    raise DtypeError(f"{what} ({type(x).__name__}) cannot be read as a CuPy array: {error}") from error
        if x.device.id != self.index:
            raise DtypeError(
                f"{what} is on GPU {x.device.id}, and this communicator's arrays are on GPU {self.index}: "
                f"make it there, under cupy.cuda.Device({self.index})"
            )
        return x

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new C-contiguous array in the memory of the current stream."""
        return self.xp.empty(shape, dtype)

    def pinned(self, nbytes: int) -> Array:
        """(nbytes,) uint8 of host memory that the device can copy from and to while the host goes on."""
        return np.frombuffer(self.xp.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)

    def copy_down(self, host: Array, device: Any, stream: Any) -> None:
        """Starts the copy of a contiguous device array into host memory of the same number of bytes."""
        kind = self._runtime.memcpyDeviceToHost
        if device.nbytes:
            self._runtime.memcpyAsync(host.ctypes.data, device.data.ptr, device.nbytes, kind, stream.ptr)

    def copy_up(self, device: Any, host: Array, stream: Any) -> None:
        """Starts the copy of host memory into a contiguous device array of the same number of bytes."""
        kind = self._runtime.memcpyHostToDevice
        if device.nbytes:
            self._runtime.memcpyAsync(device.data.ptr, host.ctypes.data, device.nbytes, kind, stream.ptr)

    def copy(self, target: Any, source: Any, stream: Any) -> None:
        """Starts the copy of a device array into another one, cast to its dtype."""
        with self.on(stream):
            self.xp.copyto(target, source, casting="unsafe")

    # Streams ---------------------------------------------------------------------------------------------------------

    def stream(self) -> Any:
        """A new stream that the default stream does not wait for."""
        with self.xp.cuda.Device(self.index):
            return self.xp.cuda.Stream(non_blocking=True)

    def current_stream(self) -> Any:
        """What the calling thread computes on."""
        return self.xp.cuda.get_current_stream(self.index)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Kernels and memory of the body belong to this stream of this device."""
        with self.xp.cuda.Device(self.index):
            before = self.current_stream()
            try:
                with stream:
                    yield
            finally:
                # CuPy's context ends on the stream whose context is around it, and not on one that `use` made current.
                before.use()

    def mark(self, stream: Any) -> Any:
        """An event at the present end of a stream."""
        with self.xp.cuda.Device(self.index):
            event = self.xp.cuda.Event(block=False, disable_timing=True)
            event.record(stream)
        return event

    def capturing(self, stream: Any) -> bool:
        """True while the stream is being captured into a graph; the default stream never is, and must not be asked."""
        return stream.ptr != 0 and bool(self._runtime.streamIsCapturing(stream.ptr))

    def is_per_thread(self, stream: Any) -> bool:
        """True for the default stream that each thread has of its own: another thread cannot name it."""
        return bool(stream.ptr == _PER_THREAD)

    def passed(self, event: Any) -> bool:
        """True once all that stood before the event is done. Raises: CollectivesError if it failed."""
        status = self._runtime.eventQuery(event.ptr)
        if status not in (_SUCCESS, _NOT_READY):
            raise CollectivesError(f"a kernel or copy on GPU {self.index} failed: CUDA error {status}")
        return bool(status == _SUCCESS)
