"""send and recv of arrays on a GPU: through host memory, whatever carries the collectives.

What two ranks send each other stands beside the order of collectives, and both may send first. An NCCL send occupies
its communicator until the other side receives, so two such sends would wait for each other for ever.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from collectives._gpu.door import Desk
from collectives.engine.call import Work
from collectives.engine.progress import PAUSE
from collectives.errors import CollectiveTimeout
from collectives.pausing import Limit
from collectives.reduction import Array


class DeviceLetters(Desk):
    """The two ends of a letter on a GPU."""

    def letter(self, x: Any) -> Array:
        """x in host memory, to be sent. The host waits for what stands on the current stream, and for the copy.

        Raises: CollectiveTimeout if that takes longer than the communicator's limit.
        """
        source = self._array(x)
        stream = self._cuda.current_stream()
        dense = source if source.flags.c_contiguous else source.copy(order="C")
        host = self._cuda.pinned(dense.nbytes)
        self._cuda.copy_down(host, dense, stream)
        event, limit = self._cuda.mark(stream), Limit(self._calls.timeout)
        while not self._cuda.passed(event):
            if limit.over():
                self._custody.hold_for_ever((host, dense))
                raise CollectiveTimeout(
                    f"rank {self.rank}: send waits for what stands before it on its stream, longer than "
                    f"{self._calls.timeout:g} s"
                )
            time.sleep(PAUSE)
        return host.view(source.dtype).reshape(source.shape)

    def deliver(self, came: Array | tuple[Array, int], out: Any) -> Any:
        """What has come, in `out`, for what the current stream does next. Raises: ArgumentError if it does not fit.

        came: what `recv` returned, for any source with the rank that sent it; so is the result
        """
        if isinstance(came, tuple):
            return self.deliver(came[0], out), came[1]
        target = self._out(out, came.shape, came.dtype)
        stream = self._cuda.current_stream()
        staged = self._cuda.pinned(came.nbytes)
        staged[:] = came.reshape(-1).view(np.uint8)
        dense = target if target.flags.c_contiguous else self._cuda.empty(came.shape, came.dtype)
        self._cuda.copy_up(dense, staged, stream)
        if dense is not target:
            self._cuda.xp.copyto(target, dense)
        self._custody.hold(self._cuda.mark(stream), (staged, dense))
        return out

    def delivered(self, work: Work[Array], out: Any) -> LetterWork:
        """What `recv(async_op=True)` returns for an `out` on the GPU."""
        return LetterWork(work, self, out)


class LetterWork(Work[Any]):
    """A receive into an array on a GPU: it is copied there by the stream on which somebody waits first."""

    __slots__ = ("_desk", "_out", "_result", "_there")

    def __init__(self, work: Work[Array], desk: DeviceLetters, out: Any) -> None:
        super().__init__(work._call)
        self._desk = desk
        self._out = out
        self._there = False

    def wait(self, timeout: float | None = None) -> Any:
        """`out`, which the current stream may use; with the sender's rank if any could send."""
        came = super().wait(timeout)
        if not self._there:
            self._result = self._desk.deliver(came, self._out)
            self._there = True
        return self._result
