"""Batches on their way to the GPU while the step before runs there: through pinned memory, on a stream of their own.

A copy from ordinary memory makes the processor wait; one from pinned memory runs during the computation. What is pinned
already is copied from where it is. For all else there are two pinned buffers: while one batch is copied out of the
first, the next is written into the second. The host waits only where it is so far ahead of the GPU that both are in
use.

The GPU's memory for a batch belongs to the stream that computes: the allocator gives it to later work of that stream
when the batch is dropped. So the copy waits for what that stream was issued before, and that stream for the copy.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ddp._device import device, found_cupy, on
from ddp._tensor.base import TensorBase, wrap
from ddp.data.collate import map_batch

_ALIGNMENT = 512  # bytes
_BUFFERS = 2

_warned = False


def prefetch_to_device(batches: Any, wanted: bool, where: str) -> Iterator[Any]:
    """The same batches, their tensors on the GPU `where` ("": the current one) if that is wanted, and there is one."""
    global _warned
    if not wanted:
        return batches
    xp = found_cupy()
    if xp is None:
        if not _warned:
            _warned = True
            warnings.warn("pin_memory=True, but there is no GPU: batches stay where they are", stacklevel=4)
        return batches
    return DevicePrefetcher(batches, device(where or "cuda"))


class _PinnedBuffer:
    """Pinned memory for one batch, and the event after which it may be written to again."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self.memory: Any = np.empty(0, np.uint8)
        self.copied: Any = None  # a copy reads the memory until then

    def take(self, nbytes: int) -> Any:
        """(nbytes) uint8 that no copy reads any more."""
        if self.copied is not None:
            if not self.copied.done:
                self.copied.synchronize()
            self.copied = None
        if len(self.memory) < nbytes:
            self.memory = np.frombuffer(self._xp.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        return self.memory


class DevicePrefetcher(Iterator[Any]):
    """Batches of an iterator, on the GPU `where`. `batches.ready()` says whether the next one can be had at once."""

    def __init__(self, batches: Any, where: device) -> None:
        from ddp._cuda import copies, stream_order

        self._batches, self._where, self._xp = batches, where, where.xp
        self._copies, self._streams = copies, stream_order
        with on(where):
            index = self._xp.cuda.runtime.getDevice()
            self._stream = stream_order.DeviceStream(self._xp, index, self._xp.cuda.Stream(non_blocking=True))
        self._buffers = [_PinnedBuffer(self._xp) for _ in range(_BUFFERS)]
        self._sent: tuple[Any, Any] | None = None  # a batch under way, and the event of its arrival
        self._failed: BaseException | None = None  # why there is no batch after that

    def __next__(self) -> Any:
        if self._sent is None:
            if self._failed is not None:
                raise self._failed
            self._sent = self._send(next(self._batches))
        (batch, arrived), self._sent = self._sent, None
        if self._batches.ready():
            try:
                self._sent = self._send(next(self._batches))
            except Exception as error:
                self._failed = error
        self._streams.current(self._xp, self._stream.device).wait(arrived)
        return batch

    def _send(self, batch: Any) -> tuple[Any, Any]:
        arrays: list[Any] = []

        def note(tensor: Any) -> Any:
            arrays.append(tensor.array)
            return tensor  # a class of the user's is made anew with it, and may refuse None

        each_tensor(batch, note)
        buffer = self._buffers[0]
        sources, staging = self._staged(arrays, buffer)
        with self._xp.cuda.Device(self._stream.device):
            self._stream.after(self._streams.current(self._xp))
            moved = [self._xp.empty(array.shape, array.dtype) for array in arrays]
            for target, source in zip(moved, sources, strict=True):
                if source.nbytes:
                    target.set(source, stream=self._stream.stream)
        arrived = self._stream.record()
        if staging:
            buffer.copied = arrived
            self._buffers.reverse()
        # Also if this batch is never taken.
        self._streams.hold(self._stream, moved, sources, event=arrived)
        where = device("cuda", self._stream.device)
        following = iter([wrap(array, where) for array in moved])
        return each_tensor(batch, lambda tensor: next(following)), arrived

    def _staged(self, arrays: list[Any], buffer: _PinnedBuffer) -> tuple[list[Any], bool]:
        """The same numbers in pinned memory, and whether some of them are in the buffer."""
        staged, starts, end = list(arrays), {}, 0
        for number, array in enumerate(arrays):
            if array.nbytes and not (array.flags.c_contiguous and self._copies.is_pinned(self._xp, array, ours=True)):
                starts[number] = end
                end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = buffer.take(end) if end else buffer.memory
        for number, start in starts.items():
            array = arrays[number]
            staged[number] = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            staged[number][...] = array
        return staged, bool(end)


def each_tensor(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with `change(tensor)` in the place of each tensor on the CPU, within mappings and sequences."""
    if isinstance(batch, TensorBase):
        return change(batch) if batch.device.type == "cpu" else batch
    return map_batch(batch, functools.partial(each_tensor, change=change))
