"""Device memory: CuPy's pool over a cudaMalloc that is counted, a limit, and the error for a full device.

CuPy's pool asks `Allocator._cuda_malloc` for a real cudaMalloc and for nothing else, so an array out of the pool costs
what it costs in CuPy. The peak of what arrays hold is followed from the first `reset_peaks` on, which costs one more
Python call for each allocation.
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

NO_MEMORY = 2  # cudaErrorMemoryAllocation
Malloc = Callable[[int], Any]


def human(nbytes: int) -> str:
    """Bytes for people: 1.50 GiB."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{nbytes} bytes" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


@dataclass
class DeviceCounts:
    """What is known of one device. sizes: bytes of each block of cudaMalloc, by address; the rest: calls and bytes."""

    # Written with += alone, which no other thread can come between.
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
    """A pool of a CUDA graph: its free blocks are not reused elsewhere, and go back to CUDA when it is dropped."""

    def __init__(self, pool: Any) -> None:
        self.malloc = pool.malloc


class Allocator:
    """Where CuPy's arrays get their memory.

    name: "pool" (CuPy's pool over the counted cudaMalloc), "async" (cudaMallocAsync), "given" (the user's own)
    malloc, pool: of the latter two, of which only errors are translated; pool: says what is held, if there is one
    """

    def __init__(self, cupy: Any, name: str = "pool", malloc: Malloc | None = None, pool: Any = None) -> None:
        self.cupy, self.name = cupy, name
        self.counts: dict[int, DeviceCounts] = {}
        self.counted = malloc is None
        self._pool = self._counted_pool() if self.counted else pool
        # CuPy's pools of graphs; one whose graph was dropped stays while arrays lie in it.
        self._private: list[tuple[weakref.ref[PrivatePool], Any]] = []
        self._inner: Malloc = self._pool.malloc if malloc is None else malloc
        # CuPy refuses by a limit of its own before it asks for memory.
        direct = self.counted and not os.environ.get("CUPY_GPU_MEMORY_LIMIT")
        self.malloc = self._inner if direct else self._translated
        self._follows_peak = False

    def of(self, device: int) -> DeviceCounts:
        """The counts of a device."""
        return self.counts.setdefault(device, DeviceCounts())

    def install(self) -> None:
        """Has CuPy allocate here from now on. Raises: DeviceError inside of `cupy.cuda.using_allocator`."""
        try:
            self.cupy.cuda.set_allocator(self.malloc)
        except ValueError as error:
            raise DeviceError(f"the allocator of GPU memory cannot be changed here: {error}") from error
        _installed[:] = [self]

    def private_pool(self) -> PrivatePool:
        """A pool for a graph, on cudaMalloc; it is counted with the others."""
        self._free_dropped()
        cupys = self._counted_pool()
        pool = PrivatePool(cupys)
        weakref.finalize(pool, self._free_dropped).atexit = False
        self._private.append((weakref.ref(pool), cupys))
        return pool

    def _free_dropped(self) -> None:
        """Gives free blocks of private pools that were dropped, now or earlier, back to CUDA."""
        for each in list(self._private):
            if each[0]() is not None:
                continue
            held = 0
            for device in list(self.counts):
                with self.cupy.cuda.Device(device):
                    each[1].free_all_blocks()
                    held += each[1].used_bytes()
            # Dropped with its pool, a block of which an array holds a part would never be freed.
            if not held and each in self._private:
                self._private.remove(each)

    def held(self, device: int) -> tuple[int, int]:
        """Bytes that arrays hold on a device, and bytes that CUDA gave for them."""
        with self.cupy.cuda.Device(device):
            own = 0 if self._pool is None else int(self._pool.used_bytes())
            reserved = 0 if self.counted or self._pool is None else int(self._pool.total_bytes())
            own += sum(pool.used_bytes() for _, pool in list(self._private))
            return own, reserved + self.of(device).reserved

    def release(self, stream: Any = None) -> None:
        """Gives blocks that no array holds on the current device back to CUDA. stream: those of this stream alone"""
        self._free_dropped()
        if self._pool is not None:
            self._pool.free_all_blocks(stream)
        self.cupy.get_default_memory_pool().free_all_blocks(stream)  # of arrays that were made before this one came

    def reset_peaks(self, device: int) -> None:
        """The peaks begin at what is held now, and are exact from here on."""
        counts = self.of(device)
        counts.peak, counts.reserved_peak = self.held(device)
        if self.counted and not self._follows_peak:
            self._follows_peak, self._inner, self.malloc = True, self.malloc, self._followed
            self.install()

    def peak(self, device: int) -> int:
        """The most bytes that arrays held, as far as it was seen."""
        return max(self.of(device).peak, self.held(device)[0])

    def set_limit(self, device: int, nbytes: int | None) -> None:
        """How many bytes this process may have of a device; None: no limit. Raises: DeviceError."""
        if not self.counted:
            raise DeviceError("a limit of GPU memory is for the allocator to keep: CUDA's, or the user's own")
        self.of(device).limit = nbytes

    def statistics(self, device: int) -> dict[str, int]:
        """Counts and bytes by PyTorch's names."""
        counts, (held, reserved) = self.of(device), self.held(device)
        return {
            **({"num_device_alloc": counts.mallocs, "num_device_free": counts.frees} if self.counted else {}),
            "num_alloc_retries": counts.retries,
            "num_ooms": counts.ooms,
            "allocated_bytes.all.current": held,
            "allocated_bytes.all.peak": self.peak(device),
            "reserved_bytes.all.current": reserved,
            "reserved_bytes.all.peak": counts.reserved_peak,
        }

    def _translated(self, size: int) -> Any:
        try:
            pointer = self._inner(size)
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            raise self._error(size, self.cupy.cuda.runtime.getDevice()) from error
        if not self.counted:
            self.of(pointer.device_id).mallocs += 1
        return pointer

    def _followed(self, size: int) -> Any:
        pointer = self._inner(size)
        counts = self.of(pointer.device_id)
        counts.peak = max(counts.peak, self._pool.used_bytes())
        return pointer

    def _error(self, size: int, device: int) -> OutOfMemoryError:
        """The error for a full device: who holds how much."""
        counts, (held, reserved) = self.of(device), self.held(device)
        counts.ooms += 1
        free, total = self.cupy.cuda.runtime.memGetInfo()
        cached, others, limit = max(reserved - held, 0), max(total - free - reserved, 0), counts.limit
        limited = ""
        if limit is not None:
            limited = f" This process is limited to {human(limit)} (set_per_process_memory_fraction)."
        error = OutOfMemoryError(
            f"cuda:{device} has no memory for another {human(size)}: of {human(total)}, tensors of this process hold "
            f"{human(held)}, its pool keeps {human(cached)} that no tensor holds, {human(others)} are "
            f"other processes' and CUDA's own, and {human(free)} are free.{limited} What helps: a smaller batch, "
            "autocast, autograd.checkpoint, ddp.parallel.ZeroOptimizer, no_grad() where possible; where enough is "
            "free, but in pieces, batches of one size or ddp.cuda.memory.use('async') at the start."
        )
        error.device, error.requested, error.allocated, error.reserved = f"cuda:{device}", size, held, reserved
        error.free, error.total, error.limit = free, total, limit
        return error

    def _counted_pool(self) -> Any:
        cuda = self.cupy.cuda
        return cuda.MemoryPool(cuda.PythonFunctionAllocator(self._cuda_malloc, self._cuda_free).malloc)

    def _cuda_malloc(self, size: int, device: int) -> int:
        """One cudaMalloc on the current device; cached blocks and garbage are freed before it fails.

        Raises: OutOfMemoryError.
        """
        counts = self.of(device)
        address = self._try_malloc(size, counts)
        if address is None and not capture.stream_is_capturing(self.cupy):  # cudaFree would end the capture
            for collect in (False, True):
                if collect:
                    self.cupy.cuda.Device(device).synchronize()
                    stream_order.sweep()  # what other streams were using
                    ipc.exported.sweep()  # and other processes
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
        counts.peak = max(counts.peak, self.held(device)[0] + size)
        return address

    def _try_malloc(self, size: int, counts: DeviceCounts) -> int | None:
        """The address, or None where the device or the limit leaves no room."""
        if counts.limit is not None and counts.reserved + size > counts.limit:
            return None
        try:
            return int(self.cupy.cuda.runtime.malloc(size))
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            if error.status != NO_MEMORY:
                raise
            return None

    def _cuda_free(self, address: int, device: int, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():  # the process's memory goes with it, and so may have what this needs
            return
        counts = self.counts[device]
        counts.frees += 1
        counts.reserved -= counts.sizes.pop(address, 0)
        self.cupy.cuda.runtime.free(address)


_installed: list[Allocator] = []
_lock = threading.Lock()


def allocator(cupy: Any) -> Allocator:
    """The process's allocator: over CuPy's pool, unless the user has set an allocator or chosen one by `use`.

    Inside of `cupy.cuda.using_allocator` CuPy takes no other: then a new one is returned that is not installed.
    """
    with _lock:
        if _installed and _installed[0].cupy is cupy:
            return _installed[0]
        before = cupy.cuda.get_allocator()
        is_cupys = getattr(before, "__self__", None) is cupy.get_default_memory_pool()
        made = Allocator(cupy) if is_cupys else Allocator(cupy, "given", before)
        try:
            made.install()
        except DeviceError:
            pass
        return made


def use(cupy: Any, which: str | Malloc) -> None:
    """Chooses: "pool", "async" or a function. Raises: ArgumentError; DeviceError after the first allocation."""
    if not callable(which) and which not in ("pool", "async"):
        raise ArgumentError(
            f"memory.use({which!r}): expected 'pool', 'async' or an allocator as cupy.cuda.set_allocator takes it"
        )
    now = allocator(cupy)
    if which == now.name:
        return
    if any(each.mallocs for each in now.counts.values()):
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
