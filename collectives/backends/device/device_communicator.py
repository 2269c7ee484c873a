r"""The part of a communicator for arrays on a GPU. `Communicator`'s methods use it if they get such arrays.

Device calls and host calls go through one queue, in the communicator's order. What ranks must exchange first (lengths,
the choice of a transport) goes over the host transport. `wait` makes the current stream wait for the collective. The
host waits only until the collective is on its stream. If the collective goes through host memory, this includes the
copy from the device and the collective of the host transport.

Reductions are computed in the dtype that `collectives.reduction` defines. Arrays are converted to it on the
communication stream. All other collectives move rows as bytes. send and recv always go through host memory, because
they are not part of the order of collectives, and two ranks may send to each other at once. An NCCL send occupies its
communicator until the other side receives, so two such sends would deadlock.

How a collective is ordered after the caller's kernels and before those that use its result:

    the caller's stream   ── kernels ── ready ──────────────────────── wait(done) ── kernels ──
                                           \                          /
    communication stream   ───────────── wait(ready) ── collective ── done

Over NCCL the host does not wait for `ready` or `done`. CuPy's memory pool has one arena per stream and reuses freed
memory at once, in that stream's order, without regard to the communication stream. So a result is allocated in the
arena of the caller's stream, and before `ready` is recorded if its shape is known by then. The watchdog keeps all
arrays that the communication stream uses until `done` is complete. Scratch arrays of the communication stream are in
its own arena, and no other stream uses them.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from collectives.arrays import check_shape, flat
from collectives.backends.device import cuda
from collectives.backends.device.cuda import Cuda
from collectives.backends.device.device_transport import DeviceTransport
from collectives.backends.device.negotiation import negotiate
from collectives.backends.nccl.watchdog import Watchdog
from collectives.engine.call import CollectiveOp, Plan, Work
from collectives.engine.communicator_base import CommunicatorBase, Scale
from collectives.engine.waiting import PAUSE
from collectives.errors import ArgumentError, BackendError, CollectivesError, CollectiveTimeout, how_to_install
from collectives.flight.recorder import FAILED
from collectives.reduction import COMBINE, Array, ReduceOp, Reduction, combine_in_tree, divide_and_scale, wire_op
from collectives.time_limit import Deadline
from collectives.transport import Steps, Transport

T = TypeVar("T")

_NOT_CAPTURABLE = (
    "the host takes part in a collective over host memory, so it cannot be captured into a graph; NCCL's can"
)


class DeviceWork(Work[T]):
    """A collective on a GPU in progress.

    `wait` orders the later work of the calling thread's current stream after the collective; the host waits only until
    the collective has been put on its stream. `done` returns True once the collective has been put there, even if it is
    not complete.
    """

    __slots__ = ("_arrays",)

    def __init__(self, call: CollectiveOp[T], arrays: DeviceArrays) -> None:
        super().__init__(call)
        self._arrays = arrays

    def wait(self, timeout: float | Deadline | None = None) -> T:
        """Returns the result, which the current stream may use. May be called again, also on other streams.

        Raises: what `Work.wait` raises; a failure on the device.
        """
        result = super().wait(timeout)
        self._arrays.wait()
        return result


class DeviceReceiveWork(Work[Any]):
    """A receive into an array on a GPU. The first `wait` copies the data to the GPU, on the current stream.

    deliver: copies the result of `recv` to the device, and returns the result of `wait`
    """

    __slots__ = ("_deliver", "_result")

    def __init__(self, call: CollectiveOp[Array], deliver: Callable[[Any], Any]) -> None:
        super().__init__(call)
        self._deliver = deliver
        self._result: Any = None

    def wait(self, timeout: float | Deadline | None = None) -> Any:
        """Returns `out`; for a receive from any source, (out, sender's rank).

        The stream that is current at the first call may use `out`.
        Raises: what `Work.wait` raises; ArgumentError if `out` has another shape or dtype than the data.
        """
        received = super().wait(timeout)
        if self._result is None:
            self._result = self._deliver(received)
        return self._result


class DeviceCommunicator:
    """Runs one communicator's collectives, sends and receives on arrays in the memory of a GPU.

    device: this rank's GPU; None if it cannot use one
    why_not: the reason why `device` is None
    """

    def __init__(self, comm: CommunicatorBase, transport: Transport, device: Cuda | None, why_not: str = "") -> None:
        self._comm = comm
        self._transport = transport
        self._device = device
        self._why_not = why_not
        self.watchdog = Watchdog(
            comm.rank, lambda event: self._cuda.is_complete(event), self._failed, enter=lambda: self._cuda.use()
        )
        if device is not None:
            comm.queue.enter_helper = device.use
        self._device_transport: DeviceTransport | None = None
        self.rank = comm.rank
        self.size = comm.size

    @property
    def _cuda(self) -> Cuda:
        assert self._device is not None
        return self._device

    def transport(self) -> Steps[DeviceTransport]:
        """Returns the device transport, which all ranks choose together when it is first needed."""
        if self._device_transport is None:
            registry = self._comm.registry
            self._device_transport = yield from negotiate(
                self._device,
                self._transport,
                self._comm.timeout,
                registry.requested,
                self.watchdog,
                self._why_not,
                registry.nccl,
            )
        return self._device_transport

    @property
    def capturable(self) -> bool:
        """Whether collectives can be captured into a graph; True as long as no collective has chosen the transport."""
        return self._device_transport is None or self._device_transport.capturable

    def close(self) -> None:
        """Frees the resources of the device transport. No call may be in progress on this rank."""
        with contextlib.suppress(CollectivesError):  # A broken communicator's error is raised by its calls, not here.
            self.watchdog.close()
        if self._device_transport is not None:
            with contextlib.suppress(CollectivesError):
                self._device_transport.close()

    def watch_stream(self, name: str, keep: Any) -> None:
        """Watches the work on the current stream; keeps `keep` alive until the work is complete.

        The time limit is that of the device transport. Does nothing before the first collective on a GPU.
        Raises: the failure of an earlier operation; CommunicatorClosed after `close`.
        """
        if self._device_transport is None:
            return
        self.watchdog.check()
        call: CollectiveOp[None] = CollectiveOp(Plan(name, "on GPU"), self._comm.timeout)
        self._comm.queue.record_launched(call)
        # The current stream must not be in a capture, so that the watchdog may query the event.
        event = self._cuda.record_event(self._cuda.current_stream())
        self.watchdog.watch(event, keep, call, self._device_transport.timeout)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array of zeros on the device."""
        with self._cuda.on(self._cuda.current_stream()):
            array = self._cuda.empty(shape, dtype)
            array[...] = 0
        return array

    def _failed(self, error: Exception, calls: list[object]) -> None:
        """Called in the watchdog's thread when the device has failed. Makes calls on host arrays raise `error`, too."""
        for call in calls:
            if isinstance(call, CollectiveOp) and call.recorder is not None:
                call.recorder.end(call.record, FAILED)
        assert isinstance(error, CollectivesError)
        self._comm.queue.abort(error, self.watchdog.received)

    # Calls -----------------------------------------------------------------------------------------------------------

    def arrays(self) -> DeviceArrays:
        """An object that reads and makes the arrays of one call. Raises: an earlier failure on the device."""
        return DeviceArrays(self._comm, self, self._cuda)

    # Point to point --------------------------------------------------------------------------------------------------

    def to_host(self, x: Any) -> Array:
        """Copies x to host memory, to be sent. The host waits for the current stream, and for the copy.

        Raises: CollectiveTimeout if that takes longer than the communicator's limit; DtypeError if x is on another GPU;
        CollectivesError if earlier work on the device failed.
        """
        source = self._cuda.as_array(x)
        stream = self._cuda.current_stream()
        dense = source if source.flags.c_contiguous else source.copy(order="C")
        host = self._cuda.pinned(dense.nbytes)
        self._cuda.copy_d2h(host, dense, stream)
        event = self._cuda.record_event(stream)
        deadline = Deadline(self._comm.timeout)
        while not self._cuda.is_complete(event):
            if deadline.passed():
                self.watchdog.keep_forever((host, dense))
                raise CollectiveTimeout(
                    f"rank {self.rank}: send waits for what is before it on its stream, longer than "
                    f"{self._comm.timeout:g} s"
                )
            time.sleep(PAUSE)
        return host.view(source.dtype).reshape(source.shape)

    def to_device(self, received: Array | tuple[Array, int], out: Any) -> Any:
        """Copies a received array into `out`, which later work of the current stream may use. Returns: `out`

        received: the result of `recv`. If that is a pair of array and sender's rank, a pair is returned here, too
        Raises: ArgumentError if `out` has another shape or dtype.
        """
        if isinstance(received, tuple):
            return self.to_device(received[0], out), received[1]
        target = check_shape(self._cuda.as_array(out, "out"), received.shape, received.dtype)
        stream = self._cuda.current_stream()
        staged = self._cuda.pinned(received.nbytes)
        staged[:] = received.reshape(-1).view(np.uint8)
        dense = target if target.flags.c_contiguous else self._cuda.empty(received.shape, received.dtype)
        self._cuda.copy_h2d(dense, staged, stream)
        if dense is not target:
            self._cuda.xp.copyto(target, dense)
        self.watchdog.watch(self._cuda.record_event(stream), (staged, dense))
        return out

    def receive_work(self, call: CollectiveOp[Array], out: Any) -> DeviceReceiveWork:
        """The result of `recv(async_op=True)` for an `out` on the GPU."""
        return DeviceReceiveWork(call, lambda received: self.to_device(received, out))


class DeviceArrays:
    """The arrays of one call on a GPU: reads, makes, keeps and delivers them, and orders the streams.

    `HostArrays` does the same on the host. Each object is created in the caller's thread, for its current stream.
    """

    device_text = "on GPU"

    def __init__(self, comm: CommunicatorBase, device: DeviceCommunicator, cuda: Cuda) -> None:
        device.watchdog.check()
        self._comm = comm
        self._device = device
        self._cuda = cuda
        self._caller_stream = cuda.current_stream()
        self._buffers: list[Any] = []  # The arrays that the collective reads and writes.
        self._ready: Any = None
        self._stream: Any = None  # The communication stream.
        self._done: Any = None
        self._captured = cuda.capturing(self._caller_stream)
        # An error of this rank alone. It is raised after the operation: the other ranks need this rank's part in it.
        self._error: Exception | None = None

    def new(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Makes an array for the caller in the arena of the caller's stream, before or after `record_ready`.

        After `record_ready` this is impossible on a thread's own default stream. Then the result is a scratch array for
        the operation, and the call raises ArgumentError when the operation is over.
        """
        if self._ready is not None and self._cuda.is_per_thread(self._caller_stream):
            self._error = ArgumentError(
                "the result's shape has to be exchanged first, and another thread cannot make an array in the order of "
                "this thread's own default stream: give lengths, or call it under a cupy.cuda.Stream"
            )
            return self.scratch(shape, dtype)
        with self._cuda.on(self._caller_stream):
            array = self._cuda.empty(shape, dtype)
        if self._ready is not None:
            # The pool may hand out memory that was freed after `ready`, and that the caller's kernels still use.
            self._stream.wait_event(self._cuda.record_event(self._caller_stream))
        self._buffers.append(array)
        return array

    def scratch(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Makes an array that only the communication stream uses. Called after `begin`."""
        with self._cuda.on(self._stream):
            array = self._cuda.empty(shape, dtype)
        self._buffers.append(array)
        return array

    def contiguous(self, source: Any, dtype: Any) -> Any:
        """Returns source, or a contiguous copy in this dtype, made on the communication stream after `begin`."""
        if dtype == source.dtype and source.flags.c_contiguous:
            return source
        array = self.scratch(source.shape, dtype)
        self.copy(array, source)
        return array

    def record_ready(self) -> None:
        """Orders the collective after everything that is on the caller's stream now."""
        self._ready = self._cuda.record_event(self._caller_stream)

    def begin(self, stream: Any) -> None:
        """Makes the communication stream wait for `ready`. Called in the thread that takes the steps."""
        assert self._ready is not None
        self._stream = stream
        stream.wait_event(self._ready)

    def end(self, call: object, transport: DeviceTransport) -> None:
        """Called when all work is on the communication stream. Keeps the buffers alive until that work is complete.

        In a capture, keeps them forever, since a launch of the graph uses them again.
        """
        buffers = [*self._buffers, transport.staged]
        self._buffers = []
        transport.staged = None
        try:
            self._done = self._cuda.record_event(self._stream)
        except Exception:
            self._device.watchdog.keep_forever(buffers)  # The device has failed, and may still write to the buffers.
            raise
        if self._captured:
            self._device.watchdog.keep_forever(buffers)
        else:
            self._device.watchdog.watch(self._done, buffers, call, transport.timeout)

    def wait(self) -> None:
        """Orders later work of the calling thread's current stream after the collective."""
        self._device.watchdog.check()
        self._cuda.current_stream().wait_event(self._done)

    def read(self, x: Any, name: str = "x") -> Any:
        """Returns x as a CuPy array that shares its memory. The array is kept until the collective is complete."""
        array = self._cuda.as_array(x, name)
        self._buffers.append(array)
        return array

    def check_writable(self, array: Any, name: str) -> None:
        """Does nothing: CuPy's arrays can always be written."""

    def result(self, shape: tuple[int, ...], dtype: Any, source: Any, target: Any) -> Any:
        """Memory for a result: `target` if it fits and does not overlap `source`, otherwise a new array."""
        fits = target is not None and (target.shape, target.dtype) == (shape, dtype) and target.flags.c_contiguous
        if fits and (source is None or not overlap(target, source)):
            return target
        return self.new(shape, dtype)

    def complete(self, operation: Steps[None]) -> Steps[None]:
        """Returns `operation` itself: its steps put the operation on the transport's stream."""
        return operation

    def copy(self, target: Any, source: Any) -> None:
        """Copies source into target, on the communication stream."""
        self._cuda.copy(target, source, self._stream)

    def deliver(self, received: Any, target: Any, out: Any) -> Any:
        """Returns a call's result: `received` if `target` is None.

        Otherwise copies `received` into `target`, which is the array of `out`, and returns `out`.
        Raises: ArgumentError if `target` has another shape or dtype.
        """
        if target is None:
            return received
        if target is not received:
            self.copy(check_shape(target, received.shape, received.dtype), received)
        return out

    def preallocate(self, shape: tuple[int, ...], dtype: Any, source: Any, target: Any) -> Any:
        """Returns memory for a result, as `result` does, before the call starts.

        Allocating memory later, in another thread, takes one more event, and fails on a thread's own default stream.
        """
        return self.result(shape, dtype, source, target)

    def reduction_target(self, plan: Plan, source: Any, out: Any, in_place: bool) -> Any:
        """Memory for a reduction's result; None if this rank gets none. Raises: ArgumentError if `out` does not fit."""
        if plan.result is None:
            return None
        if out is None:
            return self.new(plan.result, source.dtype)
        if in_place and plan.result == source.shape:
            return source
        return check_shape(self.read(out, "out"), plan.result, source.dtype)

    def start(
        self,
        plan: Plan,
        source: Any,
        target: Any = None,
        out: Any = None,
        async_op: bool = False,
        scale: Any = None,
        preallocated: Any = None,
    ) -> Any:
        """Runs a call in the communicator's order; with `async_op`, starts it. preallocated: from `preallocate`

        Raises: ArgumentError in a capture over a transport that cannot be captured.
        """
        if self._captured and not self._device.capturable:
            raise ArgumentError(f"{plan.name}: {_NOT_CAPTURABLE}")
        self.record_ready()
        timeout = self._comm.timeout
        call: CollectiveOp[Any] = CollectiveOp(plan, timeout, self, source, target, out, scale, preallocated)
        call.steps = self._steps(call)
        if async_op:
            self._comm.queue.submit(call)
            return DeviceWork(call, self)
        result = self._comm.queue.run(call)
        self.wait()
        return result

    def _steps(self, call: CollectiveOp[Any]) -> Steps[Any]:
        yield from self._comm.verify(call)
        transport = yield from self._device.transport()
        if self._captured and not transport.capturable:
            # Ranks that do not capture begin the operation. So this error must stop the queue. ArgumentError would not.
            raise CollectivesError(f"{call.name}: {_NOT_CAPTURABLE}")
        self.begin(transport.stream)
        try:
            sent = None
            if call.source is not None:
                sent = self.contiguous(call.source, call.plan.wire)
            result = yield from call.plan.body(call, transport, sent, None)
        except GeneratorExit:  # The process exits in the middle of the call, when no event can be watched any more.
            raise
        except BaseException:
            self.end(call, transport)
            raise
        self.end(call, transport)
        if self._error is not None:
            raise self._error
        return result

    # Reductions ------------------------------------------------------------------------------------------------------

    def reduce(
        self, call: CollectiveOp[Any], reduction: Reduction, transport: DeviceTransport, sent: Any, _: None
    ) -> Steps[Any]:
        """The steps of a reduction: they launch it, and then divide and scale on the communication stream."""
        result = call.target
        factor = self._factor(call.scale, transport)
        total = None if result is None else self._total(call, sent, result)
        averages = transport.averages and sent.dtype.kind in "fc" and reduction.op is ReduceOp.MEAN
        averages = averages and not reduction.in_tree  # NCCL's mean scales the values before it adds them.
        received = None if total is None else flat(total)
        in_parts = reduction.in_tree and self._comm.size > 2  # The order of two values makes no difference.
        if in_parts or not transport.reduces(sent.dtype, reduction.op):
            add = getattr(self._cuda.xp, COMBINE[wire_op(reduction.op)].__name__)

            def combine(parts: Any) -> None:
                with self._cuda.on(transport.stream):
                    combine_in_tree(parts, add, parts[0])

            yield from reduction.start_in_parts(self, self._comm, transport, flat(sent), received, combine)
        else:
            between = reduction.op if averages else wire_op(reduction.op)
            yield from reduction.start(transport, between, flat(sent), received)
        if total is None:
            return None
        with self._cuda.on(transport.stream):
            on_device = isinstance(factor, self._cuda.xp.ndarray)
            op = ReduceOp.SUM if averages else reduction.op
            divide_and_scale(total, op, self._comm.size, None if on_device else factor)
            if on_device:  # Multiplied on the device: reading the factor on the host would wait for the device.
                self._cuda.xp.multiply(total, factor.astype(total.dtype), out=total)
        if total is not result:
            self.copy(result, total)
        return result if call.out is None else call.out

    def _total(self, call: CollectiveOp[Any], sent: Any, result: Any) -> Any:
        """Memory for the total: the sent array if it may be overwritten, else the result if it fits, else scratch."""
        if call.name == "all_reduce" and (result is call.source or sent is not call.source):
            return sent  # In place; or `sent` is a private copy, which can also receive the total.
        if result.dtype == sent.dtype and result.flags.c_contiguous and not overlap(result, sent):
            return result
        return self.scratch(result.shape, sent.dtype)

    def _factor(self, scale: Scale, transport: DeviceTransport) -> Any:
        """The scale as a number, or as a 0-d array on the device. If it is a function, this calls it; None if it fails.

        Earlier collectives come before this point of the communication stream, so the function may use their results.
        """
        if not callable(scale):
            return scale
        try:
            with self._cuda.on(transport.stream):
                factor = contextvars.copy_context().run(scale)
            if isinstance(factor, self._cuda.xp.ndarray) and factor.ndim:
                raise ArgumentError(f"scale should be a number or a 0-d array, its shape is {factor.shape}")
        except Exception as error:
            self._error = error
            return None
        return factor


def overlap(a: Any, b: Any) -> bool:
    """Whether the address ranges of two device arrays overlap, so that they may share memory.

    `cupy.may_share_memory` returns False for two views of one PyTorch tensor: each import makes a new memory object.
    """
    if not a.size or not b.size:
        return False
    a_low, a_high = _bounds(a)
    b_low, b_high = _bounds(b)
    return a_low < b_high and b_low < a_high


def _bounds(array: Any) -> tuple[int, int]:
    low = high = array.data.ptr
    for length, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
    return low, high + array.itemsize


def open_device(comm: CommunicatorBase, transport: Transport, x: Any) -> DeviceCommunicator:
    """The part of a communicator for arrays on x's GPU.

    Raises: BackendError if this process cannot use that GPU.
    """
    absent = cuda.why_absent()
    try:
        if absent is not None:
            raise BackendError(f"{absent} ({how_to_install('cuda12')}, or [cuda13])")
        locate = getattr(x, "__dlpack_device__", None)
        return DeviceCommunicator(comm, transport, cuda.load(None if locate is None else int(locate()[1])))
    except CollectivesError as error:
        raise BackendError(f"rank {comm.rank}: {type(x).__name__} x is on a GPU, but {error}") from error


def connect_nccl(comm: CommunicatorBase, transport: Transport) -> DeviceCommunicator:
    """Connects a communicator for which NCCL was requested by name. Collective. Returns: its part for arrays on GPUs

    If this rank's current GPU is device 0, the device whose number is the local rank, modulo the number of devices,
    becomes the current one.
    Raises: BackendError on every rank if any of them cannot use NCCL.
    """
    reason = cuda.why_absent() or ""
    device = None
    if not reason:
        try:
            device = cuda.load()
            device.take_own_device(comm.local_rank)
        except CollectivesError as error:
            reason = str(error)
    device_comm = DeviceCommunicator(comm, transport, device, reason)
    call: CollectiveOp[DeviceTransport] = CollectiveOp(Plan("init", "nccl"), comm.timeout)
    call.steps = device_comm.transport()
    comm.queue.run(call)
    return device_comm
