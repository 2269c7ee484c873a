"""Who waits in `collectives.init` until all ranks are there, and who is missed."""

from __future__ import annotations

from launcher.judging.verdict import name_ranks


class Joining:
    """The ranks of one job on their way into its world."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._waiting: dict[int, float] = {}  # for how long at most (s)
        self._joined: set[int] = set()

    def waits(self, rank: int, limit: float | None) -> None:
        """A rank waits for the others, `limit` seconds at most; None: no longer, since all have come."""
        if limit is not None:
            self._waiting[rank] = limit
        else:
            self._waiting.pop(rank, None)
            self._joined.add(rank)

    def ended(self, rank: int) -> None:
        """A rank has ended, and waits no more."""
        self._waiting.pop(rank, None)

    def missed(self, rank: int) -> tuple[int, ...]:
        """The ranks that wait for one which has ended and so will never come: none if it has been there."""
        return () if rank in self._joined else tuple(sorted(self._waiting))

    @property
    def limit(self) -> float | None:
        """For how long the most impatient one waits (s); None if nobody does."""
        return min(self._waiting.values(), default=None)

    def sentence(self) -> str:
        """What to say when that time is over."""
        missed = [rank for rank in range(self._n) if rank not in self._waiting and rank not in self._joined]
        waiting, limit = name_ranks(sorted(self._waiting)), self.limit or 0.0
        if not missed:
            return f"the world of all ranks was not there within {limit:g} s, for which {waiting} waited"
        return f"{name_ranks(missed)} did not come to collectives.init() within {limit:g} s, where {waiting} waited"
