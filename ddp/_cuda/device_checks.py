"""Errors that kernels detect, such as an index out of range, reported to the host without a wait.

The kernel continues with a safe value, and writes the error to a flag in pinned host memory. The next call that waits
for the device (`item`, `cpu`, `synchronize`) reads the flag and raises. A trap in the kernel would invalidate all
device memory of the process, and its error would name neither the op nor the value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._cuda import cuda_errors
from ddp._cuda.raw_kernel import KernelSource, contiguous
from ddp.ops.arrays import Array

# Number of words of a flag: the error's code (0: no error), the value, the limit it was compared with, and one unused.
_WORDS = 4

_LATE = (
    " It was met by work that was launched earlier; with CUDA_LAUNCH_BLOCKING=1 every op waits for its work, and "
    "raises itself."
)


class ErrorFlag:
    """Words of pinned host memory that every device can write to. address: of the first word, for kernels"""

    def __init__(self, xp: Any) -> None:
        self.words = np.frombuffer(xp.cuda.alloc_pinned_memory(8 * _WORDS), np.int64, _WORDS)
        self.words[...] = 0
        self.address = int(self.words.ctypes.data)


# Flags by array module. Outside of tests there is only one array module.
_error_flags: dict[Any, ErrorFlag] = {}

# The codes that kernels write, by error class and message: 1, 2, ... in the order of insertion.
_codes: dict[tuple[type[Exception], str], int] = {}


def flag_address(xp: Any) -> int:
    """The address of the flag that kernels write to."""
    flag = _error_flags.get(xp)
    if flag is None:
        flag = ErrorFlag(xp)
        _error_flags[xp] = flag
    return flag.address


def error_code(error: type[Exception], message: str) -> int:
    """The code of an error for kernels. message: may contain {value}, {limit} and {last}, which is limit - 1"""
    return _codes.setdefault((error, message), len(_codes) + 1)


def raise_pending() -> None:
    """Raises the error that a kernel has reported, if any, and clears it. Call it after a wait for the device."""
    for flag in _error_flags.values():
        code = int(flag.words[0])
        if code:
            value = int(flag.words[1])
            limit = int(flag.words[2])
            flag.words[...] = 0
            error, message = list(_codes)[code - 1]
            late = "" if cuda_errors.blocking() else _LATE
            raise error(message.format(value=value, limit=limit, last=limit - 1) + "." + late)


BOUNDS = KernelSource(
    "bounds",
    """
// Writes an error to the flag, unless the flag holds an earlier one.
__device__ inline void set_flag(Index error_flag, Index code, Index value, Index limit) {
    volatile Index* words = (volatile Index*)error_flag;
    if (words[0]) return;
    words[1] = value;
    words[2] = limit;
    __threadfence_system();
    words[0] = code;
}

// Copies indices, negative ones counted from the end. Reports one outside of [low, high), and writes 0 in its place.
extern "C" __global__ void check_range(
    const Index* indices, Index* safe, Index n, Index low, Index high, Index error_flag, Index code
) {
    FOR_EACH(i, n) {
        Index k = indices[i];
        bool valid = k >= low && k < high;
        if (!valid) set_flag(error_flag, code, k, high);
        safe[i] = !valid ? 0 : k < 0 ? k + high : k;
    }
}

extern "C" __global__ void check(const bool* valid, Index n, Index error_flag, Index code) {
    FOR_EACH(i, n) if (!valid[i]) set_flag(error_flag, code, i, n);
}
""",
    ("int64",),
)
_INT64 = np.dtype("int64")


def check_index(xp: Any, index: Array, low: int, high: int, error: type[Exception], message: str) -> Array:
    """Returns a copy of the indices as int64, with `high` added to negative ones.

    An index outside of [low, high) is reported, and becomes 0, which is safe to use. If there are indices, and none can
    be valid (high <= 0), raises `error` at once. message: see `error_code`
    """
    if index.size and high <= 0:
        raise error(message.format(value="", limit=high, last=high - 1))
    safe = xp.ndarray(index.shape, _INT64)
    flag = (flag_address(xp), error_code(error, message))
    indices = contiguous(xp, index, _INT64)
    BOUNDS.launch(xp, "check_range", _INT64, index.size, indices, safe, index.size, low, high, *flag)
    return safe


def check_targets(
    xp: Any, target: Array, ignored: int, high: int, error: type[Exception], message: str
) -> tuple[Any, Any]:
    """Replaces `ignored` by 0 and calls `check_index`. Returns its result, and a mask (bool) of targets not ignored."""
    keep = target != ignored
    return check_index(xp, xp.where(keep, target, 0), 0, high, error, message), keep


def check_all(xp: Any, valid: Array, error: type[Exception], message: str) -> None:
    """Reports an error if any element of `valid` (bool) is False."""
    flag = (flag_address(xp), error_code(error, message))
    BOUNDS.launch(xp, "check", _INT64, valid.size, contiguous(xp, valid), valid.size, *flag)
