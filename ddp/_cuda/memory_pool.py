"""Device memory: CuPy's pool over a counted cudaMalloc, a limit, and the error when a device is full.

CuPy's pool gets memory of CUDA through an allocator that it is given, and ours counts: it is called for a real
cudaMalloc or cudaFree and for nothing else, so an array out of the pool costs what it costs in CuPy. Limits and errors
belong there, too. The peak of what arrays hold is followed from the first `reset_peaks` on, which costs one more
call in Python an allocation (0.2 us).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ddp._cuda import capture, ipc, stream_order
from ddp.errors import ArgumentError, DeviceError, OutOfMemoryError

NO_MEMORY = 2  # cudaErrorMemoryAllocation
Malloc = Callable[[int], Any]


def human(nbytes: int) -> str:
    """Bytes as people read them: 1.50 GiB."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{nbytes} bytes" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def out_of_memory(
    device: int, *, requested: int, allocated: int, reserved: int, free: int, total: int, limit: int | None = None
) -> OutOfMemoryError:
    """The error for memory that is not to be had: who holds how much, and what helps. All in bytes."""
    cached, others = reserved - allocated, total - free - reserved
    if limit is not None and free >= requested:
        advice = "a higher limit"
    elif free + cached >= requested:
        advice = "batches of one size, or ddp.cuda.memory.use('async') at the start: enough is free, but in pieces"
    elif others > allocated:
        advice = "ending the other processes on this GPU (nvidia-smi names them)"
    else:
        advice = (
            "a smaller batch, autocast, autograd.checkpoint, ddp.parallel.ZeroOptimizer, or no_grad() where possible"
        )
    limited = "" if limit is None else f" This process is limited to {human(limit)} (set_per_process_memory_fraction)."
    error = OutOfMemoryError(
        f"cuda:{device} has no memory for another {human(requested)}: of {human(total)}, tensors of this process hold "
        f"{human(allocated)}, its pool keeps {human(max(cached, 0))} that no tensor holds, {human(max(others, 0))} are "
        f"other processes' and CUDA's own, and {human(free)} are free.{limited} What helps: {advice}."
    )
    error.device, error.requested, error.allocated, error.reserved = f"cuda:{device}", requested, allocated, reserved
    error.free, error.total, error.limit = free, total, limit
    return error


class Book:
    """What is known of one device: numbers of calls, bytes, and the limit.

    reserved: bytes of cudaMalloc; sizes: of its blocks, by address; peak: of what arrays hold, as far as that was seen
    """

    # Written with += alone, which no other thread can come between.
    def __init__(self) -> None:
        self.mallocs = self.frees = self.retries = self.shortages = self.allocations = 0
        self.reserved = self.reserved_peak = self.reserved_ever = self.peak = 0
        self.limit: int | None = None
        self.sizes: dict[int, int] = {}


class Private:
    """A pool whose free blocks are nobody else's, and never given back while it lives: a graph writes to them."""

    def __init__(self, pool: Any) -> None:
        self.malloc, self.used_bytes = pool.malloc, pool.used_bytes


