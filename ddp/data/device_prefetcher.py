"""Copies batches to the GPU while the previous step runs there: through pinned memory, on a separate stream.

A copy from ordinary memory makes the CPU wait; a copy from pinned memory runs during the computation. Contiguous arrays
in CuPy's pinned memory are copied directly. All others are first copied to CuPy's pool of pinned memory.

The GPU's memory for a batch belongs to the stream that computes: the allocator gives it to later work of that stream
when the batch is dropped. So the copy waits for the earlier work of that stream, and the stream waits for the copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from ddp._device import device, found_cupy, on
from ddp._tensor.base import TensorBase, wrap
from ddp.data.collate import map_batch
from ddp.errors import warn_once


def prefetch_to_device(batches: Any, wanted: bool, device_name: str) -> Iterator[Any]:
    """Returns an iterator over the batches, which copies their tensors to a GPU.

    Without a GPU, or if not `wanted`, returns `batches`.

    device_name: of the GPU; "": the current GPU
    """
    if not wanted:
        return batches
    if found_cupy() is None:
        warn_once("pin_memory=True, but there is no GPU: batches stay where they are", stacklevel=4)
        return batches
    return DevicePrefetcher(batches, device(device_name or "cuda"))


class DevicePrefetcher(Iterator[Any]):
    """Iterates over (batch, position) of another iterator, with the batches copied to the GPU `device`.

    `batches.ready()` says whether the next batch can be had without waiting.
    """

    def __init__(self, batches: Any, device: device) -> None:
        from ddp._cuda import copies, stream_order

        self._batches = batches
        self._xp = device.xp
        self._copies = copies
        self._streams = stream_order
        with on(device):
            index = self._xp.cuda.runtime.getDevice()
            self._stream = stream_order.DeviceStream(self._xp, index, self._xp.cuda.Stream(non_blocking=True))
        self._sent: tuple[Any, Any] | None = None  # (batch, position), and the event after its copy
        # The error to raise instead of the next batch. It is removed from the list when it is raised, because its
        # traceback would keep the last batch alive.
        self._errors: list[BaseException] = []

    def __next__(self) -> Any:
        if self._sent is None:
            if self._errors:
                raise self._errors.pop()
            self._sent = self._send(*next(self._batches))
        batch, arrived = self._sent
        self._sent = None
        if self._batches.ready():
            try:
                self._sent = self._send(*next(self._batches))
            except Exception as error:
                self._errors.append(error)
        self._streams.current(self._xp, self._stream.device).wait(arrived)
        return batch

    def _send(self, batch: Any, position: Any) -> tuple[Any, Any]:
        gpu = device("cuda", self._stream.device)
        under_way = []

        def copied(tensor: Any) -> Any:
            source = self._pinned(tensor.array)
            target = self._xp.empty(source.shape, source.dtype)
            if source.nbytes:
                target.set(source, stream=self._stream.cupy_stream)
            under_way.append((source, target))
            return wrap(target, gpu)

        with self._xp.cuda.Device(self._stream.device):
            self._stream.wait_for(self._streams.current(self._xp))
            moved = each_tensor(batch, copied)
        arrived = self._stream.record()
        self._streams.keep_alive(self._stream, under_way, event=arrived)  # even if the batch is never taken
        return (moved, position), arrived

    def _pinned(self, array: Any) -> Any:
        """Returns `array` if it is empty, or C-contiguous and pinned by CuPy. Otherwise returns a pinned copy."""
        if not array.nbytes or (array.flags.c_contiguous and self._copies.is_pinned(self._xp, array, by_cupy=True)):
            return array
        pinned = self._copies.empty_pinned(self._xp, array.shape, array.dtype)
        pinned[...] = array
        return pinned


def each_tensor(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Replaces each tensor on the CPU by `change(tensor)`, also within mappings, lists and tuples."""
    if isinstance(batch, TensorBase):
        return change(batch) if batch.device.type == "cpu" else batch
    return map_batch(batch, functools.partial(each_tensor, change=change))
