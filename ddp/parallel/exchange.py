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

Times = tuple[int, int]  # launched, done: nanoseconds of time.monotonic_ns()


class Exchange:
    """What happens to full buckets: one asynchronous collective each, unless a subclass says otherwise.

    Every method is called in the thread that runs backward.
    joinable: a rank that is out of data can take part with zeros
    """

    joinable = True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._works: list[Work[Any]] = []
        self._buckets: Buckets
        self._control: ControlMessage

    def set_buckets(self, buckets: Buckets) -> None:
        """The buckets are these from now on. Collective; nothing is in flight."""
        self._works = []  # they keep the old buckets' memory
        self._buckets = buckets

    def begin(self, control: ControlMessage) -> None:
        """A synchronized backward begins, and its control message has been launched."""
        self._works = []
        self._control = control

    def launch(self, index: int) -> None:
        """That bucket is complete on this rank; called in the order 0, 1, ... Must not block."""
        self._works.append(self._start(index))

    def _start(self, index: int) -> Work[Any]:
        """Starts the collective of one bucket."""
        raise NotImplementedError

    def poll(self) -> None:
        """Continues what can continue without waiting; called whenever a gradient is complete."""

    def finish(self) -> None:
        """Waits until every bucket is reduced. Raises: the error of the first that failed, with its name."""
        for index, work in enumerate(self._works):
            with error_context(self._buckets.describe(index)):
                work.wait()

    def times(self) -> list[Times | None]:
        """After `finish`: when each bucket was launched and done; None where that is not known."""
        found = [work.times() for work in self._works]
        return [None if each is None else (each[0], each[2]) for each in found]


class AllReduce(Exchange):
    """Each bucket becomes the sum over ranks times the control message's scale, in place."""

    def _start(self, index: int) -> Work[Any]:
        buffer = self._buckets.memory.buffers[index]
        # The communicator runs its calls in order: when it asks for the scale, the control message has arrived.
        work: Work[Any] = self._comm.all_reduce(
            buffer, ReduceOp.SUM, scale=self._control.scale, out=buffer, async_op=True
        )
        return work


class SingleRank(Exchange):
    """One rank: its own gradients are the sum, and a weight is divided out when backward ends."""

    def launch(self, index: int) -> None:
        pass

    def finish(self) -> None:
        scale = self._control.scale()
        if scale != 1.0:
            for buffer in self._buckets.memory.buffers:
                # As on many ranks, which scale in float32: a scale rounded to 16 bits would give other numbers.
                self._comm.all_reduce(buffer, ReduceOp.SUM, scale=scale, out=buffer)

    def times(self) -> list[Times | None]:
        return [None] * len(self._buckets.members)
