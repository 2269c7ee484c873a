"""Streams of work, the edges between them, and what must live until a stream is past it.

CuPy's allocator keeps an arena for each stream: memory that is freed is given at once to later work of the stream that
it was made on. That is right as long as nothing else reads it. Whoever has another stream read memory, or the host's
side of a copy, holds it (`hold`) until an event of that stream has passed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import Any

from ddp import _device

Array = Any


class DeviceStream:
    """One stream of one device. (CuPy's default stream is one object for all devices.)"""

    __slots__ = ("device", "stream", "xp")

    def __init__(self, xp: Any, device: int, stream: Any) -> None:
        self.xp, self.device, self.stream = xp, device, stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceStream) and other.device == self.device and other.stream.ptr == self.stream.ptr

    def __hash__(self) -> int:
        return hash((self.device, self.stream.ptr))

    def use(self) -> None:
        """Makes its device the current one of this thread, and it the current stream there."""
        self.xp.cuda.Device(self.device).use()
        self.stream.use()

    def record(self, event: Any = None) -> Any:
        """An event that passes when all that this stream was given so far is done."""
        with self.xp.cuda.Device(self.device):
            if event is None:
                event = self.xp.cuda.Event(disable_timing=True)
            event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        """What this stream is given from now on begins after `event`."""
        with self.xp.cuda.Device(self.device):
            self.stream.wait_event(event)

    def after(self, other: DeviceStream) -> None:
        """What this stream is given from now on begins after all that `other` was given so far."""
        if other != self:
            self.wait(other.record())

    @property
    def capturing(self) -> bool:
        """Whether what it is given is captured into a graph instead of run."""
        # The default stream cannot be captured, and asking it while another one is would be an error.
        return self.stream.ptr not in _DEFAULTS and bool(self.stream.is_capturing())


class StreamGuard:
    """A context in which a stream is the current one of this thread; what was current before is so again after it.

    CuPy's own `with stream` ends on the stream whose context is around it: one that `use` has made current is lost. So
    code of others, which may have such contexts, gets the stream as a context of CuPy's, and what was is set anew.
    """

    __slots__ = ("_before", "lane")

    def __init__(self, lane: DeviceStream) -> None:
        self.lane = lane

    def __enter__(self) -> DeviceStream:
        lane = self.lane
        self._before = current(lane.xp), current(lane.xp, lane.device)
        lane.xp.cuda.Device(lane.device).use()
        lane.stream.__enter__()
        return lane

    def __exit__(self, *exc: object) -> None:
        self.lane.xp.cuda.Device(self.lane.device).use()
        self.lane.stream.__exit__(*exc)
        outer, there = self._before
        there.use()
        outer.use()


_DEFAULTS = (0, 1)  # CUDA's null stream, by both of its handles


def current(xp: Any, device: int | None = None) -> DeviceStream:
    """The current stream of this thread on a device; None: the current one."""
    if device is None:
        device = xp.cuda.runtime.getDevice()
    return DeviceStream(xp, device, xp.cuda.get_current_stream(device))


def default(xp: Any, device: int | None = None) -> DeviceStream:
    """The stream that is current unless another one is made so."""
    if device is None:
        device = xp.cuda.runtime.getDevice()
    per_thread = os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") not in ("", "0")  # as CuPy reads it
    return DeviceStream(xp, device, xp.cuda.Stream.ptds if per_thread else xp.cuda.Stream.null)


# What lives until an event has passed, by stream, on which they pass in their order; None: until no graph is captured.
_held: dict[DeviceStream, deque[tuple[Any, Any]]] = {}
_sweeping = threading.Lock()


def hold(lane: DeviceStream, *objects: Any, event: Any = None) -> None:
    """Keeps the objects alive until `lane` has done all that it was given so far. Never waits.

    event: one that was recorded on it for that already
    """
    capture = _device.capturing.now
    if capture is not None:
        capture.keep(*objects)  # what the graph reads is the graph's own
        return
    if lane.capturing:
        event = None  # one of a capture that is not ours may not be asked
    else:
        sweep()
        event = lane.record() if event is None else event
    _held.setdefault(lane, deque()).append((event, objects))


def sweep() -> None:
    """Lets go of what is held for events that have passed. Not while this thread captures a graph."""
    # Not blocking: what dies here may be held in turn, and then sweeps.
    if _device.capturing.now is not None or not _sweeping.acquire(blocking=False):
        return
    try:
        for waiting in list(_held.values()):
            while waiting and (waiting[0][0] is None or waiting[0][0].done):
                waiting.popleft()
    finally:
        _sweeping.release()


def held() -> int:
    """How many holds there are that were not found to have passed."""
    return sum(map(len, list(_held.values())))


def take_over(last: DeviceStream | None, here: DeviceStream, array: Array) -> DeviceStream:
    """`here` reads and writes `array` from now on, after all that `last` was given; returns who has it then.

    Not across the border of a capture: an edge there would break it, and what is captured does not run yet.
    """
    if last is None or last == here:
        return here
    if last.capturing or here.capturing:
        return last
    here.after(last)
    record(array, here)
    return here


_readers: dict[int, tuple[set[DeviceStream], weakref.ref[Any]]] = {}  # by id of the array


def record(array: Array, lane: DeviceStream) -> None:
    """`lane` reads or writes `array`: its memory is not given away before that is done, whenever the array dies."""
    key = id(array)
    found = _readers.get(key)
    if found is None or found[1]() is not array:
        lanes: set[DeviceStream] = set()
        # `data` holds the memory, and not the array, whose end is waited for.
        weakref.finalize(array, _outlive, key, lanes, array.data).atexit = False
        found = _readers[key] = lanes, weakref.ref(array)
    found[0].add(lane)


def _outlive(key: int, lanes: set[DeviceStream], memory: Any) -> None:
    _readers.pop(key, None)
    for lane in lanes:
        hold(lane, memory)