class Source:
    """Where CuPy's arrays get their memory. `malloc` is what CuPy is given; subclasses say what lies behind it."""

    name = ""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.books: dict[int, Book] = {}
        self.malloc: Malloc = self._malloc
        # Private pools, and CuPy's behind them: one that is dropped leaks its free blocks (its arenas are cycles that
        # CuPy's garbage collection does not see), so it stays here until it has given them back.
        self._pools: list[tuple[weakref.ref[Private], Any]] = []

    def _malloc(self, size: int) -> Any:
        raise NotImplementedError

    def book(self, device: int) -> Book:
        """The book of a device."""
        found = self.books.get(device)
        return self.books.setdefault(device, Book()) if found is None else found

    def install(self) -> None:
        """Has CuPy ask here from now on. Raises: DeviceError where CuPy lets nobody."""
        try:
            self.cupy.cuda.set_allocator(self.malloc)
        except ValueError as error:
            raise DeviceError(f"the allocator of GPU memory cannot be changed here: {error}") from error

    def new_pool(self) -> Private:
        """A pool of cudaMalloc apart from all others, as a graph needs; it is counted along while it lives."""
        self._free_dropped()
        pool = self._counted_pool()
        found = Private(pool)
        self._pools.append((weakref.ref(found), pool))
        return found

    def _free_dropped(self) -> None:
        """Gives the memory of private pools that were dropped back to CUDA, once no array holds any of it."""
        if capture.now() is not None:
            return
        for each in [each for each in self._pools if each[0]() is None]:
            held = 0
            for device in list(self.books):
                with self.cupy.cuda.Device(device):
                    each[1].free_all_blocks()
                    held += each[1].used_bytes()
            if not held:
                with contextlib.suppress(ValueError):  # another thread came first
                    self._pools.remove(each)

    def figures(self, device: int) -> tuple[int, int]:
        """What arrays hold on a device that was used, and what is held for them, in bytes."""
        with self.cupy.cuda.Device(device):
            apart = sum(pool.used_bytes() for _, pool in list(self._pools))
        return self._held(device) + apart, self._reserved(device) + self.book(device).reserved

    def _held(self, device: int) -> int:
        """What arrays hold that are not in a private pool."""
        raise NotImplementedError

    def _reserved(self, device: int) -> int:
        """What is held for arrays and did not come by our own cudaMalloc."""
        return 0

    def release(self, stream: Any = None) -> None:
        """Gives what no array holds on the current device back to CUDA. stream: only what is kept for it"""
        self._free_dropped()

    def reset_peaks(self, device: int) -> None:
        """From here on the peak of what arrays hold is exact; it begins at what they hold now."""

    def peak(self, device: int) -> int:
        """The most that arrays held."""
        return max(self.book(device).peak, self.figures(device)[0])

    def reserved_peak(self, device: int) -> int:
        """The most that was held for arrays."""
        return self.book(device).reserved_peak

    def set_limit(self, device: int, nbytes: int | None) -> None:
        """How much this process may have; None: no limit."""
        self.book(device).limit = nbytes

    def statistics(self, device: int) -> dict[str, int]:
        """What is known, by PyTorch's names."""
        book = self.book(device)
        held, reserved = self.figures(device)
        return {
            "num_alloc_retries": book.retries,
            "num_ooms": book.shortages,
            "allocated_bytes.all.current": held,
            "allocated_bytes.all.peak": self.peak(device),
            "reserved_bytes.all.current": reserved,
            "reserved_bytes.all.peak": self.reserved_peak(device),
        }

    def shortage(self, size: int, device: int) -> Exception:
        """The error for `size` bytes that are not to be had on the current device."""
        book = self.book(device)
        book.shortages += 1
        free, total = self.cupy.cuda.runtime.memGetInfo()
        held, reserved = self.figures(device)
        return out_of_memory(
            device, requested=size, allocated=held, reserved=reserved, free=free, total=total, limit=book.limit
        )

    def again(self, size: int, device: int, attempt: Callable[[], Any]) -> Any:
        """`attempt`, which found no memory, once more after the pool's free blocks are CUDA's again.

        Raises: OutOfMemoryError.
        """
        if not capture.stream_is_capturing(self.cupy):  # CUDA frees nothing then, and would end the capture
            for collect in (False, True):
                if collect:
                    self.cupy.cuda.Device(device).synchronize()
                    stream_order.sweep()  # what other streams were using
                    ipc.exported.sweep()  # and other processes
                    gc.collect()
                self.book(device).retries += 1
                self.release()
                with self.no_memory():
                    return attempt()
        raise self.shortage(size, device)

    def _counted_pool(self) -> Any:
        """A pool of CuPy's, whose calls of cudaMalloc and cudaFree are counted."""
        return self.cupy.cuda.MemoryPool(self.cupy.cuda.PythonFunctionAllocator(self._more, self._less).malloc)

    def _more(self, size: int, device: int) -> int:
        """One cudaMalloc, on the current device. Raises: OutOfMemoryError."""
        book = self.book(device)

        def attempt() -> int:
            if book.limit is not None and self.figures(device)[1] + size > book.limit:
                raise Full
            with capture.relaxed():
                return int(self.cupy.cuda.runtime.malloc(size))

        address = None
        with self.no_memory():
            address = attempt()
        if address is None:
            address = self.again(size, device, attempt)
        book.sizes[address] = size
        book.mallocs += 1
        book.reserved += size
        book.reserved_ever += size
        book.reserved_peak = max(book.reserved_peak, book.reserved)
        book.peak = max(book.peak, self.figures(device)[0] + size)
        return int(address)

    def _less(self, address: int, device: int, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():  # the process's memory goes with it, and so may have what this needs
            return
        book = self.books[device]
        book.frees += 1
        book.reserved -= book.sizes.pop(address, 0)
        with capture.relaxed():  # whatever dies while a graph is captured, its memory is none of the graph's
            self.cupy.cuda.runtime.free(address)

    @contextlib.contextmanager
    def no_memory(self) -> Iterator[None]:
        """What finds no memory in the body ends it, without an error."""
        try:
            yield
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            if error.status != NO_MEMORY:
                raise
        except Full:  # the caller sees that it was given none
            pass


class Full(Exception):
    """The limit leaves no room; never leaves this module."""


class Other(Source):
    """An allocator that is not ours: CuPy's over cudaMallocAsync, or the user's own. Only its errors are translated.

    pool: says what is held, if there is one; None: the user's allocator, which does its own counting
    """

    def __init__(self, cupy: Any, name: str, malloc: Malloc, pool: Any = None) -> None:
        super().__init__(cupy)
        self.name, self._inner, self._pool = name, malloc, pool

    def _malloc(self, size: int) -> Any:
        try:
            pointer = self._inner(size)
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            raise self.shortage(size, self.cupy.cuda.runtime.getDevice()) from error
        self.book(pointer.device_id).allocations += 1
        return pointer

    def _held(self, device: int) -> int:
        with self.cupy.cuda.Device(device):
            return 0 if self._pool is None else int(self._pool.used_bytes())

    def _reserved(self, device: int) -> int:
        with self.cupy.cuda.Device(device):
            return 0 if self._pool is None else int(self._pool.total_bytes())

    def release(self, stream: Any = None) -> None:
        super().release(stream)
        if self._pool is not None:
            self._pool.free_all_blocks(stream)

    def set_limit(self, device: int, nbytes: int | None) -> None:
        raise DeviceError("a limit of GPU memory is for the allocator to keep that gives it: CUDA's, or the user's own")


def _async(cupy: Any) -> Other:
    try:
        pool = cupy.cuda.MemoryAsyncPool()
    except RuntimeError as error:
        raise DeviceError(
            f"memory.use('async'): this GPU has no cudaMallocAsync ({error}); use('pool') works"
        ) from error
    return Other(cupy, "async", pool.malloc, pool)


class Pool(Source):
    """CuPy's pool, with an arena for each stream, over cudaMalloc that is counted."""

    name = "pool"

    def __init__(self, cupy: Any) -> None:
        super().__init__(cupy)
        self.pool = self._counted_pool()
        self._following = False
        self.malloc = self.pool.malloc
        if os.environ.get("CUPY_GPU_MEMORY_LIMIT"):  # then CuPy refuses, before we are asked
            self.malloc = self._guarded

    def _held(self, device: int) -> int:
        with self.cupy.cuda.Device(device):
            return int(self.pool.used_bytes())

    def release(self, stream: Any = None) -> None:
        super().release(stream)
        self.pool.free_all_blocks(stream)
        self.cupy.get_default_memory_pool().free_all_blocks(stream)  # of arrays that were made before ours came

    def statistics(self, device: int) -> dict[str, int]:
        book = self.book(device)
        known = super().statistics(device)
        return {
            "num_device_alloc": book.mallocs,
            "num_device_free": book.frees,
            **known,
            "reserved_bytes.all.allocated": book.reserved_ever,
            "segment.all.current": len(book.sizes),
            "segment.all.allocated": book.mallocs,
            "segment.all.freed": book.frees,
        }

    def reset_peaks(self, device: int) -> None:
        book = self.book(device)
        book.peak, book.reserved_peak = self.figures(device)
        if not self._following:
            self._following, self.malloc = True, self._followed(self.malloc)
            self.install()

    def _followed(self, malloc: Malloc) -> Malloc:
        used, books = self.pool.used_bytes, self.books

        def followed(size: int) -> Any:
            pointer = malloc(size)
            book = books.get(pointer.device_id)
            if book is not None:  # None: the first allocation of a device, of no bytes
                book.allocations += 1
                held = used()
                if held > book.peak:
                    book.peak = held
            return pointer

        return followed

    def _guarded(self, size: int) -> Any:
        try:
            return self.pool.malloc(size)
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            raise self.shortage(size, self.cupy.cuda.runtime.getDevice()) from error


_source: list[Source] = []
_lock = threading.Lock()


def source(cupy: Any) -> Source:
    """Where this process's arrays get their memory: CuPy's pool, unless the user has set an allocator or chosen.

    Inside of `cupy.cuda.using_allocator` CuPy lets nobody in: then it is what is used there, for as long.
    """
    if not _source or _source[0].cupy is not cupy:
        with _lock:
            if not _source or _source[0].cupy is not cupy:
                before = cupy.cuda.get_allocator()
                is_cupys = getattr(before, "__self__", None) is cupy.get_default_memory_pool()
                found = Pool(cupy) if is_cupys else Other(cupy, "given", before)
                try:
                    _hand(found)
                except DeviceError:
                    return found
    return _source[0]


def _hand(one: Source) -> None:
    one.install()
    _source[:] = [one]


def use(cupy: Any, which: str | Malloc) -> None:
    """Chooses: "pool", "async" or a function. Raises: ArgumentError; DeviceError after the first allocation."""
    if not callable(which) and which not in ("pool", "async"):
        raise ArgumentError(
            f"memory.use({which!r}): expected 'pool', 'async' or an allocator as cupy.cuda.set_allocator takes it"
        )
    now = source(cupy)
    if which == now.name and now.name != "given":
        return
    if any(book.mallocs or book.allocations for book in now.books.values()):
        raise DeviceError(
            f"memory.use({which!r}): this process has tensors on a GPU already, or has had some, by {now.name!r}; "
            "choose before the first"
        )
    _hand(Other(cupy, "given", which) if callable(which) else Pool(cupy) if which == "pool" else _async(cupy))
