"""Weights of backwards: what a mean over ranks and accumulation steps is divided by.

The weight belongs to the backward that runs, not to a model: where one backward passes through two wrapped models, both
count it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ddp.errors import ParallelError


class _Running(threading.local):
    weight: float | None = None


_running = _Running()


@contextlib.contextmanager
def weighing(weight: float) -> Iterator[None]:
    """Backwards of this thread inside count `weight`."""
    before, _running.weight = _running.weight, weight
    try:
        yield
    finally:
        _running.weight = before


class Accumulation:
    """The backwards whose gradients lie in one model's slots and have not been reduced.

    weight: the sum of their weights, None if they had none
    """

    def __init__(self) -> None:
        self.weight: float | None = None
        self._passes = 0
        self._reached = False

    def add(self, reaches: bool, empty: bool) -> None:
        """Counts the backward that starts now, with its weight.

        reaches: it will fill a slot; empty: no slot is full, so what earlier backwards left there was thrown away

        Raises: ParallelError if it has a weight and the others have none, or the other way round.
        """
        if self._reached and empty:
            self.clear()
        given = _running.weight
        if self._passes > 0 and (given is None) != (self.weight is None):
            raise ParallelError(
                "backward with and without a weight cannot be accumulated together: use "
                "model.backward(loss, weight=...) for all of them, or for none"
            )
        if given is not None:
            self.weight = (self.weight or 0.0) + given
        self._passes += 1
        self._reached |= reaches

    def clear(self) -> None:
        """Their gradients have been reduced, or thrown away."""
        self.weight, self._passes, self._reached = None, 0, False


def given() -> bool:
    """True if the backward that runs in this thread has a weight."""
    return _running.weight is not None
