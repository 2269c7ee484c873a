"""CUDA streams, the order between them, and the memory that a stream still uses.

CuPy's memory pool has separate free blocks for each stream. A block that is freed is reused at once by later work of
the stream on which it was allocated. That is safe as long as no other stream uses the block. Code that lets another
stream use an array, or that copies from memory of the host, calls `keep_alive`: it records an event after the work, and
keeps the objects alive until the event has completed. Or the code calls `record`: then `keep_alive` is called when the
array is dropped.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import Any

from ddp import _device

Array = Any

# The two handles of CUDA's default stream, which cannot be captured.
_DEFAULT_HANDLES = (0, 1)


class DeviceStream:
    """A CUDA stream of one device.

    cupy_stream: CuPy's object. It does not name the device: CuPy's default stream is one object for all devices
    """

    __slots__ = ("cupy_stream", "device", "xp")

    def __init__(self, xp: Any, device: int, cupy_stream: Any) -> None:
        self.xp = xp
        self.device = device
        self.cupy_stream = cupy_stream

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeviceStream)
            and other.device == self.device
            and other.cupy_stream.ptr == self.cupy_stream.ptr
        )

    def __hash__(self) -> int:
        return hash((self.device, self.cupy_stream.ptr))

    def use(self) -> None:
        """Makes this the current stream of this thread, and its device the current device."""
        self.xp.cuda.Device(self.device).use()
        self.cupy_stream.use()

    def record(self, event: Any = None) -> Any:
        """Records `event`, by default a new one, after all work that was launched on this stream. Returns the event."""
        with self.xp.cuda.Device(self.device):
            if event is None:
                event = self.xp.cuda.Event(disable_timing=True)
            event.record(self.cupy_stream)
        return event

    def wait(self, event: Any) -> None:
        """Makes later work on this stream wait for `event`."""
        with self.xp.cuda.Device(self.device):
            self.cupy_stream.wait_event(event)

    def wait_for(self, other: DeviceStream) -> None:
        """Makes later work on this stream wait for all work that was launched on `other`."""
        if other != self:
            self.wait(other.record())

    @property
    def capturing(self) -> bool:
        """Whether work on this stream is captured into a CUDA graph instead of run."""
        # CUDA raises an error if it is asked about the default stream while another stream is captured.
        return self.cupy_stream.ptr not in _DEFAULT_HANDLES and bool(self.cupy_stream.is_capturing())


class StreamGuard:
    """A context in which a stream is the current one of this thread. On exit, the previous streams are current again.

    CuPy's `with stream:` restores on exit the stream of the enclosing `with`, not the one that `use` made current. So
    CuPy's functions that contain such a `with` may change the current stream. This guard enters CuPy's context, so that
    such functions return to `stream`. On exit it restores the previous streams by `use`.
    """

    __slots__ = ("_previous", "stream")

    def __init__(self, stream: DeviceStream) -> None:
        self.stream = stream

    def __enter__(self) -> DeviceStream:
        stream = self.stream
        self._previous = (current(stream.xp), current(stream.xp, stream.device))
        stream.xp.cuda.Device(stream.device).use()
        stream.cupy_stream.__enter__()
        return stream

    def __exit__(self, *exc: object) -> None:
        self.stream.xp.cuda.Device(self.stream.device).use()
        self.stream.cupy_stream.__exit__(*exc)
        of_thread, of_device = self._previous
        of_device.use()
        of_thread.use()


def current(xp: Any, device: int | None = None) -> DeviceStream:
    """This thread's current stream of a device; None: of the current device."""
    if device is None:
        device = xp.cuda.runtime.getDevice()
    return DeviceStream(xp, device, xp.cuda.get_current_stream(device))


def default(xp: Any, device: int | None = None) -> DeviceStream:
    """The default stream of a device; None: of the current device."""
    if device is None:
        device = xp.cuda.runtime.getDevice()
    # CuPy reads this variable in the same way.
    per_thread = os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") not in ("", "0")
    return DeviceStream(xp, device, xp.cuda.Stream.ptds if per_thread else xp.cuda.Stream.null)


# Per stream: FIFO of (event, objects kept alive until it completes). If the event is None: until the next `collect`.
_pending: dict[DeviceStream, deque[tuple[Any, Any]]] = {}
_collecting = threading.Lock()


def keep_alive(stream: DeviceStream, *objects: Any, event: Any = None) -> None:
    """Keeps the objects alive until all work that was launched on `stream` is done. Never waits.

    While this thread captures a graph, the graph keeps the objects. If other code captures `stream`, they are kept
    until the next `collect` outside of a capture.
    event: an event that was recorded on `stream` after that work; None: records a new one
    """
    capture = _device.capturing.now
    if capture is not None:
        capture.keep_alive(*objects)  # the graph uses them at every launch
        return
    if stream.capturing:
        event = None  # other code captures this stream, and an event of a capture must not be queried
    else:
        collect()
        event = stream.record() if event is None else event
    _pending.setdefault(stream, deque()).append((event, objects))


def collect() -> None:
    """Drops the objects whose event has completed. Does nothing while this thread captures a graph."""
    # Does not block: an object that is dropped here may call `keep_alive`, which calls this function again.
    if _device.capturing.now is not None or not _collecting.acquire(blocking=False):
        return
    try:
        for entries in list(_pending.values()):
            while entries and (entries[0][0] is None or entries[0][0].done):
                entries.popleft()
    finally:
        _collecting.release()


def transfer(last: DeviceStream | None, stream: DeviceStream, array: Array) -> DeviceStream:
    """Makes `stream` wait for `last`, the last stream that used `array`. Returns: the new last stream.

    If one of the two is captured, orders nothing and returns `last`: to wait for a stream outside of the capture would
    break the capture, and captured work does not run before the graph is launched.
    """
    if last is None or last == stream:
        return stream
    if last.capturing or stream.capturing:
        return last
    stream.wait_for(last)
    record(array, stream)
    return stream


# By id of an array: the streams that use it, without the one it was allocated on, and a weak reference to the array.
_users: dict[int, tuple[set[DeviceStream], weakref.ref[Any]]] = {}


def record(array: Array, stream: DeviceStream) -> None:
    """Records that `stream` uses `array`. A dropped array's memory is kept until the stream's work is done."""
    key = id(array)
    entry = _users.get(key)
    if entry is None or entry[1]() is not array:
        streams: set[DeviceStream] = set()
        # The finalizer keeps `array.data`, which owns the memory. If it kept the array itself, it would never run.
        weakref.finalize(array, _keep_memory, key, streams, array.data).atexit = False
        entry = (streams, weakref.ref(array))
        _users[key] = entry
    entry[0].add(stream)


def _keep_memory(key: int, streams: set[DeviceStream], memory: Any) -> None:
    _users.pop(key, None)
    for stream in streams:
        keep_alive(stream, memory)
