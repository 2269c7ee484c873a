"""Streams and events, under PyTorch's names.

All work goes to the current stream of this thread, which is also CuPy's current stream.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ddp import _device
from ddp._cuda import copies, device_checks
from ddp._cuda.cuda_errors import status_of, translate
from ddp._cuda.stream_order import DeviceStream, StreamGuard, collect, current, default
from ddp._device import CPU, device
from ddp._engine import modes, stream_sync
from ddp._tensor.base import TensorBase, wrap
from ddp.cuda._devices import DeviceLike, _cupy, _index
from ddp.errors import ArgumentError, DtypeError

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor

# The status cudaErrorNotReady.
_NOT_READY = 600


def _wait(call: str, synchronize: Any) -> None:
    """Calls `synchronize`, which makes the host wait. Raises: CudaError, or the error that a kernel has reported."""
    try:
        synchronize()
    except Exception as error:
        translated = translate(error, call)
        if translated is error:
            raise
        raise translated from error
    collect()
    device_checks.raise_pending()


class Stream:
    """A queue of work on a GPU. Its work runs in order, and concurrently with the work of other streams.

    device: the GPU, by default the current one; priority: negative for work that goes first

    There is no implicit order with the default stream: use `wait_stream` or events.

    Raises: DeviceError without a GPU; ArgumentError for another option.
    """

    def __init__(self, device: DeviceLike = None, priority: int = 0, **options: Any) -> None:
        if options:
            raise ArgumentError(f"Stream: unknown options {', '.join(sorted(options))}; it takes device and priority")
        xp = _cupy()
        index = _index(device)
        with xp.cuda.Device(index):
            stream = xp.cuda.Stream(non_blocking=True, priority=priority or None)
        self._device_stream = DeviceStream(xp, index, stream)

    @property
    def device(self) -> device:
        """The GPU of this stream."""
        return _device.device("cuda", self._device_stream.device)

    @property
    def cuda_stream(self) -> int:
        """CUDA's handle of the stream, for other libraries."""
        return int(self._device_stream.cupy_stream.ptr)

    @property
    def priority(self) -> int:
        """The priority: negative for work that goes first."""
        return int(self._device_stream.cupy_stream.priority)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def query(self) -> bool:
        """Whether all work that was launched on this stream is done. Raises: CudaError."""
        return _is_done("Stream.query", self._device_stream, "streamQuery", self._device_stream.cupy_stream.ptr)

    def synchronize(self) -> None:
        """Waits until all work that was launched on this stream is done.

        Raises: CudaError; the error that a kernel has reported, such as RangeError for an index out of range.
        """
        with self._device_stream.xp.cuda.Device(self._device_stream.device):
            _wait("Stream.synchronize", self._device_stream.cupy_stream.synchronize)

    def record_event(self, event: Event | None = None) -> Event:
        """Records `event`, by default a new one, after the work that was launched on this stream. Returns the event.

        Raises: as `Event.record`.
        """
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Makes later work on this stream wait for `event`. The host does not wait. Raises: DtypeError."""
        if not isinstance(event, Event):
            raise DtypeError(f"wait_event: expected a ddp.cuda.Event, got {type(event).__name__}")
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Makes later work on this stream wait for all work that was launched on `stream`. Raises: DtypeError."""
        self._device_stream.wait_for(device_stream_of(stream, "wait_stream"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other._device_stream == self._device_stream

    def __hash__(self) -> int:
        return hash(self._device_stream)

    def __repr__(self) -> str:
        return f"<ddp.cuda.{type(self).__name__} device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """A stream that another library created. stream_ptr: its handle; the stream must exist while this object is used

    Raises: DeviceError without a GPU.
    """

    def __init__(self, stream_ptr: int, device: DeviceLike = None) -> None:
        xp = _cupy()
        index = _index(device)
        self._device_stream = DeviceStream(xp, index, _external_stream(xp, stream_ptr, index))


def _external_stream(xp: Any, handle: int, index: int) -> Any:
    """CuPy's object for a stream that CuPy does not own."""
    with warnings.catch_warnings():
        # CuPy recommends Stream.from_external instead, but some versions of that destroy the stream.
        warnings.simplefilter("ignore", DeprecationWarning)
        return xp.cuda.ExternalStream(handle, index)


def get_stream_from_external(data_ptr: int, device: DeviceLike = None) -> Stream:
    """The stream with the CUDA handle `data_ptr`. Raises: DeviceError without a GPU."""
    return ExternalStream(data_ptr, device)


def _as_stream(device_stream: DeviceStream) -> Stream:
    stream = object.__new__(Stream)
    stream._device_stream = device_stream
    return stream


def device_stream_of(stream: Any, call: str) -> DeviceStream:
    """The `DeviceStream` of a `Stream` or of a CuPy stream. call: for the error's text. Raises: DtypeError."""
    if isinstance(stream, Stream):
        return stream._device_stream
    if hasattr(stream, "ptr") and hasattr(stream, "wait_event"):
        index = getattr(stream, "device_id", -1)
        return DeviceStream(_cupy(), _index(None) if index < 0 else index, stream)
    raise DtypeError(f"{call}: expected a ddp.cuda.Stream, got {type(stream).__name__}")


def current_stream(device: DeviceLike = None) -> Stream:
    """This thread's current stream of a device. Raises: DeviceError without a GPU."""
    return _as_stream(current(_cupy(), _index(device)))


def default_stream(device: DeviceLike = None) -> Stream:
    """The default stream of a device. Raises: DeviceError without a GPU."""
    return _as_stream(default(_cupy(), _index(device)))


def set_stream(stream: Stream) -> None:
    """Makes `stream` the current one of this thread, and its GPU the current device; None changes nothing."""
    if stream is None:
        return
    device_stream_of(stream, "set_stream").use()
    _record_streams_of_nodes()


def _record_streams_of_nodes() -> None:
    """Makes each new graph node record the current stream, so that the node's backward runs on that stream."""
    stream_sync.enable()
    if stream_sync.note_stream not in modes.state.observers:
        modes.state.observers = (*modes.state.observers, stream_sync.note_stream)


class stream:
    """A context in which a stream is the current one, and its GPU the current device; None changes nothing.

    The backward of ops in the context runs on that stream, too.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._guard = None if stream is None else StreamGuard(device_stream_of(stream, "stream"))

    def __enter__(self) -> None:
        if self._guard is None:
            return
        self._guard.__enter__()
        self._was_recording = stream_sync.note_stream in modes.state.observers
        _record_streams_of_nodes()

    def __exit__(self, *exc: object) -> None:
        if self._guard is None:
            return
        self._guard.__exit__(*exc)
        if not self._was_recording:
            modes.state.observers = tuple(
                [observer for observer in modes.state.observers if observer is not stream_sync.note_stream]
            )


StreamContext = stream


class Event:
    """A marker in a stream: it completes when the work before it is done. Other streams and the host can wait for it.

    enable_timing: needed for `elapsed_time`, the time between two events; blocking: `synchronize` sleeps instead of
    spinning
    Raises: DeviceError without a GPU, at the first use.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.enable_timing = bool(enable_timing)
        self.blocking = bool(blocking)
        self._event: Any = None
        self._device_stream: DeviceStream | None = None  # the stream on which the event was recorded last

    @property
    def cuda_event(self) -> int:
        """CUDA's handle of the event; 0 before the first record."""
        return 0 if self._event is None else int(self._event.ptr)

    @property
    def device(self) -> device | None:
        """The GPU on which the event was recorded; None before the first record."""
        return None if self._device_stream is None else _device.device("cuda", self._device_stream.device)

    def record(self, stream: Stream | None = None) -> None:
        """Records the event after the work that was launched on `stream`; None: on the current stream.

        Raises: ArgumentError for a stream of another GPU than at the first record; DtypeError for another object.
        """
        target = current(_cupy()) if stream is None else device_stream_of(stream, "Event.record")
        if self._device_stream is not None and self._device_stream.device != target.device:
            raise ArgumentError(
                f"Event.record: an event of cuda:{self._device_stream.device} and a stream of {target.device}"
            )
        if self._event is None:
            with target.xp.cuda.Device(target.device):
                self._event = target.xp.cuda.Event(block=self.blocking, disable_timing=not self.enable_timing)
        target.record(self._event)
        self._device_stream = target

    def wait(self, stream: Stream | None = None) -> None:
        """Makes later work on `stream` wait for this event; None: on the current stream.

        Does nothing before the first record.
        """
        if self._event is not None:
            target = current(_cupy()) if stream is None else device_stream_of(stream, "Event.wait")
            target.wait(self._event)

    def query(self) -> bool:
        """Whether the event has completed; True before the first record. Raises: CudaError."""
        if self._event is None or self._device_stream is None:
            return True
        return _is_done("Event.query", self._device_stream, "eventQuery", self._event.ptr)

    def synchronize(self) -> None:
        """Waits until the event has completed. Raises: as `Stream.synchronize`."""
        if self._event is not None:
            _wait("Event.synchronize", self._event.synchronize)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`. Both must have completed.

        Raises: ArgumentError if an event was not recorded, has not completed, or was made without enable_timing.
        """
        for name, event in (("this event", self), ("end_event", end_event)):
            if not event.enable_timing:
                raise ArgumentError(f"elapsed_time: {name} keeps no time; make it with enable_timing=True")
            if event._event is None:
                raise ArgumentError(f"elapsed_time: {name} was not recorded")
            if not event.query():
                raise ArgumentError(f"elapsed_time: {name} has not passed yet; synchronize() it first")
        return float(_cupy().cuda.get_elapsed_time(self._event, end_event._event))

    def __repr__(self) -> str:
        return f"<ddp.cuda.Event {'uninitialized' if self._event is None else hex(self.cuda_event)}>"


def _is_done(call: str, stream: DeviceStream, query: str, handle: int) -> bool:
    """Asks CUDA, by streamQuery or eventQuery, whether the work is done.

    Raises: CudaError if the work has failed. (CuPy's `done` is False then, so a loop that tests it would never end.)
    """
    runtime = stream.xp.cuda.runtime
    try:
        status = getattr(runtime, query)(handle)
    except Exception as error:
        if status_of(error) == _NOT_READY:
            return False
        translated = translate(error, call)
        if translated is error:
            raise
        raise translated from error
    if status in (0, _NOT_READY):
        return bool(status == 0)
    raise translate(runtime.CUDARuntimeError(status), call)


def synchronize(device: DeviceLike = None) -> None:
    """Waits for all work on all streams of the device.

    Raises: DeviceError without a GPU; what `Stream.synchronize` raises.
    """
    cupy_device = _cupy().cuda.Device(_index(device))
    with cupy_device:
        _wait("synchronize", cupy_device.synchronize)


class Fetched:
    """A tensor that is being copied to the CPU; made by `fetch`."""

    def __init__(self, tensor: Tensor, event: Event | None) -> None:
        self._tensor = tensor
        self._event = event

    def ready(self) -> bool:
        """Whether the copy is done, so that `value` does not wait. Raises: CudaError."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def tensor(self) -> Tensor:
        """The tensor on the CPU. Waits for the copy, but not for later work. Raises: as `Stream.synchronize`."""
        if self._event is not None and not self.ready():
            self._event.synchronize()
            self._event = None
        return self._tensor

    def value(self) -> Any:
        """The elements as Python numbers, as from `tolist`: one number for a loss. Waits for the copy."""
        return self.tensor().tolist()

    def __repr__(self) -> str:
        return f"<ddp.cuda.Fetched {'there' if self.ready() else 'under way'}>"


def fetch(tensor: Tensor) -> Fetched:
    """Copies the present value of `tensor` to the CPU without waiting, to log it in a later step of a training loop.

        log = ddp.cuda.fetch(loss)
        ...                         # some steps later
        print(log.value())

    The copy goes to pinned memory, on the current stream. Later writes to the tensor do not change the copy. A tensor
    on the CPU is copied at once, so that the same loop works on the CPU. Gradients do not flow through the copy.

    Raises: DtypeError for anything but a tensor.
    """
    if not isinstance(tensor, TensorBase):
        raise DtypeError(f"fetch: expected a tensor, got {type(tensor).__name__}")
    if tensor.device is CPU:
        return Fetched(wrap(tensor.array.copy(), CPU), None)
    stream = current(tensor.device.xp, tensor.array.device.id)
    on_cpu = wrap(copies.d2h(tensor.array, non_blocking=True), CPU)
    event = Event()
    event._event = stream.record()
    event._device_stream = stream
    return Fetched(on_cpu, event)
