r"""A collective under way on a GPU: what orders it after the caller's kernels and before those that use its result.

    the caller's stream   ── kernels ── ready ──────────────────────── wait(done) ── kernels ──
                                           \                          /
    communication stream   ───────────── wait(ready) ── collective ── done

The host waits for neither edge. CuPy's memory pool keeps one arena a stream and reuses freed memory at once, in that
stream's order, which knows nothing of the communication stream. So a result lies in the arena of the caller's stream
and `ready` is recorded after its allocation; everything that the communication stream touches is kept by the watchdog
until `done` has passed; and what it makes for itself lies in its own arena and is used by no other stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from collectives.backends.device.cuda import Cuda
from collectives.backends.nccl.watchdog import Watchdog
from collectives.engine.call import CollectiveOp, Work
from collectives.errors import ArgumentError
from collectives.reduction import Array

T = TypeVar("T")


class StreamHandoff:
    """The edges and the buffers of one collective. Made in the caller's thread, on the caller's current stream.

    buffers: what the collective reads and writes
    """

    def __init__(self, cuda: Cuda, watchdog: Watchdog, *buffers: Any) -> None:
        self._cuda = cuda
        self._watchdog = watchdog
        self._origin = cuda.current_stream()
        self._buffers = list(buffers)
        self._ready: Any = None
        self._comm: Any = None
        self._done: Any = None
        self.captured = cuda.capturing(self._origin)

    def result(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array for the caller, in the arena of the caller's stream; before or after `record_ready`."""
        if self._ready is not None and self._cuda.is_per_thread(self._origin):
            raise ArgumentError(
                "the result's shape has to be exchanged first, and another thread cannot make an array in the order of "
                "this thread's own default stream: give lengths, or call it under a cupy.cuda.Stream"
            )
        with self._cuda.on(self._origin):
            array = self._cuda.empty(shape, dtype)
        if self._ready is not None:
            # What was freed since `ready` may lie here, and kernels of the caller's may still use it.
            self._comm.wait_event(self._cuda.mark(self._origin))
        self.keep(array)
        return array

    def scratch(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array for the communication stream alone; after `begin`."""
        with self._cuda.on(self._comm):
            array = self._cuda.empty(shape, dtype)
        self.keep(array)
        return array

    def contiguous(self, source: Any, dtype: Any) -> Any:
        """source itself, or a contiguous copy of it in this dtype, made on the communication stream; after `begin`."""
        if dtype == source.dtype and source.flags.c_contiguous:
            return source
        array = self.scratch(source.shape, dtype)
        self._cuda.copy(array, source, self._comm)
        return array

    def keep(self, *buffers: Any) -> None:
        """Keeps these until the collective is done."""
        self._buffers.extend(buffers)

    def record_ready(self) -> None:
        """Compute before communication: the collective will come after all that the caller's stream has now."""
        self._ready = self._cuda.mark(self._origin)

    def begin(self, comm: Any) -> None:
        """Has the communication stream wait for `ready`; in whichever thread drives the collective."""
        assert self._ready is not None
        self._comm = comm
        comm.wait_event(self._ready)

    def end(self, call: object, timeout: float | None) -> None:
        """Everything has been put on the communication stream. timeout: s; until it has to have passed, if ever"""
        buffers, self._buffers = self._buffers, []
        try:
            self._done = self._cuda.mark(self._comm)
        except Exception:
            self._watchdog.leak(buffers)  # the device has failed: what is still written to is not known
            raise
        if self.captured:
            self._watchdog.leak(buffers)
        else:
            self._watchdog.watch(self._done, buffers, call, timeout)

    def wait(self) -> None:
        """Communication before compute: what the calling thread's current stream does next may use the result."""
        self._watchdog.check()
        self._cuda.current_stream().wait_event(self._done)


class DeviceWork(Work[T]):
    """A collective on a GPU under way.

    `wait` makes what the calling thread's current stream does next come after the collective; the host waits only until
    the collective has been put on its stream. `done` says that it has been put there, not that it is over.
    """

    __slots__ = ("_handoff",)

    def __init__(self, call: CollectiveOp[T], handoff: StreamHandoff) -> None:
        super().__init__(call)
        self._handoff = handoff

    def wait(self, timeout: float | None = None) -> T:
        """The collective's result, which the current stream may use; may be called again, on other streams too.

        Raises: as `Work.wait`; what has gone wrong on the device since.
        """
        result = super().wait(timeout)
        self._handoff.wait()
        return result


class DeviceReceiveWork(Work[Any]):
    """A receive into an array on a GPU: it is copied there by the stream that first waits for it.

    deliver: copies what `recv` returned to the device
    """

    __slots__ = ("_deliver", "_result")

    def __init__(self, work: Work[Array], deliver: Callable[[Any], Any]) -> None:
        super().__init__(work._call)
        self._deliver = deliver
        self._result: Any = None

    def wait(self, timeout: float | None = None) -> Any:
        """`out`, which the current stream may use; with the sender's rank if any could send."""
        received = super().wait(timeout)
        if self._result is None:
            self._result = self._deliver(received)
        return self._result
