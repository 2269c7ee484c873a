"""When each gradient was complete, as the planner wants to know it: by the host's clock, or by the device's."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np


class HostWatch:
    """For arrays that the host computes: a gradient is complete when the engine says so."""

    def __init__(self, count: int, xp: Any) -> None:
        self._count = count
        self._came: dict[int, float] = {}
        self._begun = 0.0

    def begin(self) -> None:
        """Backward begins."""
        self._came = {}
        self._begun = perf_counter()

    def ready(self, index: int) -> None:
        """A gradient is complete."""
        self._came[index] = perf_counter()

    def seconds(self) -> np.ndarray[Any, Any]:
        """(count,) seconds from begin to each gradient, nan for those that did not come."""
        seconds = np.full(self._count, np.nan)
        for index, when in self._came.items():
            seconds[index] = when - self._begun
        return seconds


class DeviceWatch:
    """For arrays that a device computes: the host is far ahead, so events are recorded in the stream.

    Events cost little, but reading them waits for the device, so only the backwards that a plan is made from are
    watched.
    """

    WATCHED = 4

    def __init__(self, count: int, xp: Any) -> None:
        self._count = count
        self._xp = xp
        self._left = self.WATCHED
        self._came: dict[int, Any] = {}
        self._begun: Any = None

    def begin(self) -> None:
        """Backward begins."""
        self._came = {}
        if self._left > 0:
            self._left -= 1
            self._begun = self._recorded()
        else:
            self._begun = None

    def ready(self, index: int) -> None:
        """A gradient is complete."""
        if self._begun is not None:
            self._came[index] = self._recorded()

    def seconds(self) -> np.ndarray[Any, Any]:
        """(count,) seconds from begin to each gradient, nan for those that did not come or were not watched.

        Waits for the device where this backward was watched.
        """
        seconds = np.full(self._count, np.nan)
        for index, event in self._came.items():
            event.synchronize()
            seconds[index] = 1e-3 * self._xp.cuda.get_elapsed_time(self._begun, event)
        return seconds

    def _recorded(self) -> Any:
        event = self._xp.cuda.Event()
        event.record()
        return event
