"""Indices that are looked at where they are: one out of range rings an alarm of the host's, which does not wait for it.

What comes out is safe to read and write by: what was out of range is 0 there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._gpu import alarms
from ddp.ops._op import Array
from ddp.ops.cuda._source import Source, flat

SOURCE = Source(
    "bounds",
    """
__device__ inline void ring(Index alarm, Index which, Index value, Index limit) {
    volatile Index* words = (volatile Index*)alarm;
    if (words[0]) return;  // the first one counts
    words[1] = value;
    words[2] = limit;
    __threadfence_system();
    words[0] = which;
}

// A negative index counts from the end where low allows it.
extern "C" __global__ void within(
    const Index* at, Index* safe, Index n, Index low, Index high, Index alarm, Index which
) {
    FOR_EACH(i, n) {
        Index k = at[i];
        bool fine = k >= low && k < high;
        if (!fine) ring(alarm, which, k, high);
        safe[i] = !fine ? 0 : k < 0 ? k + high : k;
    }
}

// As `within`, but `skipped` may be anywhere.
extern "C" __global__ void within_but(
    const Index* at, Index* safe, bool* keep, Index n, Index high, Index skipped, Index alarm, Index which
) {
    FOR_EACH(i, n) {
        Index k = at[i];
        bool kept = k != skipped, fine = k >= 0 && k < high;
        if (kept && !fine) ring(alarm, which, k, high);
        safe[i] = fine ? k : 0;
        keep[i] = kept;
    }
}

extern "C" __global__ void unless(const bool* fine, Index n, Index alarm, Index which) {
    FOR_EACH(i, n) if (!fine[i]) ring(alarm, which, i, n);
}
""",
    ("int64",),
)
_KIND = np.dtype("int64")


def checked(xp: Any, at: Array, low: int, high: int, error: type[Exception], message: str) -> Array:
    """A new array of int64 with the indices, negative ones counted from the end if `low` is.

    message: of the error for one that is not from `low` to high - 1, with {value} and {limit}
    """
    if at.size and high <= 0:
        raise error(message.format(value="", limit=high, last=high - 1))
    safe = xp.ndarray(at.shape, _KIND)
    arguments = alarms.alarm(xp), alarms.number(error, message)
    SOURCE.over(xp, "within", _KIND, at.size, flat(xp, at, _KIND), safe, at.size, low, high, *arguments)
    return safe


def checked_but(xp: Any, at: Array, skipped: int, high: int, error: type[Exception], message: str) -> tuple[Any, Any]:
    """As `checked` from 0 on, but `skipped` is no error; and which are to be kept (bool)."""
    safe, keep = xp.ndarray(at.shape, _KIND), xp.ndarray(at.shape, bool)
    arguments = alarms.alarm(xp), alarms.number(error, message)
    SOURCE.over(xp, "within_but", _KIND, at.size, flat(xp, at, _KIND), safe, keep, at.size, high, skipped, *arguments)
    return safe, keep


def demand(xp: Any, fine: Array, error: type[Exception], message: str) -> None:
    """An error for whoever waits next, if any of `fine` (bool) is not."""
    arguments = alarms.alarm(xp), alarms.number(error, message)
    SOURCE.over(xp, "unless", _KIND, fine.size, flat(xp, fine), fine.size, *arguments)
