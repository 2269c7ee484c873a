"""What a communicator calls for arrays on a GPU: the semantics of host arrays, by whatever carrier the ranks chose.

The order of calls is the communicator's own: a device call stands in the same line as the host calls, and what ranks
must tell each other first (lengths, the choice of a carrier) goes over the host's transport. `wait` orders streams and
does not make the host wait for the device, unless a result has to come from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from collectives._gpu import choosing
from collectives._gpu.carrier import Carrier
from collectives._gpu.cuda import Cuda
from collectives._gpu.passage import Custody, Passage
from collectives.backends.transport import Transport
from collectives.engine.call import CallArguments, CollectiveOp, Steps, Work
from collectives.engine.call_site import user_site
from collectives.engine.verify import Signature, Signatures, signature_hash
from collectives.errors import ArgumentError, CollectivesError
from collectives.ops.base import CommunicatorBase

T = TypeVar("T")

#: Puts a collective on the carrier's stream; gets the headers of all ranks, None if they were not exchanged.
Body = Callable[[Carrier, Signatures | None], Steps[T]]


class DeviceWork(Work[T]):
    """A collective on a GPU under way.

    `wait` makes what the calling thread's current stream does next come after the collective; the host waits only until
    the collective has been put on its stream. `done` tells that it has been put there, not that it is over.
    """

    __slots__ = ("_door", "_passage")

    def __init__(self, call: CollectiveOp[T], passage: Passage, door: Desk) -> None:
        super().__init__(call)
        self._passage = passage
        self._door = door

    def wait(self, timeout: float | None = None) -> T:
        """The collective's result, which the current stream may use; may be called again, on other streams too.

        Raises: as `Work.wait`; what has gone wrong on the device since.
        """
        result = super().wait(timeout)
        self._door.check()
        self._passage.leave()
        return result


class Desk:
    """What all device calls of one communicator share. Its collectives are in `reductions` and `movements`."""

    def __init__(self, calls: CommunicatorBase, transport: Transport, cuda: Cuda | None, why_not: str = "") -> None:
        self._calls = calls
        self._transport = transport
        self._found = cuda
        self._why_not = why_not
        self._custody = Custody(lambda event: self._cuda.passed(event))
        self._carrier: Carrier | None = None
        self.rank = calls.rank
        self.size = calls.size

    @property
    def _cuda(self) -> Cuda:
        assert self._found is not None
        return self._found

    def carrier(self) -> Steps[Carrier]:
        """What moves the arrays; chosen by all ranks together when it is first needed."""
        if self._carrier is None:
            self._carrier = yield from choosing.choose(
                self._found,
                self._transport,
                self._calls.timeout,
                self._calls.registry.wanted,
                self._failed,
                self._why_not,
                self._calls.registry.nccl,
            )
        return self._carrier

    def check(self) -> None:
        """Raises: what has gone wrong on the device, after which the communicator is broken."""
        if self._carrier is not None:
            self._carrier.check()

    def close(self) -> None:
        """Frees what the carrier holds; no call is under way on this rank."""
        if self._carrier is not None:
            with contextlib.suppress(CollectivesError):  # the communicator is broken, and says so elsewhere
                self._carrier.close()

    def watch_stream(self, name: str) -> None:
        """What the current stream has now must end in time: a graph was launched there. Raises: what has gone wrong."""
        if self._carrier is None:
            return
        self.check()
        call: CollectiveOp[None] = CollectiveOp(name, CallArguments(None, "on GPU"), user_site(), self._calls.timeout)
        self._calls.queue.note(call)
        # Recorded outside of any capture, so that the watchdog may ask it.
        self._carrier.watch(self._cuda.mark(self._cuda.current_stream()), call)

    def _failed(self, error: Exception) -> None:
        """Called by another thread when the device's part of a call has failed: host calls must raise it, too."""
        if not isinstance(error, CollectivesError):
            error = CollectivesError(f"rank {self.rank}: {type(error).__name__}: {error}")
        self._calls.queue.break_off(error, self._heard)

    def _heard(self) -> None:
        with contextlib.suppress(CollectivesError):  # it is being raised already
            self.check()

    def _passage(self, *things: Any) -> Passage:
        self.check()
        return Passage(self._cuda, self._custody, *things)

    def _run(
        self,
        name: str,
        x: Any,
        passage: Passage,
        body: Body[T],
        async_op: bool,
        more: str = "",
        shape: tuple[int, ...] | None = None,
    ) -> Any:
        """Has the communicator run `body` in its line. shape: what the ranks must agree on, beside x's dtype."""
        passage.enter()
        more = f"{more} on GPU".lstrip()
        dtype = None if shape is None else x.dtype
        header = Signature(signature_hash(name, more, dtype, shape), 0 if x is None or not x.ndim else len(x))
        call: CollectiveOp[T] = CollectiveOp(name, CallArguments(x, more), user_site(), self._calls.timeout)

        def steps() -> Steps[T]:
            signatures = yield from self._calls._verify(call, header)
            carrier = yield from self.carrier()
            if passage.captured and not carrier.capturable:
                raise ArgumentError(
                    f"{name}: the host takes part in a collective over {carrier.name}, so it cannot be captured into a "
                    "graph; NCCL's can"
                )
            passage.begin(carrier.stream)
            try:
                result = yield from body(carrier, signatures)
            finally:
                event = passage.end()
            if not passage.captured:
                carrier.watch(event, call)
            return result

        call.steps = steps()
        if async_op:
            self._calls.queue.submit(call)
            return DeviceWork(call, passage, self)
        result = self._calls.queue.run(call)
        self.check()
        passage.leave()
        return result

    # Arrays ----------------------------------------------------------------------------------------------------------

    def _array(self, x: Any, what: str = "x") -> Any:
        return self._cuda.as_array(x, what)

    def _out(self, out: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        array = self._array(out, "out")
        if array.shape != shape or array.dtype != dtype:
            raise ArgumentError(f"out should be {dtype} {shape}, is {array.dtype} {array.shape}")
        return array

    def _scratch(self, shape: tuple[int, ...], dtype: Any, carrier: Carrier, passage: Passage) -> Any:
        """An array for the carrier's stream alone."""
        with self._cuda.on(carrier.stream):
            array = self._cuda.empty(shape, dtype)
        passage.keep(array)
        return array

    def _copy(self, target: Any, source: Any, carrier: Carrier) -> None:
        with self._cuda.on(carrier.stream):
            self._cuda.xp.copyto(target, source, casting="unsafe")


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
