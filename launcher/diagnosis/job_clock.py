"""The clock by which a job's time limits run."""

from __future__ import annotations


class JobClock:
    """Counts the seconds in which the job could run. It stops while a rank is debugged, or the launcher is stopped.

    The hang detector's own clock also stops while the launcher reads nothing from ranks.
    """

    def __init__(self) -> None:
        self._stopped_for = 0.0
        self._held_at: float | None = None

    @property
    def held(self) -> bool:
        """Whether the clock is stopped now."""
        return self._held_at is not None

    def at(self, now: float) -> float:
        """The job's time. now: monotonic, s"""
        return (now if self._held_at is None else self._held_at) - self._stopped_for

    def hold(self, now: float) -> None:
        """Stops the clock. Does nothing if it is stopped."""
        if self._held_at is None:
            self._held_at = now

    def release(self, now: float) -> None:
        """Continues the clock. Does nothing if it runs."""
        if self._held_at is not None:
            self._stopped_for += now - self._held_at
            self._held_at = None

    def skip(self, seconds: float) -> None:
        """Leaves the last `seconds` out of the job's time. Does nothing while the clock is stopped: it has not counted
        them.
        """
        if not self.held:
            self._stopped_for += seconds
