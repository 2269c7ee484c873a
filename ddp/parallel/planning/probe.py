"""What an all-reduce costs between these ranks is measured once, so that the buckets can be chosen for this wire.

All ranks must come to the same numbers, bit for bit, as the buckets follow from them; and how long to go on measuring
depends on the times, which differ by rank. So each size's time is agreed before anything is decided by it.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp
from ddp.parallel.planning.choosing import Link, fit_link

_SMALLEST, _LEAST, _LARGEST = 1 << 12, 1 << 16, 1 << 24  # bytes; up to _LEAST at any rate, or latency is all one sees
_GROWTH = 4
_REPEATS, _REPEATS_SMALL = 3, 10  # up to _LEAST they cost next to nothing, and it is short times that are disturbed
_LONG = 0.01  # s; the next size would take _GROWTH times as long


def measure(comm: Communicator, most: int, xp: Any = np) -> Link:
    """The cost of an all-reduce over `comm`, the same on every rank. Collective.

    comm: nobody else calls on it meanwhile; one rank: costs nothing, and nothing is called
    most: bytes of the largest all-reduce that is of interest; more than 16 MiB are not tried
    xp: the array module of what will be reduced

    Float32 arrays of 4 KiB, 16 KiB, ... are summed as the reducer does it, through the communicator's helper, and of
    each size the fastest counts. It ends after a size of more than 10 ms: at 1 Gbit/s it takes about 0.15 s.
    """
    if comm.size == 1:
        return Link(alpha=0.0, beta=0.0)
    top = min(max(most, _LEAST), _LARGEST)
    sizes = [_SMALLEST]
    while sizes[-1] * _GROWTH <= top:
        sizes.append(sizes[-1] * _GROWTH)
    length = sizes[-1] // np.dtype(np.float32).itemsize
    memory = comm.empty(length, np.float32) if xp is np else xp.zeros(length, np.float32)
    _seconds(comm, memory[:1])  # the first call of all makes connections
    samples = []
    for size in sizes:
        array = memory[: size // memory.itemsize]
        fastest = np.array([min(_seconds(comm, array) for _ in range(_REPEATS_SMALL if size <= _LEAST else _REPEATS))])
        agreed = float(comm.all_reduce(fastest, ReduceOp.MAX)[0])
        samples.append((size, agreed))
        if agreed > _LONG:
            break
    link = fit_link(samples)
    # Ranks of different machines may round differently.
    alpha, beta = comm.broadcast(np.array([link.alpha, link.beta]), root=0)
    return Link(alpha=float(alpha), beta=float(beta))


def _seconds(comm: Communicator, array: Any) -> float:
    """How long one sum takes, on this rank: the reducer's call, and the wait for it."""
    begun = time.perf_counter()
    comm.all_reduce(array, ReduceOp.SUM, out=array, async_op=True).wait()
    array[0].item()  # on a GPU the wait above is the stream's, not ours
    return time.perf_counter() - begun
