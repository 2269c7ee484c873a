"""What all sources of device memory have in common: a book for each device, and a second try before an error."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ddp._gpu import capture, claims, streams
from ddp._gpu.memory_shortage import Figures, shortage
from ddp.errors import DeviceError

NO_MEMORY = 2  # cudaErrorMemoryAllocation
Malloc = Callable[[int], Any]


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
        figures = Figures(asked=size, held=held, reserved=reserved, free=free, total=total, limit=book.limit)
        return shortage(self.cupy, device, figures)

    def again(self, size: int, device: int, attempt: Callable[[], Any]) -> Any:
        """`attempt`, which found no memory, once more after the pool's free blocks are CUDA's again.

        Raises: OutOfMemoryError.
        """
        if not capture.stream_is_capturing(self.cupy):  # CUDA frees nothing then, and would end the capture
            for collect in (False, True):
                if collect:
                    self.cupy.cuda.Device(device).synchronize()
                    streams.sweep()  # what other streams were using
                    claims.sent.sweep()  # and other processes
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
