"""How buckets are reduced: an exchange takes each bucket when it is full, and gives all back when backward ends.

The reducer decides when a bucket goes; the exchange decides what happens to it. `AllReduce` is the ordinary one;
communication hooks and sharded optimizers bring their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from collectives import Communicator, ReduceOp, Work
from ddp._layout import FlatBuckets
from ddp.parallel.control import ControlMessage
from ddp.parallel.naming import naming

Times = tuple[int, int]  # launched, done: nanoseconds of time.monotonic_ns()


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The gradients of one plan, in memory.

    names: of each gradient, numbered as in memory.layout.places
    members: the gradients of each bucket, in launch order; memory.buffers and memory.views hold them
    """

    memory: FlatBuckets
    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]

    def words(self, bucket: int) -> str:
        """The bucket as an error message names it."""
        names, members = self.names, self.members[bucket]
        if len(members) <= 4:
            listed = ", ".join(names[index] for index in members)
        else:
            listed = f"{names[members[0]]}, {names[members[1]]}, ..., {names[members[-1]]}"
        return f"bucket {bucket} of {len(self.members)} ({listed})"


class Exchange(Protocol):
    """What happens to full buckets. Everything is called in the thread that runs backward."""

    def follow(self, buckets: Buckets) -> None:
        """The buckets are these from now on. Collective; nothing is under way."""

    def begin(self, control: ControlMessage) -> None:
        """A synchronized backward begins, and its control message has been launched."""

    def launch(self, index: int) -> None:
        """That bucket is complete on this rank; its turn comes in the order 0, 1, ... Must not block."""

    def poll(self) -> None:
        """Goes on with what can go on without waiting; called whenever a gradient is complete."""

    def finish(self) -> None:
        """Waits until every bucket holds what it should. Raises: the error of the first that failed, with its name."""

    def times(self) -> list[Times | None]:
        """After `finish`: when each bucket was launched and done; None where that is not known."""


class AllReduce:
    """Each bucket becomes the sum over ranks times the control message's scale, where it lies."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._works: list[Work[Any]] = []
        self._buckets: Buckets
        self._control: ControlMessage

    def follow(self, buckets: Buckets) -> None:
        self._works = []  # they keep the old buckets' memory
        self._buckets = buckets

    def begin(self, control: ControlMessage) -> None:
        self._works = []
        self._control = control

    def launch(self, index: int) -> None:
        buffer = self._buckets.memory.buffers[index]
        # The communicator runs its calls in order: when it asks for the scale, the control message has arrived.
        work = self._comm.all_reduce(buffer, ReduceOp.SUM, scale=self._control.scale, out=buffer, async_op=True)
        self._works.append(work)

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        for index, work in enumerate(self._works):
            with naming(self._buckets.words(index)):
                work.wait()

    def times(self) -> list[Times | None]:
        found = [work.times() for work in self._works]
        return [None if each is None else (each[0], each[2]) for each in found]


class Alone:
    """One rank: its own gradients are the sum, and a weight is divided out when backward ends."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def follow(self, buckets: Buckets) -> None:
        self._buckets = buckets

    def begin(self, control: ControlMessage) -> None:
        self._control = control

    def launch(self, index: int) -> None:
        pass

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        scale = self._control.scale()
        if scale != 1.0:
            for buffer in self._buckets.memory.buffers:
                # As on many ranks: of 16 bits, the scale itself would have no more than these.
                self._comm.all_reduce(buffer, ReduceOp.SUM, scale=scale, out=buffer)

    def times(self) -> list[Times | None]:
        return [None] * len(self._buckets.members)
