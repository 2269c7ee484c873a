"""Turns CUDA's errors into CudaError. A launch does not wait for its work, so a later call raises the work's error.

CuPy raises such an error from the next call to which CUDA reports it. The few calls that wait (`item`, copies to the
CPU, `synchronize`, events) pass it to `translate`. Its CudaError says so if another call may be the cause.
"""

from __future__ import annotations

import os

from ddp.errors import CudaError

# The names of CuPy's classes of CUDA errors: the classes cannot be imported if CuPy is not installed.
_CUPY_ERRORS = ("CUDARuntimeError", "CUDADriverError")

# Statuses after which the process can go on: out of memory (2), no or an invalid device (100, 101), invalid or
# destroyed contexts (201, 709), errors of a capture (900 to 908).
_RECOVERABLE = (2, 100, 101, 201, 709, 900, 901, 902, 903, 904, 905, 906, 907, 908)

_LATE = (
    "Work launches without waiting, so this may belong to an op that was launched before: `{call}` is where it came "
    "to light. Run again with CUDA_LAUNCH_BLOCKING=1: then every op waits for its work, and the one that failed is "
    "named with its shapes and its line."
)
_LOST = " Its memory is lost to this process, which has to be started again."


def blocking() -> bool:
    """Whether CUDA_LAUNCH_BLOCKING=1 makes every op wait for its work."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def is_cuda(error: BaseException) -> bool:
    """Whether this is an error of CUDA that CuPy raised."""
    return type(error).__name__ in _CUPY_ERRORS


def translate(error: BaseException, call: str) -> BaseException:
    """Returns the error to raise if `call` raised `error`: a CudaError for an error of CUDA, else `error` itself."""
    if not is_cuda(error):
        return error
    status = status_of(error)
    if status in _RECOVERABLE:
        return CudaError(f"{call}: {error}", status)
    if blocking():
        return CudaError(f"{call}: {error}.{_LOST}", status)
    return CudaError(f"{call}: {error}. {_LATE.format(call=call)}{_LOST}", status)


def attribute_to_op(error: BaseException, op: str, inputs: str, line: str) -> BaseException:
    """Returns a CudaError with op, inputs and line, if CUDA raised `error` in this op; otherwise `error` itself."""
    if not is_cuda(error):
        return error
    status = status_of(error)
    lost = "" if status in _RECOVERABLE else _LOST
    return CudaError(f"{op}: {error}; the inputs were {inputs}; {line}.{lost}", status)


def status_of(error: BaseException) -> int | None:
    """CUDA's number of the error; None if the error has none."""
    status = getattr(error, "status", None)
    return None if status is None else int(status)
