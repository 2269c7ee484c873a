"""Device memory: counts of CuPy's allocations, a limit for this process, and the error of a failed allocation.

CuPy's pool allocates by `Allocator._cuda_malloc`, which calls cudaMalloc and counts. An array that fits into a free
block of the pool costs the same as with CuPy alone. From the first `reset_peaks` on, the peak of allocated bytes is
tracked, which costs one more Python call for each array.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddp._cuda import capture, ipc, stream_order
from ddp.errors import ArgumentError, DeviceError, OutOfMemoryError

# The status cudaErrorMemoryAllocation.
NO_MEMORY = 2

Malloc = Callable[[int], Any]


def human(nbytes: int) -> str:
    """Formats a number of bytes: 1.50 GiB."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{nbytes} bytes" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


@dataclass
class DeviceCounts:
    """Counts of allocator calls and of bytes on one device.

    mallocs, frees: calls of cudaMalloc and cudaFree; for an allocator other than "pool", mallocs also counts
        allocations
    retries: how often an allocation was tried again after blocks were freed; ooms: OutOfMemoryErrors
    reserved: bytes from cudaMalloc that were not freed; limit: the maximum of `reserved`, or None
    reserved_peak, peak: the maximum of `reserved`, and of the bytes that arrays held, since the last `reset_peaks`
    sizes: bytes of each block from cudaMalloc, by address
    """

    # Used without a lock: a count changes by one `+=` or `-=`, which contains no call at which Python could switch
    # threads. A peak may miss what two threads do at the same time.
    mallocs: int = 0
    frees: int = 0
    retries: int = 0
    ooms: int = 0
    reserved: int = 0
    reserved_peak: int = 0
    peak: int = 0
    limit: int | None = None
    sizes: dict[int, int] = field(default_factory=dict)


class PrivatePool:
    """The memory pool of a CUDA graph, or of several that share it. No other code allocates from it.

    If it is dropped, its free blocks are freed.
    """

    def __init__(self, pool: Any) -> None:
        self.malloc = pool.malloc


