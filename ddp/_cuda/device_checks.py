"""What a kernel finds wrong with numbers, an index out of range say, and how the host hears of it without waiting.

The kernel goes on with a number that does no harm, and writes what it met into host memory. Whoever waits for the
device next (`item`, `cpu`, `synchronize`) looks there and raises. A trap would do as well, but CUDA forgets all memory
of a process that it stops; and the error would not say which op, nor which number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._cuda import cuda_errors
from ddp._cuda.raw_kernel import KernelSource, flat
from ddp.ops.arrays import Array

_WORDS = 4  # which alarm (0: none), the number, what it was compared with
_LATE = (
    " It was met by work that was launched earlier; with CUDA_LAUNCH_BLOCKING=1 every op waits for its work, and "
    "raises itself."
)


class ErrorFlag:
    """Words of host memory that every device can write to. address: for kernels"""

    def __init__(self, xp: Any) -> None:
        self.words = np.frombuffer(xp.cuda.alloc_pinned_memory(8 * _WORDS), np.int64, _WORDS)
        self.words[...] = 0
        self.address = int(self.words.ctypes.data)


_alarms: dict[Any, ErrorFlag] = {}  # by array module: there is one, but for tests
_codes: dict[tuple[type[Exception], str], int] = {}  # from 1 on, in their order


def flag_address(xp: Any) -> int:
    """The address that a kernel writes to."""
    found = _alarms.get(xp)
    if found is None:
        found = _alarms[xp] = ErrorFlag(xp)
    return found.address


def error_code(error: type[Exception], message: str) -> int:
    """What a kernel writes first, so that this is raised. message: with {value} and {limit}"""
    return _codes.setdefault((error, message), len(_codes) + 1)


def raise_pending() -> None:
    """For where the host has waited: raises what a kernel has told since the last time."""
    for each in _alarms.values():
        which = int(each.words[0])
        if which:
            value, limit = int(each.words[1]), int(each.words[2])
            each.words[...] = 0
            error, message = list(_codes)[which - 1]
            late = "" if cuda_errors.blocking() else _LATE
            raise error(message.format(value=value, limit=limit, last=limit - 1) + "." + late)


# Indices that are looked at where they are: one out of range rings an alarm of the host's, which does not wait for it.
#
# What comes out is safe to read and write by: what was out of range is 0 there.

BOUNDS = KernelSource(
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

extern "C" __global__ void unless(const bool* fine, Index n, Index alarm, Index which) {
    FOR_EACH(i, n) if (!fine[i]) ring(alarm, which, i, n);
}
""",
    ("int64",),
)
_KIND = np.dtype("int64")


def check_index(xp: Any, at: Array, low: int, high: int, error: type[Exception], message: str) -> Array:
    """A new array of int64 with the indices, negative ones counted from the end if `low` is.

    message: of the error for one that is not from `low` to high - 1, with {value} and {limit}
    """
    if at.size and high <= 0:
        raise error(message.format(value="", limit=high, last=high - 1))
    safe = xp.ndarray(at.shape, _KIND)
    arguments = flag_address(xp), error_code(error, message)
    BOUNDS.over(xp, "within", _KIND, at.size, flat(xp, at, _KIND), safe, at.size, low, high, *arguments)
    return safe


def check_targets(xp: Any, at: Array, skipped: int, high: int, error: type[Exception], message: str) -> tuple[Any, Any]:
    """As `check_index` from 0 on, but `skipped` is no error; and which are to be kept (bool)."""
    keep = at != skipped
    return check_index(xp, xp.where(keep, at, 0), 0, high, error, message), keep


def check_all(xp: Any, fine: Array, error: type[Exception], message: str) -> None:
    """An error for whoever waits next, if any of `fine` (bool) is not."""
    arguments = flag_address(xp), error_code(error, message)
    BOUNDS.over(xp, "unless", _KIND, fine.size, flat(xp, fine), fine.size, *arguments)
