"""send and recv of arrays on a GPU: through host memory, whatever moves the collectives.

What two ranks send each other stands beside the order of collectives, and both may send first. An NCCL send occupies
its communicator until the other side receives, so two such sends would wait for each other for ever.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from collectives.backends.device.device_base import DeviceBase
from collectives.engine.call import Work
from collectives.engine.progress import PAUSE
from collectives.errors import CollectiveTimeout
from collectives.reduction import Array
from collectives.time_limit import TimeLimit


class DeviceP2P(DeviceBase):
    """The two ends of a message whose array is on a GPU."""

    def to_host(self, x: Any) -> Array:
        """x in host memory, to be sent. The host waits for what stands on the current stream, and for the copy.

        Raises: CollectiveTimeout if that takes longer than the communicator's limit.
        """
        source = self._cuda.as_array(x)
        stream = self._cuda.current_stream()
        dense = source if source.flags.c_contiguous else source.copy(order="C")
        host = self._cuda.pinned(dense.nbytes)
        self._cuda.copy_down(host, dense, stream)
        event, limit = self._cuda.mark(stream), TimeLimit(self._comm.timeout)
        while not self._cuda.passed(event):
            if limit.passed():
                self.watchdog.leak((host, dense))
                raise CollectiveTimeout(
                    f"rank {self.rank}: send waits for what stands before it on its stream, longer than "
                    f"{self._comm.timeout:g} s"
                )
            time.sleep(PAUSE)
        return host.view(source.dtype).reshape(source.shape)

    def to_device(self, received: Array | tuple[Array, int], out: Any) -> Any:
        """What has been received, in `out`, for what the current stream does next.

        received: what `recv` returned, for any source with the rank that sent it; so is the result
        Raises: ArgumentError if it does not fit.
        """
        if isinstance(received, tuple):
            return self.to_device(received[0], out), received[1]
        target = self._out(out, received.shape, received.dtype)
        stream = self._cuda.current_stream()
        staged = self._cuda.pinned(received.nbytes)
        staged[:] = received.reshape(-1).view(np.uint8)
        dense = target if target.flags.c_contiguous else self._cuda.empty(received.shape, received.dtype)
        self._cuda.copy_up(dense, staged, stream)
        if dense is not target:
            self._cuda.xp.copyto(target, dense)
        self.watchdog.watch(self._cuda.mark(stream), (staged, dense))
        return out

    def receive_work(self, work: Work[Array], out: Any) -> DeviceReceiveWork:
        """What `recv(async_op=True)` returns for an `out` on the GPU."""
        return DeviceReceiveWork(work, self, out)


class DeviceReceiveWork(Work[Any]):
    """A receive into an array on a GPU: it is copied there by the stream that first waits for it."""

    __slots__ = ("_device", "_out", "_result")

    def __init__(self, work: Work[Array], device: DeviceP2P, out: Any) -> None:
        super().__init__(work._call)
        self._device = device
        self._out = out
        self._result: Any = None

    def wait(self, timeout: float | None = None) -> Any:
        """`out`, which the current stream may use; with the sender's rank if any could send."""
        received = super().wait(timeout)
        if self._result is None:
            self._result = self._device.to_device(received, self._out)
        return self._result
