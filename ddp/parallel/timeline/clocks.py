"""One clock for all ranks, without a message of its own.

`time.monotonic_ns()` (CLOCK_MONOTONIC) is one clock for all processes of a node: their offset is exactly 0. Clocks of
other nodes began when these were started. How far apart they are is read off the control messages: an all-reduce is
done at nearly the same moment everywhere, so the offset of a node is the median, over the last messages, of (done on
it - done on rank 0's node), where a node is done when the first of its ranks is. Nobody can be done before the last
rank has launched, which bounds the offset from both sides: launched here - done there <= offset <= done here -
launched there.

Accuracy: the difference in how quickly the end of a message is noticed, a few tenths of a millisecond over TCP; never
worse than the quickest of the last messages took. Clocks that drift apart are followed, since only the last 64 count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp.parallel.timeline.marks import DONE, LAUNCHED

Array = np.ndarray[Any, Any]
_MESSAGES = 64


class Clocks:
    """How far the clocks of all ranks are from rank 0's, as far as the messages heard so far tell.

    nodes: which node each rank is on, in rank order
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        _, places = np.unique(np.asarray(nodes), return_inverse=True)
        self._place = places.reshape(-1)  # of each rank's node
        self._order = np.argsort(self._place, kind="stable")
        self._starts = np.flatnonzero(np.diff(self._place[self._order], prepend=-1))
        self._home = int(self._place[0])
        self._heard: deque[tuple[Array, Array, Array]] = deque(maxlen=_MESSAGES)
        self._offsets: Array | None = np.zeros(len(nodes))

    def hear(self, table: Array) -> None:
        """Learns from what all ranks told of one control message. table: (size, width), see `timeline.marks`"""
        if len(self._starts) == 1 or not table[:, DONE].all():
            return
        done = np.minimum.reduceat(table[self._order, DONE], self._starts)
        launched = np.maximum.reduceat(table[self._order, LAUNCHED], self._starts)
        home = self._home
        self._heard.append((launched - done[home], done - done[home], done - launched[home]))
        self._offsets = None

    def offsets(self) -> Array:
        """(size,) nanoseconds that each rank's clock is ahead of rank 0's; 0 where nothing is known yet."""
        if self._offsets is None:
            least, guess, most = (np.array(part) for part in zip(*self._heard, strict=True))
            low, high = least.max(axis=0), most.min(axis=0)
            middle = np.median(guess, axis=0)
            # Clocks that drift within the window may contradict themselves: then the median alone is meant.
            offsets = np.where(low <= high, np.clip(middle, low, high), middle)
            offsets[self._home] = 0.0
            self._offsets = offsets[self._place]
        return self._offsets
