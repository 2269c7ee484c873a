"""When each gradient was complete, as the planner wants to know it: by the host's clock, or by the device's."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from ddp._device import capturing


class HostWatch:
    """For arrays that the host computes: a gradient is complete when the engine says so."""

    def __init__(self, count: int, xp: Any) -> None:
        self._count = count
        self._came: dict[int, float] = {}
        self._begun = self._ended = 0.0

    def begin(self) -> None:
        """Backward begins."""
        self._came = {}
        self._begun = perf_counter()

    def ready(self, index: int) -> None:
        """A gradient is complete."""
        self._came[index] = perf_counter()

    def end(self) -> None:
        """The last gradient is complete, and so is what was computed beside them."""
        self._ended = perf_counter()

    def backward(self) -> float:
        """Seconds from begin to end."""
        return self._ended - self._begun

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
        self._ended: Any = None

    def begin(self) -> None:
        """Backward begins."""
        self._came = {}
        if self._left > 0 and capturing.now is None:  # an event of a capture may not be asked
            self._left -= 1
            self._begun = self._recorded()
        else:
            self._begun = None

    def ready(self, index: int) -> None:
        """A gradient is complete."""
        if self._begun is not None:
            self._came[index] = self._recorded()

    def end(self) -> None:
        """The last kernel of this backward has been launched; those of the exchange have not."""
        self._ended = None if self._begun is None else self._recorded()

    def backward(self) -> float:
        """Seconds from begin to end, nan if this backward was not watched; waits for the device if it was."""
        return np.nan if self._ended is None else self._until(self._ended)

    def seconds(self) -> np.ndarray[Any, Any]:
        """(count,) seconds from begin to each gradient, nan for those that did not come or were not watched.

        Waits for the device where this backward was watched.
        """
        seconds = np.full(self._count, np.nan)
        for index, event in self._came.items():
            seconds[index] = self._until(event)
        return seconds

    def _until(self, event: Any) -> float:
        event.synchronize()
        return 1e-3 * float(self._xp.cuda.get_elapsed_time(self._begun, event))

    def _recorded(self) -> Any:
        event = self._xp.cuda.Event()
        event.record()
        return event
