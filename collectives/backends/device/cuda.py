"""CuPy as the package uses it: arrays, streams, events, pinned memory, and the identity of devices.

Other modules use CuPy only through a `Cuda`, so that tests can replace CuPy by a simulation. The one exception is
`nccl.library`, which takes the NCCL library from CuPy.
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
#: The driver's folder, with one entry for each GPU of the machine.
_GPUS = Path("/proc/driver/nvidia/gpus")
# Result codes of cudaEventQuery. CuPy's own `Event.done` treats every error as "not finished".
_SUCCESS = 0
_NOT_READY = 600
# CuPy's handle of each thread's own default stream.
_PER_THREAD = 2


def take_local_gpu(local_rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Makes the GPU whose number is the local rank, modulo the number of GPUs, this thread's current device.

    Does nothing if only one device is visible, if the current device is not device 0, or if CuPy cannot be used.
    """
    if has_one_visible(environ.get("CUDA_VISIBLE_DEVICES")) or ("cupy" not in sys.modules and not _has_several_gpus()):
        return
    if why_absent() is not None:
        return
    try:
        load().take_own_device(local_rank)
    except CollectivesError as error:  # Only logged: the first call on a GPU array raises it again; other calls work.
        _log.info("no GPU is taken: %s", error)


def has_one_visible(visible: str | None) -> bool:
    """True if this value of CUDA_VISIBLE_DEVICES shows at most one device. visible: None if the variable is not set

    >>> [has_one_visible(value) for value in (None, "0,1", "3", "", "-1", "MIG-4e1c")]
    [False, False, True, True, True, True]
    """
    return visible is not None and "," not in visible.strip(", ")


def _has_several_gpus() -> bool:
    try:
        return len(os.listdir(_GPUS)) > 1
    except OSError:  # If /proc/driver exists, there is no GPU. Without it this is unknown, and `why_absent` decides.
        return not _GPUS.parents[1].exists()


def why_absent() -> str | None:
    """Why this process cannot use CuPy, found without importing it; None if no reason is found."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no CUDA driver (libcuda.so.1)"
    return None


def load(index: int | None = None) -> Cuda:
    """Returns the `Cuda` of device `index`, which is not checked. None means this thread's current device.

    Raises: CollectivesError if CuPy cannot be imported, or finds no current device.
    """
    try:
        import cupy

        return Cuda(cupy, cupy.cuda.runtime.getDevice() if index is None else index)
    except Exception as error:  # A broken installation may raise anything.
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
        """A text that distinguishes this GPU, or this MIG slice of one, from all others of its machine."""
        # The slices of a GPU have the same bus id. Some versions of CuPy cut the uuid off at its first zero byte.
        uuid = bytes(self._runtime.getDeviceProperties(self.index).get("uuid") or b"").hex()
        return f"{self._runtime.deviceGetPCIBusId(self.index)} {uuid}".rstrip()

    def take_own_device(self, local_rank: int) -> None:
        """If `index` is 0, changes it to the local rank modulo the number of GPUs, and makes that device current."""
        count = self._runtime.getDeviceCount()
        if self.index == 0 and local_rank % count:
            self.index = local_rank % count
            self.use()

    def use(self) -> None:
        """Makes this the calling thread's current device.

        Each thread of this package that uses a device must first call this. A new thread's current device is device 0:
        without this call, each `with` block of another device makes device 0 current again at its end, and CUDA then
        allocates memory on device 0.
        """
        self.xp.cuda.Device(self.index).use()

    # Arrays ----------------------------------------------------------------------------------------------------------

    def as_array(self, x: Any, name: str = "x") -> Any:
        """x as a CuPy array that shares its memory.

        Raises: DtypeError if x is not an array on a GPU, or is on another GPU.
        """
        if not isinstance(x, self.xp.ndarray):
            with self.on(self.current_stream()):
                try:
                    x = self.xp.asarray(x) if hasattr(x, "__cuda_array_interface__") else self.xp.from_dlpack(x)
                except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
                    raise DtypeError(f"{name} ({type(x).__name__}) cannot be read as a CuPy array: {error}") from error
        if x.device.id != self.index:
            raise DtypeError(
                f"{name} is on GPU {x.device.id}, and this communicator's arrays are on GPU {self.index}: "
                f"make it there, under cupy.cuda.Device({self.index})"
            )
        return x

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocates an uninitialized C-contiguous array on the current stream."""
        return self.xp.empty(shape, dtype)

    def pinned(self, nbytes: int) -> Array:
        """Allocates pinned host memory, (nbytes,) uint8, for asynchronous copies from and to the device."""
        return np.frombuffer(self.xp.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)

    def copy_d2h(self, host: Array, device: Any, stream: Any) -> None:
        """Starts the copy of a contiguous device array into host memory of the same number of bytes."""
        direction = self._runtime.memcpyDeviceToHost
        if device.nbytes:
            self._runtime.memcpyAsync(host.ctypes.data, device.data.ptr, device.nbytes, direction, stream.ptr)

    def copy_h2d(self, device: Any, host: Array, stream: Any) -> None:
        """Starts the copy of host memory into a contiguous device array of the same number of bytes."""
        direction = self._runtime.memcpyHostToDevice
        if device.nbytes:
            self._runtime.memcpyAsync(device.data.ptr, host.ctypes.data, device.nbytes, direction, stream.ptr)

    def copy(self, target: Any, source: Any, stream: Any) -> None:
        """Starts the copy of a device array into another one, converted to the target's dtype."""
        with self.on(stream):
            self.xp.copyto(target, source, casting="unsafe")

    # Streams ---------------------------------------------------------------------------------------------------------

    def stream(self) -> Any:
        """A new stream that neither waits for the default stream nor makes it wait."""
        with self.xp.cuda.Device(self.index):
            return self.xp.cuda.Stream(non_blocking=True)

    def current_stream(self) -> Any:
        """The calling thread's current stream."""
        return self.xp.cuda.get_current_stream(self.index)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Makes kernels and allocations of the body use this stream of this device."""
        with self.xp.cuda.Device(self.index):
            outer_stream = self.current_stream()
            try:
                with stream:
                    yield
            finally:
                # At its end `with stream` restores the stream of the enclosing `with`, not a stream that `Stream.use`
                # has made current.
                outer_stream.use()

    def record_event(self, stream: Any) -> Any:
        """Records an event after everything that is on a stream now."""
        with self.xp.cuda.Device(self.index):
            event = self.xp.cuda.Event(block=False, disable_timing=True)
            event.record(stream)
        return event

    def capturing(self, stream: Any) -> bool:
        """True while the stream is captured into a graph. The default stream cannot be captured, and is not queried."""
        return stream.ptr != 0 and bool(self._runtime.streamIsCapturing(stream.ptr))

    def is_per_thread(self, stream: Any) -> bool:
        """True for a thread's own default stream: in another thread, the same handle means another stream."""
        return bool(stream.ptr == _PER_THREAD)

    def is_complete(self, event: Any) -> bool:
        """True once everything before the event is complete. Raises: CollectivesError if some of it failed."""
        status = self._runtime.eventQuery(event.ptr)
        if status not in (_SUCCESS, _NOT_READY):
            raise CollectivesError(f"a kernel or copy on GPU {self.index} failed: CUDA error {status}")
        return bool(status == _SUCCESS)
