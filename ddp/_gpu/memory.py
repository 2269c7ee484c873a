"""Device memory: who gives it, what is counted, and a second try before there is none.

CuPy's pool gets memory of CUDA through an allocator that it is handed, and ours counts. It is called for a real
cudaMalloc or cudaFree and for nothing else: an array out of the pool costs what it costs in CuPy, and that a training
step makes no cudaMalloc can be counted. Limits are held and errors made there, too, on the way that is slow anyway.

What only an allocation out of the pool could tell, the peak of what arrays hold, is followed from the first
`reset_peaks` on; from then an allocation costs one more call in Python (0.2 us).
"""

from __future__ import annotations

import os
import threading
from typing import Any

from ddp._gpu.memory_others import Async, Given
from ddp._gpu.memory_source import Malloc, Source
from ddp.errors import ArgumentError, DeviceError


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
                found = Pool(cupy) if is_cupys else Given(cupy, before)
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
    _hand(Given(cupy, which) if callable(which) else Pool(cupy) if which == "pool" else Async(cupy))
