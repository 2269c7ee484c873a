"""The control message: what ranks must agree on, once for each synchronized backward.

Nothing rides inside a gradient, because hooks may round, drop or shard one. The message is float64 and summed over the
ranks; it is launched before the first bucket, so the total weight is known when the first sum is there. A sum can also
carry what each rank has to say by itself: every rank writes into its own row, and zeros into the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp, Work
from ddp.parallel import wishes

Array = np.ndarray[Any, Any]
_WEIGHT, _WEIGHTED, _ABSENT, _COMPANY, _WISHES = range(5)
_USED = _WISHES + wishes.KINDS
NO_CHECKSUM = -1.0


class ControlMessage:
    """The message of one model; one is under way at a time.

    array: (7 + parameters + size * (1 + width),) float64: the weight, whether one was given, whether this rank has run
    out of data, what it weighs then, its wishes, a used bit for each parameter; then a row for each rank: a checksum,
    and `width` marks of the timeline
    """

    def __init__(self, comm: Communicator, parameters: int, width: int) -> None:
        self._comm = comm
        self._rows = _USED + parameters
        self.array: Array = np.zeros(self._rows + comm.size * (1 + width))
        self._table = self.array[self._rows :].reshape(comm.size, 1 + width)
        self._work: Work[Any] | None = None
        self.given = False  # this rank gave a weight

    def send(
        self,
        weight: float | None,
        used: Sequence[bool],
        checksum: float = NO_CHECKSUM,
        marks: Array | None = None,
        absent: bool = False,
        wished: Sequence[bool] = (False,) * wishes.KINDS,
    ) -> None:
        """Launches the message with what this rank has to say.

        weight: None: no weight was given, which counts as 1
        checksum: of the parameters, a whole number below 2^53; marks: (width,) of the timeline
        absent: this rank only keeps the others company; its weight counts if they give none
        wished: what this rank wishes of all, see `wishes`
        """
        array = self.array
        array[self._rows :] = 0
        counted = 1.0 if weight is None else weight
        array[_WEIGHT], array[_COMPANY] = (0.0, counted) if absent else (counted, 0.0)
        array[_WEIGHTED] = self.given = weight is not None and not absent
        array[_ABSENT] = absent
        array[_WISHES:_USED] = wished
        array[_USED : self._rows] = used
        row = self._table[self._comm.rank]
        row[0] = checksum
        if marks is not None:
            row[1:] = marks
        if self._comm.size > 1:
            self._work = self._comm.all_reduce(array, ReduceOp.SUM, out=array, async_op=True)

    def agreement(self) -> Array:
        """(4 + parameters,) what must be alike for a captured step to be right: weights, absent ranks, used bits."""
        return np.concatenate([self.array[:_WISHES], self.array[_USED : self._rows] > 0])

    def another(self) -> ControlMessage:
        """A message of the same form, beside this one."""
        size = self._comm.size
        return ControlMessage(self._comm, self._rows - _USED, (len(self.array) - self._rows) // size - 1)

    def done(self) -> bool:
        """True if it has arrived on this rank."""
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """Returns once it has arrived. Raises: what ended it."""
        if self._work is not None:
            self._work.wait()

    def times(self) -> tuple[int, int] | None:
        """When it was launched and when it arrived, in monotonic nanoseconds; None if that is not known."""
        times = None if self._work is None else self._work.times()
        return None if times is None else (times[0], times[2])

    def scale(self) -> float:
        """What makes of the sum of gradients their mean. Where nobody had any weight there is no gradient: 0."""
        total = float(self.array[_WEIGHT])
        if self.weighted_ranks() == 0:
            total += float(self.array[_COMPANY])
        return 1.0 / total if total != 0.0 else 0.0

    def weighted_ranks(self) -> int:
        """How many ranks gave a weight."""
        return int(self.array[_WEIGHTED])

    def absent_ranks(self) -> int:
        """How many ranks have run out of data."""
        return int(self.array[_ABSENT])

    def wishes(self) -> list[int]:
        """How many ranks had each wish."""
        return [int(count) for count in self.array[_WISHES:_USED]]

    def used(self) -> list[bool]:
        """Whether any rank used each parameter."""
        flags: list[bool] = (self.array[_USED : self._rows] > 0).tolist()
        return flags

    def checksums(self) -> Array:
        """(size,) the ranks' checksums, NO_CHECKSUM where a rank took none."""
        return self._table[:, 0]

    def marks(self) -> Array:
        """(size, width) the ranks' marks."""
        return self._table[:, 1:]
