"""Sources of device memory besides CuPy's pool: CUDA's own pool, and an allocator that the user brings."""

from __future__ import annotations

from typing import Any

from ddp._gpu.memory_source import Book, Full, Malloc, Source
from ddp.errors import DeviceError

_UNIT = 512  # bytes; what CuPy rounds sizes up to
_EVER = 2**64 - 1  # as a release threshold: CUDA gives nothing back by itself


class Async(Source):
    """CUDA's own pool, by cudaMallocAsync: freed memory serves every stream, in the order that CUDA sees.

    CUDA does the counting, and says nothing of how often it asks the driver. Raises: DeviceError if a device has none.
    """

    name = "async"

    def __init__(self, cupy: Any) -> None:
        super().__init__(cupy)
        runtime = cupy.cuda.runtime
        for device in range(runtime.getDeviceCount()):
            if not runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryPoolsSupported, device):
                raise DeviceError(f"memory.use('async'): cuda:{device} has no cudaMallocAsync; use('pool') has all")
        self._handles: dict[int, int] = {}

    def _malloc(self, size: int) -> Any:
        device = self.cupy.cuda.runtime.getDevice()
        book = self._opened(device)

        def attempt() -> Any:
            if book.limit is not None and self.figures(device)[0] + size > book.limit:
                raise Full
            return self.cupy.cuda.malloc_async(-(-size // _UNIT) * _UNIT)

        pointer = None
        with self.no_memory():
            pointer = attempt()
        if pointer is None:
            pointer = self.again(size, device, attempt)
        book.allocations += 1
        return pointer

    def _opened(self, device: int) -> Book:
        if device not in self._handles:
            runtime = self.cupy.cuda.runtime
            self._handles[device] = handle = runtime.deviceGetMemPool(device)
            runtime.memPoolSetAttribute(handle, runtime.cudaMemPoolAttrReleaseThreshold, _EVER)
        return self.book(device)

    def _ask(self, device: int, name: str) -> int:
        runtime = self.cupy.cuda.runtime
        return int(runtime.memPoolGetAttribute(self._handles[device], getattr(runtime, f"cudaMemPoolAttr{name}")))

    def _held(self, device: int) -> int:
        return self._ask(device, "UsedMemCurrent") if device in self._handles else 0

    def _reserved(self, device: int) -> int:
        return self._ask(device, "ReservedMemCurrent") if device in self._handles else 0

    def release(self, stream: Any = None) -> None:
        super().release(stream)
        device = self.cupy.cuda.runtime.getDevice()
        if device in self._handles and stream is None:  # what is free serves every stream
            self.cupy.cuda.Device(device).synchronize()  # what was freed on a stream is free once the stream is there
            self.cupy.cuda.runtime.memPoolTrimTo(self._handles[device], 0)

    def reset_peaks(self, device: int) -> None:
        runtime = self.cupy.cuda.runtime
        self._opened(device)
        for name in (runtime.cudaMemPoolAttrUsedMemHigh, runtime.cudaMemPoolAttrReservedMemHigh):
            runtime.memPoolSetAttribute(self._handles[device], name, 0)  # which is all that CUDA lets it be set to

    def peak(self, device: int) -> int:
        return self._ask(device, "UsedMemHigh") if device in self._handles else 0

    def reserved_peak(self, device: int) -> int:
        return self._ask(device, "ReservedMemHigh") if device in self._handles else 0


class Given(Source):
    """An allocator of the user's own. It does its own counting; of its errors, CuPy's are told as ours."""

    name = "given"

    def __init__(self, cupy: Any, malloc: Malloc) -> None:
        super().__init__(cupy)
        self._given = malloc

    def _malloc(self, size: int) -> Any:
        try:
            pointer = self._given(size)
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            raise self.shortage(size, self.cupy.cuda.runtime.getDevice()) from error
        self.book(pointer.device_id).allocations += 1
        return pointer

    def _held(self, device: int) -> int:
        return 0  # it is not ours to know

    def set_limit(self, device: int, nbytes: int | None) -> None:
        raise DeviceError("a limit of GPU memory is for the allocator to keep that gives it, which is the user's own")
