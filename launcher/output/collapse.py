"""Many ranks print the same: shown once, with who said it and how often. Pure: lines in, groups out, time as a number.

A rank's lines keep their order, and none is lost: each is counted in exactly one group. So a line may only join a
group that comes after the last one of its rank.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

#: Seconds that a line waits for others to say the same.
WINDOW = 0.3
# Lines that wait at most; a flood is shown at once, with fewer put together.
_LIMIT = 10_000


class Group(NamedTuple):
    """A line that each of `ranks` printed `times` times. stream: which of its streams"""

    ranks: tuple[int, ...]
    stream: str
    text: bytes
    times: int


class _Waiting:
    """A line that others may still join."""

    def __init__(self, place: int, key: tuple[str, bytes], until: float) -> None:
        self.place = place
        self.key = key
        self.until = until
        self.counts: dict[int, int] = {}


class Collapser:
    """Lines of `n` ranks.

    >>> lines = Collapser(n=3)
    >>> for rank in (0, 2): lines.feed(rank, "out", b"hello", now=0.0)
    >>> lines.take(now=0.1), lines.take(now=0.3)
    ([], [Group(ranks=(0, 2), stream='out', text=b'hello', times=1)])
    """

    def __init__(self, n: int, window: float = WINDOW, limit: int = _LIMIT) -> None:
        self._n = n
        self._window = window
        self._limit = limit
        self._queue: deque[_Waiting] = deque()
        self._alike: dict[tuple[str, bytes], deque[_Waiting]] = {}
        self._last: dict[int, _Waiting] = {}  # where each rank's latest line stands
        self._places = 0

    def feed(self, rank: int, stream: str, text: bytes, now: float) -> None:
        """Takes one line, without its newline."""
        key = (stream, text)
        last = self._last.get(rank)
        if last is None or last.key != key:
            place = -1 if last is None else last.place
            alike = self._alike.setdefault(key, deque())
            # Oldest first: what the rank has not said yet, and what comes after all that it has.
            last = next((one for one in alike if one.place > place and rank not in one.counts), None)
            if last is None:
                last = _Waiting(self._places, key, now + self._window)
                self._places += 1
                self._queue.append(last)
                alike.append(last)
            self._last[rank] = last
        last.counts[rank] = last.counts.get(rank, 0) + 1

    @property
    def deadline(self) -> float:
        """When `take` has something, at the latest."""
        return self._queue[0].until if self._queue else float("inf")

    def take(self, now: float) -> list[Group]:
        """What has waited long enough, or has been said by all; in order."""
        return self._release(now)

    def drain(self) -> list[Group]:
        """All that waits."""
        return self._release(float("inf"))

    def _release(self, now: float) -> list[Group]:
        groups: list[Group] = []
        queue = self._queue
        while queue and (queue[0].until <= now or len(queue[0].counts) >= self._n or len(queue) > self._limit):
            groups += self._close(queue.popleft())
        return groups

    def _close(self, line: _Waiting) -> list[Group]:
        alike = self._alike[line.key]
        assert alike[0] is line
        alike.popleft()
        if not alike:
            del self._alike[line.key]
        for rank in line.counts:
            if self._last[rank] is line:
                del self._last[rank]
        by_times: dict[int, list[int]] = {}
        for rank in sorted(line.counts):
            by_times.setdefault(line.counts[rank], []).append(rank)
        stream, text = line.key
        return [Group(tuple(ranks), stream, text, times) for times, ranks in by_times.items()]
