"""GPU memory shared with other libraries: orders their streams and ours without a wait of the host.

With DLPack the consumer names its stream, and the producer makes that stream wait for the producer's stream. With
`__cuda_array_interface__` the producer names a stream, and the consumer's stream waits for it. In the second case, CuPy
would make the host wait.

Source: array API standard, `__dlpack__`; CUDA Array Interface 3, "Synchronization".
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

from ddp._cuda import stream_order
from ddp.errors import ArgumentError, DtypeError

Array = Any

# CUDA's handle of the legacy default stream. A handle of 0 could also mean the per-thread default stream.
_LEGACY = 1


def order_before(stream: stream_order.DeviceStream, foreign: int) -> None:
    """Makes later work on the stream with handle `foreign` wait for the work that was launched on `stream`."""
    if foreign != _handle(stream):
        event = stream.record()
        with stream.xp.cuda.Device(stream.device):
            stream.xp.cuda.runtime.streamWaitEvent(foreign, event.ptr)


def order_after(stream: stream_order.DeviceStream, foreign: int) -> None:
    """Makes later work on `stream` wait for the work that was launched on the stream with handle `foreign`."""
    if foreign != _handle(stream):
        xp = stream.xp
        with xp.cuda.Device(stream.device):
            event = xp.cuda.Event(disable_timing=True)
            xp.cuda.runtime.eventRecord(event.ptr, foreign)
        stream.wait(event)


def _handle(stream: stream_order.DeviceStream) -> int:
    return int(stream.cupy_stream.ptr) or _LEGACY


def order_consumer(xp: Any, array: Array, stream: int | None) -> None:
    """Makes a DLPack consumer's stream wait for the current stream.

    stream: CUDA's handle of the consumer's stream; None: the default stream; -1: makes nothing wait. 0 means the
    default stream, too: the standard forbids it as ambiguous, but some libraries pass it.

    Raises: ArgumentError if `stream` is neither None nor an integer of at least -1.
    """
    if stream is not None and (not isinstance(stream, int) or stream < -1):
        raise ArgumentError(
            f"__dlpack__(stream={stream!r}): expected -1 (no order), 1 (the null stream), 2 (the thread's own) or the "
            "address of a CUDA stream"
        )
    if stream != -1:
        order_before(stream_order.current(xp, array.device.id), stream or _LEGACY)


def import_array_interface(xp: Any, source: Any) -> Array:
    """A CuPy array over the memory of an object with `__cuda_array_interface__`; `source` itself if it is a CuPy array.

    Makes later work on the current stream wait for the stream that the object names. Warns if the memory is read-only.
    Raises: DtypeError for an object with a mask.
    """
    if isinstance(source, xp.ndarray):
        return source
    interface = source.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise DtypeError("an array with a mask cannot become a tensor: fill in what is masked before")
    if interface["data"][1]:
        warnings.warn(
            f"the memory of this {type(source).__name__} is read-only, which CuPy cannot enforce: copy it (clone) "
            "before any write in place",
            UserWarning,
            stacklevel=5,
        )
    # "stream" is set to None, so that CuPy does not make the host wait. The new array keeps `source` alive.
    array = xp.asarray(SimpleNamespace(source=source, __cuda_array_interface__={**interface, "stream": None}))
    stream = interface.get("stream")
    if stream is not None:
        order_after(stream_order.current(xp, array.device.id), int(stream))
    return array
