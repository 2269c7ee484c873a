"""How time is taken: implementations in turns, in batches that start together, and the slowest rank counts.

A batch is some calls in a row after a barrier; its time is that of the slowest rank, divided by the calls. The
implementations' batches alternate, so that noise of the machine hits all alike. Times are medians over rounds.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np

from collectives import Communicator
from launcher.bench.expected import Array

# Enough rounds for a median, few enough that a batch of a fast call is long beside the barrier's skew.
_ROUNDS = 20
_LEAST_ROUNDS = 5
_MOST_CALLS = 100_000


class Sync(Protocol):
    """How ranks meet outside of what is measured."""

    def barrier(self) -> None:
        """Returns on all ranks at about the same moment."""

    def slowest(self, seconds: Array) -> Array:
        """The largest of all ranks, element by element: (...) float64."""

    def total(self, number: int) -> int:
        """The sum over all ranks."""


class CommSync:
    """Ranks that are threads, or one alone, meet by the communicator itself."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def barrier(self) -> None:
        self._comm.barrier()

    def slowest(self, seconds: Array) -> Array:
        worst: Array = self._comm.all_reduce(seconds, "max")
        return worst

    def total(self, number: int) -> int:
        return int(self._comm.all_reduce(np.array([number], np.int64))[0])


class MPISync:
    """Ranks meet by blocking MPI calls, which spin: they leave its barrier within a microsecond of each other."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.MPI: Any = MPI
        self._comm = MPI.COMM_WORLD.Dup()

    def barrier(self) -> None:
        self._comm.Barrier()

    def slowest(self, seconds: Array) -> Array:
        worst = np.empty_like(seconds)
        self._comm.Allreduce(seconds, worst, self.MPI.MAX)
        return worst

    def total(self, number: int) -> int:
        return int(self._comm.allreduce(number))

    def tell(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        return str(self._comm.bcast(text, 0))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is timed. settle: waits until calls that returned early have ended (on a GPU)."""

    call: Callable[[], Any]
    settle: Callable[[], None]
    trips: int = 1


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one entry took.

    rounds: seconds of one call on the slowest rank, for each round; seconds: their median; calls: measured in all
    """

    seconds: float
    rounds: tuple[float, ...]
    calls: int


def plan(estimates: Sequence[float], budget: float, iters: int | None) -> tuple[int, list[int]]:
    """Number of rounds, and each entry's calls a round, for calls that take about `estimates` seconds.

    budget: seconds for each entry; iters: calls of each entry, whatever they take
    """
    if iters is not None:
        rounds = min(iters, _ROUNDS)
        return rounds, [math.ceil(iters / rounds)] * len(estimates)
    calls = [min(_MOST_CALLS, max(1.0, budget / estimate)) for estimate in estimates]
    rounds = int(min(_ROUNDS, max(_LEAST_ROUNDS, min(calls))))
    return rounds, [max(1, int(each / rounds)) for each in calls]


def measure(entries: Sequence[Entry], sync: Sync, *, warmup: int, budget: float, iters: int | None) -> list[Timing]:
    """Times all entries. Collective: every rank brings the same entries in the same order."""
    estimates = []
    for entry in entries:
        _batch(entry, 1)  # the first call touches memory and makes connections
        sync.barrier()
        estimates.append(_batch(entry, warmup))
    # All ranks must make the same calls: the slowest's estimate is everybody's.
    agreed = sync.slowest(np.array(estimates))
    rounds, calls = plan([max(float(each), 1e-8) for each in agreed], budget, iters)
    seconds = np.zeros((rounds, len(entries)))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            for position in range(len(entries)):
                which = (turn + position) % len(entries)  # nobody always follows the same one
                sync.barrier()
                seconds[turn, which] = _batch(entries[which], calls[which])
    finally:
        if collecting:
            gc.enable()
    slow = sync.slowest(seconds)
    found = []
    for which, entry in enumerate(entries):
        times = [float(each) / entry.trips for each in slow[:, which]]
        found.append(Timing(seconds=statistics.median(times), rounds=tuple(times), calls=rounds * calls[which]))
    return found


def ratio(other: Timing, ours: Timing) -> float:
    """How many times as long the other one takes: the median over rounds, of which each saw the same machine."""
    return statistics.median(theirs / mine for theirs, mine in zip(other.rounds, ours.rounds, strict=True))


def _batch(entry: Entry, calls: int) -> float:
    call = entry.call
    start = time.perf_counter()
    for _ in repeat(None, calls):
        call()
    entry.settle()
    return (time.perf_counter() - start) / calls
