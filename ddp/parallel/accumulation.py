"""Weights of backwards: what a mean over ranks and accumulation steps is divided by.

The weight belongs to the backward that runs, not to a model: where one backward passes through two wrapped models, both
count it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """The backwards whose gradients lie in one model's slots and have not been reduced.

    weight: the sum of their weights, None if they had none; passes: how many they are; reached: one filled a slot
    """

    weight: float | None = None
    passes: int = 0
    reached: bool = False

    def add(self, given: float | None, reaches: bool, empty: bool) -> Accumulation:
        """These, and the backward that starts now.

        given: its weight; reaches: it will fill a slot; empty: no slot is full, so what earlier ones left there was
        thrown away

        Raises: ParallelError if it has a weight and the others have none, or the other way round.
        """
        if self.reached and empty:
            return Accumulation().add(given, reaches, empty)
        if self.passes > 0 and (given is None) != (self.weight is None):
            raise ParallelError(
                "backward with and without a weight cannot be accumulated together: use "
                "model.backward(loss, weight=...) for all of them, or for none"
            )
        weight = None if given is None else (self.weight or 0.0) + given
        return Accumulation(weight=weight, passes=self.passes + 1, reached=self.reached or reaches)


def given() -> float | None:
    """The weight of the backward that runs in this thread, None if it has none."""
    return _running.weight
