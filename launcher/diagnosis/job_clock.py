"""The clock by which a job's time limits run."""

from __future__ import annotations


class JobClock:
    """Seconds for which the job could run: stands still while a rank is in a debugger or the launcher is stopped."""

    def __init__(self) -> None:
        self._stood = 0.0
        self._held_at: float | None = None

    @property
    def held(self) -> bool:
        """The clock stands still now."""
        return self._held_at is not None

    def at(self, now: float) -> float:
        """The job's time. now: monotonic, s"""
        return (now if self._held_at is None else self._held_at) - self._stood

    def hold(self, now: float) -> None:
        """Stops the clock."""
        if self._held_at is None:
            self._held_at = now

    def release(self, now: float) -> None:
        """Continues the clock."""
        if self._held_at is not None:
            self._stood += now - self._held_at
            self._held_at = None

    def skip(self, by: float) -> None:
        """Leaves out the last `by` seconds; where the clock stands still they are left out already."""
        if not self.held:
            self._stood += by
