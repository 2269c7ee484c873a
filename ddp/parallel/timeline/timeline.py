"""The timeline of one model on one rank: takes steps in, exchanges marks with the other ranks, gives statistics out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp.parallel.timeline import recorder
from ddp.parallel.timeline.clocks import Clocks
from ddp.parallel.timeline.marks import row_of, row_width
from ddp.parallel.timeline.stats import Stats
from ddp.parallel.timeline.steps import Contents, Step
from ddp.parallel.timeline.summary import one_line
from ddp.parallel.timeline.sums import Entry, Sums

if TYPE_CHECKING:
    from ddp.parallel.exchange import Buckets

Array = np.ndarray[Any, Any]
_KEPT = 256  # steps
_FLOATS = 1 << 18  # of all tables that wait to be added up: 2 MiB


class Timeline:
    """What the steps of one model took, on this rank and, by what the others tell in control messages, on all.

    rank, size: this rank, and how many; nodes: which node each rank is on, in rank order
    width: floats that each rank tells in a control message; `follow` changes it
    steps: the latest ones

    One backward after another: `marks` goes into its control message, `hear` takes what came back, `add` its step.
    """

    def __init__(self, rank: int, size: int, nodes: Sequence[int]) -> None:
        assert len(nodes) == size
        self.rank = rank
        self.size = size
        self.steps: deque[Step] = deque(maxlen=_KEPT)
        self._clocks = Clocks(nodes)
        self._contents = Contents()
        self.width = row_width(size, 0)
        self._many = 1
        self._latest: Entry | None = None
        self._told: Entry | None = None  # what the control message under way is about
        self._pending: list[Entry] = []  # not added up yet
        self._ended = 0
        self._sums = Sums(rank, size)
        recorder.opened(self)

    def follow(self, buckets: Buckets) -> None:
        """The buckets are these from the next backward on."""
        self._contents = Contents.of(buckets)
        self.width = row_width(self.size, len(self._contents.nbytes))
        self._many = max(1, min(_KEPT, _FLOATS // (self.size * self.width)))

    def marks(self) -> Array:
        """(width,) float64: what this rank tells in the control message that is launched next."""
        self._told = self._latest
        return row_of(None if self._told is None else self._told.step, self.width)

    def hear(self, table: Array) -> None:
        """The control message has arrived. table: (size, width) what all ranks told in it"""
        if self._told is not None:
            # The message is used again for the next backward.
            self._told.table = table = table.copy()
            self._told = None
            self._clocks.hear(table)

    def add(self, step: Step) -> None:
        """A synchronized backward has ended."""
        step.contents = self._contents
        self.steps.append(step)
        if len(self._pending) >= self._many:
            # The tables of all of these have come: the ranks tell of each step in the next one's message.
            self._sums.add(self._pending, self._clocks.offsets())
            self._pending = []
        self._latest = Entry(step, self._ended)
        self._pending.append(self._latest)
        self._ended = step.ended
        recorder.note(self, step)

    def offset(self) -> int:
        """Nanoseconds that this rank's clock is ahead of rank 0's, as far as is known."""
        return int(self._clocks.offsets()[self.rank])

    def stats(self) -> Stats:
        """Statistics of the steps since the last `summary`. Not collective."""
        sums = self._sums.copy()
        sums.add(self._pending, self._clocks.offsets())
        return Stats.of(sums, self.rank, self.size)

    def summary(self) -> str:
        """The same in one line; begins a new period, so that pauses between epochs count nowhere. Not collective."""
        line = one_line(self.stats())
        # The latest step is still told to the other ranks, which may not begin a new period.
        self._pending, self._ended, self._sums = [], 0, Sums(self.rank, self.size)
        return line
