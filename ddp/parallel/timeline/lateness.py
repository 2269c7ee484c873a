"""Which rank was waited for, by how much, and where it lost the time.

Of all buckets of a step, the one that decides is the last for which the wire stood idle until it came: what came before
was hidden behind it, what came after only had to queue. The rank that arrived last at it was waited for. How late it
was is counted from the median of the other ranks, at three moments: when forward began, when backward began, and at
that bucket; the differences say where the time was lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Where time is lost: between steps (data, optimizer, logging), in forward and loss, in backward.
PARTS = ("before", "forward", "backward")


def deciding(arrivals: Array, free: Array) -> Array:
    """The bucket of each step that decides when it ends.

    arrivals: (n, buckets) when the last rank arrived; free: (n, buckets) when the bucket before was done, -inf if there
    is none or it is not known
    Returns: (n,)
    """
    idle = arrivals >= free
    from_behind = np.argmax(idle[:, ::-1], axis=1)
    # If not all buckets are told, the wire may have been busy at all that are: then the first of them.
    return np.where(idle.any(axis=1), arrivals.shape[1] - 1 - from_behind, 0)


def lateness(forward: Array, begun: Array, arrivals: Array, free: Array) -> tuple[Array, Array]:
    """The rank that came last in each of n steps, and where it lost its time.

    forward, begun: (n, size) when each rank began forward (nan: it had none) and backward
    arrivals: (n, size, buckets), at least two ranks; free: (n, buckets); all on one clock
    Returns: (n,) the last rank; (n, 3) how much later it was than the median of the others, in PARTS; their sum is how
    late it came. Where a rank had no forward, what was lost until backward counts as `before`.
    """
    bucket = deciding(arrivals.max(axis=1), free)
    there = np.take_along_axis(arrivals, bucket[:, None, None], axis=2)[:, :, 0]
    last = there.argmax(axis=1)
    lost = [_behind(there, last), _behind(begun, last), _behind(forward, last)]
    early = np.where(np.isnan(lost[2]), lost[1], lost[2])
    return last, np.stack([early, lost[1] - early, lost[0] - lost[1]], axis=1)


def _behind(times: Array, rank: Array) -> Array:
    """(n,) how much later than the median of the others each step's rank was. times: (n, size)"""
    steps, size = times.shape
    others = np.arange(size)[None, :] != rank[:, None]
    median = np.median(times[others].reshape(steps, size - 1), axis=1)
    return np.take_along_axis(times, rank[:, None], axis=1)[:, 0] - median
