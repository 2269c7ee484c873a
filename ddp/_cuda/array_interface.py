"""GPU memory that two libraries look at: in which order their streams come, without a wait of the host.

DLPack's consumer names its stream, and the producer makes that wait for its own; behind `__cuda_array_interface__` the
producer names a stream, which ours then waits for. CuPy would have the host wait in the second case.

Source: array API standard, `__dlpack__`; CUDA Array Interface 3, "Synchronization".
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

from ddp._cuda import stream_order
from ddp.errors import ArgumentError, DtypeError

Array = Any
_LEGACY = 1  # CUDA's handle of the null stream; a stream that is 0 says nothing of whose default it is


def order_before(lane: stream_order.DeviceStream, theirs: int) -> None:
    """What the stream `theirs` is given from now on begins after what `lane` was given so far."""
    if theirs != _handle(lane):
        event = lane.record()
        with lane.xp.cuda.Device(lane.device):
            lane.xp.cuda.runtime.streamWaitEvent(theirs, event.ptr)


def order_after(lane: stream_order.DeviceStream, theirs: int) -> None:
    """What `lane` is given from now on begins after what the stream `theirs` was given so far."""
    if theirs != _handle(lane):
        xp = lane.xp
        with xp.cuda.Device(lane.device):
            event = xp.cuda.Event(disable_timing=True)
            xp.cuda.runtime.eventRecord(event.ptr, theirs)
        lane.wait(event)


def _handle(lane: stream_order.DeviceStream) -> int:
    return int(lane.stream.ptr) or _LEGACY


def order_consumer(xp: Any, array: Array, stream: int | None) -> None:
    """A DLPack consumer on `stream` goes on after our current one: -1 orders nothing; None is CUDA's null stream.

    So is 0, which the standard does not allow, as it says not whose default is meant: some libraries pass it.

    Raises: ArgumentError for a stream that is none.
    """
    if stream is not None and (not isinstance(stream, int) or stream < -1):
        raise ArgumentError(
            f"__dlpack__(stream={stream!r}): expected -1 (no order), 1 (the null stream), 2 (the thread's own) or the "
            "address of a CUDA stream"
        )
    if stream != -1:
        order_before(stream_order.current(xp, array.device.id), stream or _LEGACY)


def import_array_interface(xp: Any, theirs: Any) -> Array:
    """An array over the memory of one with `__cuda_array_interface__`, which our current stream may read from now on.

    Raises: DtypeError for a mask.
    """
    if isinstance(theirs, xp.ndarray):
        return theirs
    told = theirs.__cuda_array_interface__
    if told.get("mask") is not None:
        raise DtypeError("an array with a mask cannot become a tensor: fill in what is masked before")
    if told["data"][1]:
        warnings.warn(
            f"the memory of this {type(theirs).__name__} is read-only, which CuPy cannot enforce: copy it (clone) "
            "before any write in place",
            UserWarning,
            stacklevel=5,
        )
    # Without the stream that CuPy would have the host wait for. Their array stays alive with this.
    array = xp.asarray(SimpleNamespace(theirs=theirs, __cuda_array_interface__={**told, "stream": None}))
    stream = told.get("stream")
    if stream is not None:
        order_after(stream_order.current(xp, array.device.id), int(stream))
    return array