class Allocator:
    """The allocator of CuPy's arrays.

    name: "pool" (CuPy's pool over `_cuda_malloc`), "async" (cudaMallocAsync), "given" (a function of the user)
    malloc: None for "pool"; pool: CuPy's pool behind `malloc`, which reports allocated bytes, or None
    """

    def __init__(self, cupy: Any, name: str = "pool", malloc: Malloc | None = None, pool: Any = None) -> None:
        self.cupy = cupy
        self.name = name
        self.counts: dict[int, DeviceCounts] = {}
        self.counted = malloc is None
        self._pool = self._counted_pool() if self.counted else pool
        # Pairs of a private pool and CuPy's pool behind it. After a private pool was dropped, its CuPy pool stays here
        # while arrays use its memory.
        self._private: list[tuple[weakref.ref[PrivatePool], Any]] = []
        self._inner: Malloc = self._pool.malloc if malloc is None else malloc
        # If the user set CuPy's own limit, the pool raises CuPy's error before it calls `_cuda_malloc`.
        direct = self.counted and not os.environ.get("CUPY_GPU_MEMORY_LIMIT")
        self.malloc = self._inner if direct else self._malloc_with_our_error
        self._tracks_peak = False

    def of(self, device: int) -> DeviceCounts:
        """The counts of a device."""
        return self.counts.setdefault(device, DeviceCounts())

    def used_devices(self) -> list[int]:
        """The devices on which memory was allocated. To read the pool of another device would create a CUDA context."""
        return [device for device, counts in self.counts.copy().items() if counts.mallocs]

    def install(self) -> None:
        """Makes this CuPy's allocator. Raises: DeviceError inside of `cupy.cuda.using_allocator`."""
        try:
            self.cupy.cuda.set_allocator(self.malloc)
        except ValueError as error:
            raise DeviceError(f"the allocator of GPU memory cannot be changed here: {error}") from error
        _installed[:] = [self]

    def private_pool(self) -> PrivatePool:
        """A new pool for a CUDA graph. It allocates by `_cuda_malloc`, so its memory counts towards the limit."""
        self._free_dropped_pools()
        cupy_pool = self._counted_pool()
        pool = PrivatePool(cupy_pool)
        weakref.finalize(pool, self._free_dropped_pools).atexit = False
        self._private.append((weakref.ref(pool), cupy_pool))
        return pool

    def _free_dropped_pools(self) -> None:
        """Frees the free blocks of private pools that were dropped."""
        for entry in list(self._private):
            reference, cupy_pool = entry
            if reference() is not None:
                continue
            used = 0
            for device in self.used_devices():
                with self.cupy.cuda.Device(device):
                    cupy_pool.free_all_blocks()
                    used += cupy_pool.used_bytes()
            # A pool with arrays stays: without it, the blocks that these arrays are in would never be freed.
            if not used and entry in self._private:
                self._private.remove(entry)

    def allocated_and_reserved(self, device: int) -> tuple[int, int]:
        """Bytes that arrays hold on a device, and bytes that CUDA gave this process for arrays, free blocks included.

        If the user gave a function as the allocator, only the memory of CUDA graphs is counted.
        """
        if device not in self.used_devices():
            return 0, 0
        with self.cupy.cuda.Device(device):
            allocated = 0 if self._pool is None else int(self._pool.used_bytes())
            reserved = 0 if self.counted or self._pool is None else int(self._pool.total_bytes())
            allocated += sum(pool.used_bytes() for _, pool in list(self._private))
            return allocated, reserved + self.of(device).reserved

    def release(self, stream: Any = None) -> None:
        """Frees the free blocks of the current device, and those of dropped private pools on all devices.

        stream: if given, only this stream's blocks of the current device are freed
        """
        self._free_dropped_pools()
        if self._pool is not None:
            self._pool.free_all_blocks(stream)
        # CuPy's own pool has blocks that were allocated before this allocator was installed.
        self.cupy.get_default_memory_pool().free_all_blocks(stream)

    def reset_peaks(self, device: int) -> None:
        """Resets the peaks to what is allocated at present.

        After the first call, each allocation from CuPy's pool updates the peak of allocated bytes. An allocation
        from the private pool of a CUDA graph updates the peak only if that pool grows.
        """
        counts = self.of(device)
        counts.peak, counts.reserved_peak = self.allocated_and_reserved(device)
        if self.counted and not self._tracks_peak:
            self._tracks_peak = True
            self._inner = self.malloc
            self.malloc = self._malloc_and_track_peak
            self.install()

    def peak(self, device: int) -> int:
        """The peak of allocated bytes. Before the first `reset_peaks`, it is updated only when the pool grows."""
        return max(self.of(device).peak, self.allocated_and_reserved(device)[0])

    def set_limit(self, device: int, nbytes: int | None) -> None:
        """Limits the bytes that this process reserves on a device; None: no limit.

        Raises: DeviceError for an allocator other than "pool".
        """
        if not self.counted:
            raise DeviceError("a limit of GPU memory is for the allocator to keep: CUDA's, or the user's own")
        self.of(device).limit = nbytes

    def statistics(self, device: int) -> dict[str, int]:
        """Counts and bytes under PyTorch's names."""
        counts = self.of(device)
        allocated, reserved = self.allocated_and_reserved(device)
        return {
            **({"num_device_alloc": counts.mallocs, "num_device_free": counts.frees} if self.counted else {}),
            "num_alloc_retries": counts.retries,
            "num_ooms": counts.ooms,
            "allocated_bytes.all.current": allocated,
            "allocated_bytes.all.peak": self.peak(device),
            "reserved_bytes.all.current": reserved,
            "reserved_bytes.all.peak": counts.reserved_peak,
        }

    def _malloc_with_our_error(self, size: int) -> Any:
        try:
            pointer = self._inner(size)
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            raise self._error(size, self.cupy.cuda.runtime.getDevice()) from error
        if not self.counted:
            self.of(pointer.device_id).mallocs += 1
        return pointer

    def _malloc_and_track_peak(self, size: int) -> Any:
        pointer = self._inner(size)
        counts = self.of(pointer.device_id)
        counts.peak = max(counts.peak, self._pool.used_bytes())
        return pointer

    def _error(self, size: int, device: int) -> OutOfMemoryError:
        """Counts an allocation that failed. Returns the error for it, with a breakdown of the device's memory."""
        counts = self.of(device)
        allocated, reserved = self.allocated_and_reserved(device)
        counts.ooms += 1
        free, total = self.cupy.cuda.runtime.memGetInfo()
        cached = max(reserved - allocated, 0)
        external = max(total - free - reserved, 0)
        limit = counts.limit
        limited = ""
        if limit is not None:
            limited = f" This process is limited to {human(limit)} (set_per_process_memory_fraction)."
        error = OutOfMemoryError(
            f"cuda:{device} has no memory for another {human(size)}: of {human(total)}, tensors of this process hold "
            f"{human(allocated)}, its pool keeps {human(cached)} that no tensor holds, {human(external)} are "
            f"other processes' and CUDA's own, and {human(free)} are free.{limited} What helps: a smaller batch, "
            "autocast, autograd.checkpoint, ddp.parallel.ZeroOptimizer, no_grad() where possible; where enough is "
            "free, but in pieces, batches of one size or ddp.cuda.memory.use('async') at the start."
        )
        error.device = f"cuda:{device}"
        error.requested = size
        error.allocated = allocated
        error.reserved = reserved
        error.free = free
        error.total = total
        error.limit = limit
        return error

    def _counted_pool(self) -> Any:
        cuda = self.cupy.cuda
        return cuda.MemoryPool(cuda.PythonFunctionAllocator(self._cuda_malloc, self._cuda_free).malloc)

    def _cuda_malloc(self, size: int, device: int) -> int:
        """Calls cudaMalloc on `device`, which is the current device.

        If the device is full or the limit is reached, frees cached blocks and tries again. If that fails, too, waits
        for the device, collects garbage, frees cached blocks and tries a last time. In a capture it tries only once.
        Raises: OutOfMemoryError if the last try fails.
        """
        counts = self.of(device)
        address = self._try_malloc(size, counts)
        if address is None and not capture.stream_is_capturing(self.cupy):  # cudaFree would end the capture
            for collects_garbage in (False, True):
                if collects_garbage:
                    self.cupy.cuda.Device(device).synchronize()
                    stream_order.collect()
                    ipc.exported.collect()
                    gc.collect()
                counts.retries += 1
                self.release()
                address = self._try_malloc(size, counts)
                if address is not None:
                    break
        if address is None:
            raise self._error(size, device)
        counts.sizes[address] = size
        counts.mallocs += 1
        counts.reserved += size
        counts.reserved_peak = max(counts.reserved_peak, counts.reserved)
        counts.peak = max(counts.peak, self.allocated_and_reserved(device)[0] + size)
        return address

    def _try_malloc(self, size: int, counts: DeviceCounts) -> int | None:
        """The address of new memory; None if the device is full or the limit is reached."""
        if counts.limit is not None and counts.reserved + size > counts.limit:
            return None
        try:
            return int(self.cupy.cuda.runtime.malloc(size))
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            if error.status != NO_MEMORY:
                raise
            return None

    def _cuda_free(self, address: int, device: int, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit the driver frees all memory, and modules that this needs may be gone.
        if ending():
            return
        counts = self.counts[device]
        counts.frees += 1
        size = counts.sizes.pop(address, 0)
        counts.reserved -= size
        self.cupy.cuda.runtime.free(address)


_installed: list[Allocator] = []
_lock = threading.Lock()


def allocator(cupy: Any) -> Allocator:
    """The allocator of this process, installed at the first call.

    It is "pool" by default, "given" if the user called `cupy.cuda.set_allocator` before, or the one that `use` chose.
    Inside of `cupy.cuda.using_allocator` none can be installed. If there is none yet, a call there returns a new one,
    which CuPy does not use.
    """
    with _lock:
        if _installed and _installed[0].cupy is cupy:
            return _installed[0]
        previous = cupy.cuda.get_allocator()
        is_default = getattr(previous, "__self__", None) is cupy.get_default_memory_pool()
        new = Allocator(cupy) if is_default else Allocator(cupy, "given", previous)
        try:
            new.install()
        except DeviceError:
            pass
        return new


def private_pool(cupy: Any) -> PrivatePool:
    """A new pool for a CUDA graph. It may grow during a capture."""
    return allocator(cupy).private_pool()


def use(cupy: Any, which: str | Malloc) -> None:
    """Installs "pool", "async" or a function as the allocator.

    Raises: ArgumentError for anything else; DeviceError after the first allocation by another allocator, inside of
    `cupy.cuda.using_allocator`, or if the GPU has no cudaMallocAsync.
    """
    if not callable(which) and which not in ("pool", "async"):
        raise ArgumentError(
            f"memory.use({which!r}): expected 'pool', 'async' or an allocator as cupy.cuda.set_allocator takes it"
        )
    now = allocator(cupy)
    if which == now.name:
        return
    if now.used_devices():
        raise DeviceError(
            f"memory.use({which!r}): this process has tensors on a GPU already, or has had some, by {now.name!r}; "
            "choose before the first"
        )
    if which == "pool":
        Allocator(cupy).install()
    elif callable(which):
        Allocator(cupy, "given", which).install()
    else:
        try:
            pool = cupy.cuda.MemoryAsyncPool()
        except RuntimeError as error:
            raise DeviceError(
                f"memory.use('async'): this GPU has no cudaMallocAsync ({error}); use('pool') works"
            ) from error
        Allocator(cupy, "async", pool.malloc, pool).install()
