"""Streams and events, by PyTorch's names: queues of a GPU's work, and the order between them.

What is launched goes to the current stream of this thread, which is CuPy's: CuPy's own functions go there, too.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ddp import _device
from ddp._cuda import copies, device_checks
from ddp._cuda.cuda_errors import status_of, translate
from ddp._cuda.stream_order import DeviceStream, StreamGuard, current, default, sweep
from ddp._device import CPU, device
from ddp._engine import modes, stream_sync
from ddp._tensor.base import TensorBase, wrap
from ddp.cuda._devices import Where, _index, _needed
from ddp.errors import ArgumentError, DtypeError

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor

_NOT_READY = 600  # cudaErrorNotReady


def _awaited(call: str, wait: Any) -> None:
    """The host waits; what CUDA reports then is translated. Raises: CudaError."""
    try:
        wait()
    except Exception as error:
        other = translate(error, call)
        if other is error:
            raise
        raise other from error
    sweep()
    device_checks.raise_pending()


class Stream:
    """A queue of work on one GPU: what is launched on it runs in order, beside the work of other streams.

    device: the GPU, by default the current one; priority: negative for work that goes first. It does not wait for the
    default stream, nor that one for it: `wait_stream` and events make the edges.

    Raises: DeviceError without a GPU.
    """

    def __init__(self, device: Where = None, priority: int = 0, **options: Any) -> None:
        if options:
            raise ArgumentError(f"Stream: unknown options {', '.join(sorted(options))}; it takes device and priority")
        xp, index = _needed(), _index(device)
        with xp.cuda.Device(index):
            stream = xp.cuda.Stream(non_blocking=True, priority=priority or None)
        self._lane = DeviceStream(xp, index, stream)

    @property
    def device(self) -> device:
        """The GPU that it belongs to."""
        return _device.device("cuda", self._lane.device)

    @property
    def cuda_stream(self) -> int:
        """CUDA's handle, for other libraries."""
        return int(self._lane.stream.ptr)

    @property
    def priority(self) -> int:
        """Negative if its work goes first."""
        return int(self._lane.stream.priority)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def query(self) -> bool:
        """Whether all that it was given is done. Raises: CudaError."""
        return _passed("Stream.query", self._lane, "streamQuery", self._lane.stream.ptr)

    def synchronize(self) -> None:
        """Waits until all that it was given is done. Raises: CudaError."""
        with self._lane.xp.cuda.Device(self._lane.device):
            _awaited("Stream.synchronize", self._lane.stream.synchronize)

    def record_event(self, event: Event | None = None) -> Event:
        """An event that passes when all that it was given so far is done; `event` if that is given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What it is given from now on begins when `event` has passed. The host does not wait."""
        if not isinstance(event, Event):
            raise DtypeError(f"wait_event: expected a ddp.cuda.Event, got {type(event).__name__}")
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """What it is given from now on begins when all that `stream` was given so far is done."""
        self._lane.after(device_stream_of(stream, "wait_stream"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other._lane == self._lane

    def __hash__(self) -> int:
        return hash(self._lane)

    def __repr__(self) -> str:
        return f"<ddp.cuda.{type(self).__name__} device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """A stream that somebody else made, by CUDA's handle; it must live as long as this is used.

    Raises: DeviceError without a GPU.
    """

    def __init__(self, stream_ptr: int, device: Where = None) -> None:
        xp, index = _needed(), _index(device)
        self._lane = DeviceStream(xp, index, _foreign(xp, stream_ptr, index))


def _foreign(xp: Any, pointer: int, index: int) -> Any:
    """A stream of CuPy's around a handle, which it does not destroy."""
    with warnings.catch_warnings():
        # CuPy would rather have Stream.from_external, which in some versions destroys what is not its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        return xp.cuda.ExternalStream(pointer, index)


def get_stream_from_external(data_ptr: int, device: Where = None) -> Stream:
    """The stream with this handle of CUDA's. Raises: DeviceError without a GPU."""
    return ExternalStream(data_ptr, device)


def _around(lane: DeviceStream) -> Stream:
    found = object.__new__(Stream)
    found._lane = lane
    return found


def device_stream_of(given: Any, call: str) -> DeviceStream:
    """The lane of a stream, ours or CuPy's. Raises: DtypeError."""
    if isinstance(given, Stream):
        return given._lane
    if hasattr(given, "ptr") and hasattr(given, "wait_event"):
        index = getattr(given, "device_id", -1)
        return DeviceStream(_needed(), _index(None) if index < 0 else index, given)
    raise DtypeError(f"{call}: expected a ddp.cuda.Stream, got {type(given).__name__}")


def current_stream(device: Where = None) -> Stream:
    """The stream that this thread's work goes to. Raises: DeviceError without a GPU."""
    return _around(current(_needed(), _index(device)))


def default_stream(device: Where = None) -> Stream:
    """The stream that is current unless another one is made so. Raises: DeviceError without a GPU."""
    return _around(default(_needed(), _index(device)))


def set_stream(stream: Stream) -> None:
    """From now on this thread's work goes to `stream`, and its GPU is the current one; None changes nothing."""
    if stream is None:
        return
    device_stream_of(stream, "set_stream").use()
    _remember()


def _remember() -> None:
    """From now on nodes remember the stream that is current, so that backward finds it."""
    stream_sync.enable()
    if stream_sync.note_stream not in modes.state.observers:
        modes.state.observers = (*modes.state.observers, stream_sync.note_stream)


class stream:
    """With `stream(s)`, this thread's work goes to `s`, and the GPU of `s` is the current one; None changes nothing.

    Ops that run inside have their backward on `s`, too.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._inside = None if stream is None else StreamGuard(device_stream_of(stream, "stream"))

    def __enter__(self) -> None:
        if self._inside is None:
            return
        self._inside.__enter__()
        self._stamped = stream_sync.note_stream in modes.state.observers
        _remember()

    def __exit__(self, *exc: object) -> None:
        if self._inside is None:
            return
        self._inside.__exit__(*exc)
        if not self._stamped:
            modes.state.observers = tuple(
                [each for each in modes.state.observers if each is not stream_sync.note_stream]
            )


StreamContext = stream


class Event:
    """A point in a stream's work: has it passed, wait for it, and how long was it between two.

    enable_timing: so that `elapsed_time` can be asked; blocking: whoever waits sleeps instead of spinning.
    Raises: DeviceError without a GPU, when it is first used.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.enable_timing, self.blocking = bool(enable_timing), bool(blocking)
        self._event: Any = None
        self._lane: DeviceStream | None = None  # of the last record

    @property
    def cuda_event(self) -> int:
        """CUDA's handle; 0 before the first record."""
        return 0 if self._event is None else int(self._event.ptr)

    @property
    def device(self) -> device | None:
        """The GPU that it was recorded on; None before."""
        return None if self._lane is None else _device.device("cuda", self._lane.device)

    def record(self, stream: Stream | None = None) -> None:
        """It passes when all that `stream` was given so far is done; None: the current stream.

        Raises: ArgumentError for a stream of another GPU than the first it was recorded on.
        """
        lane = current(_needed()) if stream is None else device_stream_of(stream, "Event.record")
        if self._lane is not None and self._lane.device != lane.device:
            raise ArgumentError(f"Event.record: an event of cuda:{self._lane.device} and a stream of {lane.device}")
        if self._event is None:
            with lane.xp.cuda.Device(lane.device):
                self._event = lane.xp.cuda.Event(block=self.blocking, disable_timing=not self.enable_timing)
        lane.record(self._event)
        self._lane = lane

    def wait(self, stream: Stream | None = None) -> None:
        """What `stream` is given from now on begins when this has passed; None: the current stream."""
        if self._event is not None:
            (current(_needed()) if stream is None else device_stream_of(stream, "Event.wait")).wait(self._event)

    def query(self) -> bool:
        """Whether it has passed; True before it was recorded. Raises: CudaError."""
        if self._event is None or self._lane is None:
            return True
        return _passed("Event.query", self._lane, "eventQuery", self._event.ptr)

    def synchronize(self) -> None:
        """Waits until it has passed. Raises: CudaError."""
        if self._event is not None:
            _awaited("Event.synchronize", self._event.synchronize)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`; both must have passed.

        Raises: ArgumentError if one was not recorded, has not passed, or keeps no time.
        """
        for name, each in (("this event", self), ("end_event", end_event)):
            if not each.enable_timing:
                raise ArgumentError(f"elapsed_time: {name} keeps no time; make it with enable_timing=True")
            if each._event is None:
                raise ArgumentError(f"elapsed_time: {name} was not recorded")
            if not each.query():
                raise ArgumentError(f"elapsed_time: {name} has not passed yet; synchronize() it first")
        return float(_needed().cuda.get_elapsed_time(self._event, end_event._event))

    def __repr__(self) -> str:
        return f"<ddp.cuda.Event {'uninitialized' if self._event is None else hex(self.cuda_event)}>"


def _passed(call: str, lane: DeviceStream, question: str, pointer: int) -> bool:
    """The answer of one of CUDA's two questions. Raises: CudaError, which CuPy's `done` takes for False."""
    runtime = lane.xp.cuda.runtime
    try:
        status = getattr(runtime, question)(pointer)
    except Exception as error:
        if status_of(error) == _NOT_READY:
            return False
        other = translate(error, call)
        if other is error:
            raise
        raise other from error
    if status in (0, _NOT_READY):
        return bool(status == 0)
    raise translate(runtime.CUDARuntimeError(status), call)


def synchronize(device: Where = None) -> None:
    """Waits for all that was launched on the device, on any stream. Raises: DeviceError without a GPU; CudaError."""
    found = _needed().cuda.Device(_index(device))
    with found:
        _awaited("synchronize", found.synchronize)


class Fetched:
    """A tensor on its way to the CPU; made by `fetch`."""

    def __init__(self, tensor: Tensor, event: Event | None) -> None:
        self._tensor, self._event = tensor, event

    def ready(self) -> bool:
        """Whether it is there, so that `value` does not wait. Raises: CudaError."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def tensor(self) -> Tensor:
        """The tensor on the CPU. Waits until it is there, for nothing that was launched after. Raises: CudaError."""
        if self._event is not None and not self.ready():
            self._event.synchronize()
            self._event = None
        return self._tensor

    def value(self) -> Any:
        """Its elements as Python numbers, as `tolist` has them: a number for a loss. Waits until they are there."""
        return self.tensor().tolist()

    def __repr__(self) -> str:
        return f"<ddp.cuda.Fetched {'there' if self.ready() else 'under way'}>"


def fetch(tensor: Tensor) -> Fetched:
    """Sends the value that `tensor` has now to the CPU, and waits for nothing: for the log of a training loop.

        log = ddp.cuda.fetch(loss)
        ...                         # steps later, when the device has got there
        print(log.value())

    It goes through pinned memory, in the order of the current stream; what is written to the tensor afterwards does not
    matter. A tensor of the CPU is copied and there at once, so that one loop does for both. Gradients do not follow.
    """
    if not isinstance(tensor, TensorBase):
        raise DtypeError(f"fetch: expected a tensor, got {type(tensor).__name__}")
    if tensor.device is CPU:
        return Fetched(wrap(tensor.array.copy(), CPU), None)
    lane = current(tensor.device.xp, tensor.array.device.id)
    made = wrap(copies.down(tensor.array, non_blocking=True), CPU)
    event = Event()
    event._event, event._lane = lane.record(), lane
    return Fetched(made, event)
