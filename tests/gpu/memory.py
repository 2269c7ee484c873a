"""Device memory: a pool with an arena for each stream, as CuPy's is, over host memory that nothing else touches.

What is freed is scribbled over in its stream's order, as whoever is given it next would: an array that is read after
its last reference went, or on a stream that nobody ordered, holds garbage.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.collectives.backends.device.machine import GARBAGE

if TYPE_CHECKING:
    from tests.gpu.standin import Cupy

UNIT = 512
ALIGN = 256
NO_MEMORY = 2  # cudaErrorMemoryAllocation


class CUDARuntimeError(RuntimeError):
    """`cupy.cuda.runtime.CUDARuntimeError`."""

    def __init__(self, status: int, what: str = "") -> None:
        self.status = status
        super().__init__(what or f"cudaErrorUnknown: the stand-in's error {status}")


def blocks_of(cupy: Cupy) -> tuple[Any, Any]:
    """`runtime.malloc` and `runtime.free`: the memory beneath all pools, counted."""

    def malloc(nbytes: int) -> int:
        device = cupy.local.device
        if cupy.held[device] + nbytes > cupy.capacity:
            raise CUDARuntimeError(NO_MEMORY, "cudaErrorMemoryAllocation: out of memory")
        cupy.captures.unsafe("cudaMalloc")
        cupy.record.mallocs += 1
        cupy.held[device] += nbytes
        whole = np.empty(nbytes + ALIGN, np.uint8)
        start = -whole.ctypes.data % ALIGN
        raw = whole[start : start + nbytes]
        raw[...] = GARBAGE
        if not cupy.machine.eager:
            cupy.machine.memory.append(raw)  # a stray pointer hits garbage, and no other's memory
        address = raw.ctypes.data
        cupy.blocks[address] = raw
        cupy.places[address] = device
        return address

    def free(address: int) -> None:
        cupy.captures.unsafe("cudaFree")
        cupy.record.frees += 1
        cupy.held[cupy.places.pop(address)] -= cupy.blocks.pop(address).size

    return malloc, free


class OutOfMemoryError(MemoryError):
    """`cupy.cuda.memory.OutOfMemoryError`."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        told = f" (limit set to: {limit:,} bytes)" if limit else ""
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes{told}).")


class _Piece:
    """A piece of device memory. raw: (n,) uint8, n a multiple of 512"""

    cupy: Any

    def __init__(self, raw: Any, device: int) -> None:
        self.raw = raw
        self.size = raw.size
        self.ptr = raw.ctypes.data
        self.device_id = device


