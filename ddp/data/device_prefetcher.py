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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ddp._device import device, found_cupy, on
from ddp._tensor.base import TensorBase, wrap
from ddp.data.collate import mapping_like

_ALIGNMENT = 512  # bytes
_BUFFERS = 2
_THREADS = 4  # one core writes 10 GB/s or so, and a bus takes several times that
_PIECE = 4 << 20  # bytes that are worth a thread

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
        arrays = [tensor.array for tensor in tensors_of(batch)]
        buffer = self._buffers[0]
        sources, staging = self._staged(arrays, buffer)
        with self._xp.cuda.Device(self._stream.device):
            self._stream.after(self._streams.current(self._xp))
            moved = [self._xp.empty(array.shape, array.dtype) for array in arrays]
            for there, source in zip(moved, sources, strict=True):
                if source.nbytes:
                    there.set(source, stream=self._stream.stream)
        arrived = self._stream.record()
        if staging:
            buffer.copied = arrived
            self._buffers.reverse()
        # Also if this batch is never taken.
        self._streams.hold(self._stream, moved, sources, event=arrived)
        where = device("cuda", self._stream.device)
        following = iter([wrap(there, where) for there in moved])
        return each_tensor(batch, lambda x: next(following)), arrived

    def _staged(self, arrays: list[Any], buffer: _PinnedBuffer) -> tuple[list[Any], bool]:
        """The same numbers in pinned memory, and whether some of them are in the buffer."""
        pinned = [array.flags.c_contiguous and self._copies.is_pinned(self._xp, array, ours=True) for array in arrays]
        starts, end = [], 0
        for array, there in zip(arrays, pinned, strict=True):
            starts.append(end)
            end += 0 if there else -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not end:
            return arrays, False
        take = buffer.take(end)
        staged = []
        for array, there, start in zip(arrays, pinned, starts, strict=True):
            if not there:
                source, array = array, take[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
                _write(array, source)
            staged.append(array)
        return staged, True


@functools.cache
def _writers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "ddp-pinning")


def _write(target: Any, source: Any) -> None:
    """target[...] = source; what is large by several threads, as NumPy lets go of the interpreter while it copies."""
    if source.nbytes < 2 * _PIECE or not source.flags.c_contiguous:
        target[...] = source
        return
    to, of = target.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8)
    step = max(_PIECE, -(-len(of) // _THREADS))
    pieces = [slice(start, start + step) for start in range(0, len(of), step)]
    done = [_writers().submit(np.copyto, to[piece], of[piece]) for piece in pieces[1:]]
    np.copyto(to[pieces[0]], of[pieces[0]])
    for each in done:
        each.result()


def tensors_of(batch: Any) -> list[Any]:
    """The tensors that `each_tensor` changes, in its order."""
    found: list[Any] = []

    def keep(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    each_tensor(batch, keep)
    return found


def each_tensor(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with `change(tensor)` in the place of each tensor on the CPU, within mappings and sequences."""
    if isinstance(batch, TensorBase):
        return change(batch) if batch.device.type == "cpu" else batch
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: each_tensor(value, change) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(each_tensor(value, change) for value in batch)
    return batch
