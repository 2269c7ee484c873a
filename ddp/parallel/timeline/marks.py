"""What each rank tells the others of its last step, in the control message of the next one.

All-reduces end at the same moment on every rank, however late one of them came; so who was waited for can only be told
by when each rank arrived. These times ride in a message that is sent anyway. A row, in nanoseconds as float64:

    forward begun (0: there was none) | backward begun | control launched | control done | arrivals at buckets

A rank arrives at a bucket when its gradients, and all of the buckets before it, are complete. Where the message would
grow too long, only a window of the buckets is told: the last one always, the others in turn.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from ddp.parallel.timeline.steps import Step

Array = np.ndarray[Any, Any]
FORWARD, BEGUN, LAUNCHED, DONE, ARRIVALS = range(5)
_FLOATS = 1024  # of all ranks together: 8 KiB, which cost no more than the latency of a message


def row_width(size: int, buckets: int) -> int:
    """Floats that each of `size` ranks tells.

    >>> row_width(2, 5), row_width(64, 30), row_width(1000, 30)
    (9, 16, 6)
    """
    return ARRIVALS + min(buckets, max(2, _FLOATS // size - ARRIVALS))


def told_buckets(buckets: int, width: int, number: int) -> list[int]:
    """The buckets whose arrivals are told of step `number`, in a row of that width.

    >>> [told_buckets(5, ARRIVALS + 3, number) for number in range(3)]
    [[0, 1, 4], [2, 3, 4], [0, 1, 4]]
    """
    room = width - ARRIVALS
    if room >= buckets:
        return list(range(buckets))
    first, others = number * (room - 1), buckets - 1
    return [*sorted((first + turn) % others for turn in range(room - 1)), others]


def row_of(step: Step | None, width: int) -> Array:
    """(width,) float64: what this rank tells of that step; all 0 if there was none."""
    row = [0.0] * width
    if step is not None:
        row[FORWARD] = 0.0 if step.forward is None else step.forward[0]
        row[BEGUN] = step.begun
        if step.control is not None:
            row[LAUNCHED], row[DONE] = step.control
        arrivals = list(accumulate(step.ready, max))
        for place, bucket in enumerate(told_buckets(len(arrivals), width, step.number), ARRIVALS):
            row[place] = arrivals[bucket]
    return np.array(row)
