"""The deadlines of a job that runs, and the time for which they do not: while it is stopped, or somebody debugs it."""

from __future__ import annotations

# Those that say how long a job may take: they do not run while somebody debugs it. The others end a job that is over.
_HELD = ("start", "limit", "joining", "stopping")


class Clocks:
    """What happens when its time comes, by name. Times are monotonic, in seconds.

    stood: for how long the job has stood still
    """

    def __init__(self) -> None:
        self.stood = 0.0
        self._at: dict[str, float] = {}
        self._left: dict[str, float] = {}  # of those that do not run now
        self._held: float | None = None  # since when they do not

    def put(self, name: str, now: float, seconds: float) -> None:
        """So many seconds from now."""
        if self._held is not None and name in _HELD:
            self._left[name] = seconds
        else:
            self._at[name] = now + seconds

    def begin(self, name: str, now: float, seconds: float) -> None:
        """The same, unless it runs already."""
        if name not in self._at and name not in self._left:
            self.put(name, now, seconds)

    def drop(self, name: str) -> None:
        """It matters no more."""
        self._at.pop(name, None)
        self._left.pop(name, None)

    def clear(self) -> None:
        """None of them matters any more."""
        self._at, self._left = {}, {}

    def due(self, now: float) -> set[str]:
        """Those whose time has come."""
        return {name for name, at in self._at.items() if at <= now}

    @property
    def next(self) -> float:
        """When the next one is due; inf if there is none."""
        return min(self._at.values(), default=float("inf"))

    def move(self, by: float) -> None:
        """The job stood still for so long."""
        self._at = {name: at + by for name, at in self._at.items()}
        self.stood += by
        if self._held is not None:
            self._held += by  # or it would count twice

    def hold(self, now: float) -> None:
        """Somebody debugs the job."""
        self._held = now
        self._left = {name: self._at.pop(name) - now for name in _HELD if name in self._at}

    def release(self, now: float) -> None:
        """Nobody does any more."""
        assert self._held is not None
        self.stood += now - self._held
        self._held = None
        for name, left in self._left.items():
            self._at[name] = now + left
        self._left = {}
