"""Random numbers that depend on the batch alone, so that they are the same whoever fetches it, and when.

Each batch has a seed of its own. While it is fetched, this package's generators draw from streams that begin there, and
the user's own stay where they are.
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np

from ddp import _device

_MASK = 2**64 - 1


def mixed(*numbers: int) -> int:
    """A seed of 63 bits from several integers: alike ones lead to unlike seeds.

    Source: the finalizer of SplitMix64, Steele et al. 2014, "Fast splittable pseudorandom number generators".
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class Drawing:
    """A context in which this package's generators draw from streams that begin at `seed`."""

    __slots__ = ("_own", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: Any = None

    def __enter__(self) -> None:
        self._own = _device.exchange_streams((self._seed, {}))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _device.exchange_streams(self._own)


def sow(seed: int) -> None:
    """Seeds what a worker draws from: this package's generators, NumPy's global one and Python's."""
    _device.exchange_streams((seed, {}))
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
