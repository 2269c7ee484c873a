"""How buckets are reduced: an exchange takes each bucket when it is full, and waits for all of them when backward ends.

The reducer decides when a bucket is launched; the exchange decides what happens to it. `AllReduce` is the ordinary one;
communication hooks and sharded optimizers bring their own.
"""

from __future__ import annotations

from typing import Any

from collectives import Communicator, ReduceOp, Work
from ddp.parallel.buckets import Buckets
from ddp.parallel.control import ControlMessage
from ddp.parallel.error_context import error_context

# When a bucket was launched, and when it was reduced (time.monotonic_ns()).
Times = tuple[int, int]


class Exchange:
    """Reduces full buckets, by default with one asynchronous collective each.

    `begin` and the methods below it are called in the thread that runs backward.
    joinable: whether a rank that is out of data can take part with zeros
    """

    joinable = True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._works: list[Work[Any]] = []
        self._buckets: Buckets
        self._control: ControlMessage

    def set_buckets(self, buckets: Buckets) -> None:
        """Uses these buckets from now on. Collective; no collective of a bucket may be in flight."""
        self._works = []  # old works would keep the memory of old buckets
        self._buckets = buckets

    def begin(self, control: ControlMessage) -> None:
        """Called when a synchronized backward begins and its control message has been launched."""
        self._works = []
        self._control = control

    def launch(self, index: int) -> None:
        """Starts the reduction of a bucket that is full on this rank. Called in the order 0, 1, ... Must not block."""
        self._works.append(self._start(index))

    def _start(self, index: int) -> Work[Any]:
        """Starts the collective of one bucket."""
        raise NotImplementedError

    def poll(self) -> None:
        """Called whenever a gradient is complete. Reductions of several collectives continue here, without waiting."""

    def finish(self) -> None:
        """Waits until every bucket is reduced. Raises: the error of the first bucket that failed, with its name."""
        for index, work in enumerate(self._works):
            with error_context(self._buckets.describe(index)):
                work.wait()

    def times(self) -> list[Times | None]:
        """After `finish`: when each bucket was launched and reduced; None where that is not known."""
        times = [work.times() for work in self._works]
        return [None if moments is None else (moments[0], moments[2]) for moments in times]


class AllReduce(Exchange):
    """Each bucket becomes the sum over ranks times the control message's scale, in place."""

    def _start(self, index: int) -> Work[Any]:
        buffer = self._buckets.memory.buffers[index]
        # The communicator completes its calls in order. So when it calls `scale`, the control message has arrived.
        work: Work[Any] = self._comm.all_reduce(
            buffer, ReduceOp.SUM, scale=self._control.scale, out=buffer, async_op=True
        )
        return work


class SingleRank(Exchange):
    """The exchange of a single rank, whose gradients are the sum already. `finish` divides them by the weight."""

    def launch(self, index: int) -> None:
        pass

    def finish(self) -> None:
        scale = self._control.scale()
        if scale != 1.0:
            for buffer in self._buckets.memory.buffers:
                # By all_reduce: it scales 16-bit gradients in float32. In 16 bits the scale would be rounded.
                self._comm.all_reduce(buffer, ReduceOp.SUM, scale=scale, out=buffer)

    def times(self) -> list[Times | None]:
        return [None] * len(self._buckets.members)