class _Unowned:
    cupy: Any
    """`cupy.cuda.UnownedMemory`: memory of somebody else's at an address."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr = ptr
        self.size = size
        self._owner = owner
        self.device_id = max(device_id, 0)
        self.raw = np.frombuffer((ctypes.c_char * size).from_address(ptr), np.uint8) if size else np.empty(0, np.uint8)


class MemoryPointer:
    """`cupy.cuda.MemoryPointer`: an address within a piece of memory, which it keeps alive."""

    def __init__(self, mem: Any, offset: int = 0) -> None:
        self.mem = mem
        self.offset = offset
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.offset + offset)

    __radd__ = __add__

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any) -> None:
        self.mem.cupy.cuda.runtime.memcpyAsync(self.ptr, src.ptr, size, 3, stream.ptr)


def pool_classes(cupy: Cupy) -> dict[str, Any]:
    """The classes of `cupy.cuda` that give memory."""

    class Piece(_Piece):
        pass

    class UnownedMemory(_Unowned):
        pass

    Piece.cupy = UnownedMemory.cupy = cupy
    cupy.arenas = []

    class Memory(Piece):
        """`cupy.cuda.Memory`: one cudaMalloc."""

        def __init__(self, size: int) -> None:
            device = cupy.local.device
            address = cupy.cuda.runtime.malloc(size)
            super().__init__(cupy.blocks[address], device)
            weakref.finalize(self, cupy.cuda.runtime.free, address).atexit = False

    class PythonFunctionAllocatorMemory(Piece):
        def __init__(self, size: int, malloc: Any, free: Any) -> None:
            device = cupy.local.device
            address = malloc(size, device)
            super().__init__(cupy.blocks[address], device)
            weakref.finalize(self, free, address, device).atexit = False

    class PythonFunctionAllocator:
        """`cupy.cuda.PythonFunctionAllocator`."""

        def __init__(self, malloc_func: Any, free_func: Any) -> None:
            self._malloc = malloc_func
            self._free = free_func

        def malloc(self, size: int) -> MemoryPointer:
            return MemoryPointer(PythonFunctionAllocatorMemory(size, self._malloc, self._free), 0)

    class MemoryPool:
        """`cupy.cuda.MemoryPool`."""

        def __init__(self, allocator: Any = None) -> None:
            self._allocator = allocator or (lambda size: MemoryPointer(Memory(size), 0))
            self._free: dict[tuple[int, int], dict[int, list[Any]]] = {}  # by device and stream, by size
            cupy.arenas.append(self._free)  # what is free when a pool is dropped stays: CuPy's arenas leak
            self._used: dict[int, int] = {}
            self._total: dict[int, int] = {}
            self._limits: dict[int, int] = {}

        def malloc(self, size: int) -> MemoryPointer:
            device = cupy.local.device
            if size == 0:
                return MemoryPointer(Piece(np.empty(0, np.uint8), device))
            with cupy.machine.lock:
                return self._given(-(-size // UNIT) * UNIT, device)

        def _given(self, size: int, device: int) -> MemoryPointer:
            stream = cupy.handle(cupy.current(device).ptr)
            free = self._free.setdefault((device, stream), {}).setdefault(size, [])
            if free:
                raw, base = free.pop()
            else:
                raw, base = self._more(size, device)
                self._total[device] = self._total.get(device, 0) + size
            self._used[device] = self._used.get(device, 0) + size
            piece = Piece(raw, device)
            captured = stream in cupy.capturing
            given = weakref.ref(self), raw, base, device, stream, free, captured
            weakref.finalize(piece, self._back, *given).atexit = False
            return MemoryPointer(piece)

        def _more(self, size: int, device: int) -> tuple[Any, Any]:
            limit = self._limits.get(device, 0)
            total = self.total_bytes()
            if limit and total + size > limit:
                self.free_all_blocks()
                if self.total_bytes() + size > limit:
                    raise OutOfMemoryError(size, self.total_bytes(), limit)
            try:
                base = self._allocator(size)
            except CUDARuntimeError as error:
                if error.status != NO_MEMORY:
                    raise
                self.free_all_blocks()
                try:
                    base = self._allocator(size)
                except CUDARuntimeError:
                    raise OutOfMemoryError(size, self.total_bytes(), limit) from None
            return base.mem.raw[:size], base

        @staticmethod
        def _back(pool: Any, raw: Any, base: Any, device: int, stream: int, free: list[Any], captured: bool) -> None:
            self = pool()
            with cupy.machine.lock:  # nobody is given it before it is scribbled over
                if self is not None:
                    self._used[device] -= raw.size
                # What is freed in a capture is somebody else's at that point of every launch, within the graph alone.
                if not captured:
                    cupy.put(stream, "free", lambda: raw.fill(GARBAGE))
                elif stream in cupy.capturing:
                    cupy.captures.add(stream, "free", lambda: raw.fill(GARBAGE))
                if self is not None:
                    free.append((raw, base))

        def free_all_blocks(self, stream: Any = None) -> None:
            device = cupy.local.device
            for (where, of), sizes in self._free.items():
                if where == device and (stream is None or of == cupy.handle(stream.ptr)):
                    for blocks in sizes.values():
                        for raw, _ in blocks:
                            self._total[device] -= raw.size
                        blocks.clear()

        def used_bytes(self) -> int:
            return self._used.get(cupy.local.device, 0)

        def total_bytes(self) -> int:
            return self._total.get(cupy.local.device, 0)

        def set_limit(self, size: int) -> None:
            self._limits[cupy.local.device] = size

    class MemoryAsyncPool(MemoryPool):
        """`cupy.cuda.MemoryAsyncPool`."""

        def __init__(self, pool_handles: Any = "current") -> None:
            super().__init__()

    def pinned(nbytes: int) -> Any:
        raw = np.full(max(nbytes, 1), GARBAGE, np.uint8)
        cupy.pinned.add(raw.ctypes.data, raw.size)
        kind = type("PinnedMemoryPointer", (ctypes.c_char * raw.size,), {"ptr": property(ctypes.addressof)})
        pointer = kind.from_buffer(raw)
        cupy.machine.memory.append(raw)
        # Host memory has no stream's order: it is somebody else's at once.
        weakref.finalize(pointer, raw.fill, GARBAGE).atexit = False
        return pointer

    return {
        "Memory": Memory,
        "PythonFunctionAllocator": PythonFunctionAllocator,
        "MemoryPool": MemoryPool,
        "MemoryAsyncPool": MemoryAsyncPool,
        "alloc_pinned_memory": pinned,
        "MemoryPointer": MemoryPointer,
        "UnownedMemory": UnownedMemory,
    }


class Pinned:
    """Which host addresses are pinned."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, start: int, nbytes: int) -> None:
        self._ranges.append((start, start + nbytes))

    def __contains__(self, address: int) -> bool:
        return any(low <= address < high for low, high in self._ranges)
