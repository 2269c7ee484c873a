"""What all device collectives of a communicator share: the transport that the ranks chose, and how a call runs.

The order of calls is the communicator's own: a device call stands in the same line as the host calls, and what ranks
must tell each other first (lengths, the choice of a transport) goes over the host's transport. `wait` orders streams
and does not make the host wait for the device, unless a result has to come from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from collectives.backends.device.cuda import Cuda
from collectives.backends.device.device_transport import DeviceTransport
from collectives.backends.device.negotiation import negotiate
from collectives.backends.device.stream_handoff import StreamHandoff
from collectives.backends.nccl.watchdog import Watchdog
from collectives.engine.call import CallArguments, CollectiveOp, Work
from collectives.engine.communicator_base import CommunicatorBase
from collectives.engine.verify import signature_hash
from collectives.errors import ArgumentError, CollectivesError
from collectives.flight.recorder import FAILED
from collectives.transport import Signature, Signatures, Steps, Transport

T = TypeVar("T")

#: Puts a collective on the transport's stream; gets the signatures of all ranks, None if they were not exchanged.
Body = Callable[[DeviceTransport, Signatures | None], Steps[T]]


class DeviceWork(Work[T]):
    """A collective on a GPU under way.

    `wait` makes what the calling thread's current stream does next come after the collective; the host waits only until
    the collective has been put on its stream. `done` tells that it has been put there, not that it is over.
    """

    __slots__ = ("_handoff", "_watchdog")

    def __init__(self, call: CollectiveOp[T], handoff: StreamHandoff, watchdog: Watchdog) -> None:
        super().__init__(call)
        self._handoff = handoff
        self._watchdog = watchdog

    def wait(self, timeout: float | None = None) -> T:
        """The collective's result, which the current stream may use; may be called again, on other streams too.

        Raises: as `Work.wait`; what has gone wrong on the device since.
        """
        result = super().wait(timeout)
        self._watchdog.check()
        self._handoff.wait()
        return result


class DeviceBase:
    """One communicator's end for arrays on a GPU, without any collective: each family of them inherits this.

    cuda: this rank's device, None if it has none, for the reason `why_not`
    """

    def __init__(self, comm: CommunicatorBase, transport: Transport, cuda: Cuda | None, why_not: str = "") -> None:
        self._comm = comm
        self._transport = transport
        self._device = cuda
        self._why_not = why_not
        self.watchdog = Watchdog(comm.rank, lambda event: self._cuda.passed(event), self._failed)
        self._device_transport: DeviceTransport | None = None
        self.rank = comm.rank
        self.size = comm.size

    @property
    def _cuda(self) -> Cuda:
        assert self._device is not None
        return self._device

    def transport(self) -> Steps[DeviceTransport]:
        """What moves the arrays; chosen by all ranks together when it is first needed."""
        if self._device_transport is None:
            comm = self._comm
            self._device_transport = yield from negotiate(
                self._device,
                self._transport,
                comm.timeout,
                comm.registry.wanted,
                self.watchdog,
                self._why_not,
                comm.registry.nccl,
            )
        return self._device_transport

    def close(self) -> None:
        """Frees what the device transport holds; no call is under way on this rank."""
        with contextlib.suppress(CollectivesError):  # the communicator is broken, and says so elsewhere
            self.watchdog.close()
        if self._device_transport is not None:
            with contextlib.suppress(CollectivesError):
                self._device_transport.close()

    def watch_stream(self, name: str) -> None:
        """What the current stream has now must end in time: a graph was launched there. Raises: what has gone wrong."""
        if self._device_transport is None:
            return
        self.watchdog.check()
        call = self._call(name, None, "on GPU")
        self._comm.queue.note(call)
        # Recorded outside of any capture, so that the watchdog may ask it.
        event = self._cuda.mark(self._cuda.current_stream())
        self.watchdog.watch(event, None, call, self._device_transport.timeout)

    def _failed(self, error: Exception, calls: list[object]) -> None:
        """Called by another thread when the device's part of a call has failed: host calls must raise it, too."""
        for call in calls:
            if isinstance(call, CollectiveOp) and call.recorder is not None:
                # It was called done, since it was on its stream, and has come to nothing.
                call.recorder.end(call.record, FAILED)
        if not isinstance(error, CollectivesError):
            error = CollectivesError(f"rank {self.rank}: {type(error).__name__}: {error}")
        self._comm.queue.break_off(error, self.watchdog.heard)

    def _call(self, name: str, x: Any, more: str) -> CollectiveOp[Any]:
        return CollectiveOp(name, CallArguments(x, more), self._comm.timeout)

    def _handoff(self, *buffers: Any) -> StreamHandoff:
        self.watchdog.check()
        return StreamHandoff(self._cuda, self.watchdog, *buffers)

    def _run(
        self,
        name: str,
        x: Any,
        handoff: StreamHandoff,
        body: Body[T],
        async_op: bool,
        more: str = "",
        shape: tuple[int, ...] | None = None,
    ) -> Any:
        """Has the communicator run `body` in its order. shape: what the ranks must agree on, beside x's dtype."""
        handoff.record_ready()
        more = f"{more} on GPU".lstrip()
        dtype = None if shape is None else x.dtype
        signature = Signature(signature_hash(name, more, dtype, shape), 0 if x is None or not x.ndim else len(x))
        call = self._call(name, x, more)

        def steps() -> Steps[T]:
            signatures = yield from self._comm.verify(call, signature)
            transport = yield from self.transport()
            if handoff.captured and not transport.capturable:
                raise ArgumentError(
                    f"{name}: the host takes part in a collective over {transport.name}, so it cannot be captured into "
                    "a graph; NCCL's can"
                )
            handoff.begin(transport.stream)
            try:
                return (yield from body(transport, signatures))
            finally:
                handoff.end(call, transport.timeout)

        call.steps = steps()
        if async_op:
            self._comm.queue.submit(call)
            return DeviceWork(call, handoff, self.watchdog)
        result = self._comm.queue.run(call)
        self.watchdog.check()
        handoff.wait()
        return result

    # Arrays ----------------------------------------------------------------------------------------------------------

    def _out(self, out: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        array = self._cuda.as_array(out, "out")
        if array.shape != shape or array.dtype != dtype:
            raise ArgumentError(f"out should be {dtype} {shape}, is {array.dtype} {array.shape}")
        return array

    def _scratch(self, shape: tuple[int, ...], dtype: Any, transport: DeviceTransport, handoff: StreamHandoff) -> Any:
        """An array for the transport's stream alone."""
        with self._cuda.on(transport.stream):
            array = self._cuda.empty(shape, dtype)
        handoff.keep(array)
        return array

    def _contiguous(self, source: Any, dtype: Any, transport: DeviceTransport, handoff: StreamHandoff) -> Any:
        """source itself, or a contiguous copy of it in this dtype, made on the transport's stream."""
        if dtype == source.dtype and source.flags.c_contiguous:
            return source
        array = self._scratch(source.shape, dtype, transport, handoff)
        self._cuda.copy(array, source, transport.stream)
        return array


def overlap(a: Any, b: Any) -> bool:
    """Whether two device arrays may share memory, by the addresses between which they lie."""
    if not a.size or not b.size:
        return False
    (a_low, a_high), (b_low, b_high) = _bounds(a), _bounds(b)
    return a_low < b_high and b_low < a_high


def _bounds(array: Any) -> tuple[int, int]:
    low = high = array.data.ptr
    for length, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
    return low, high + array.itemsize
