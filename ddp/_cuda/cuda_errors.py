"""What CUDA reports, as errors of ours: a launch does not wait for its work, so its failure is raised by a later call.

CuPy raises such a failure from whatever asks the device next. The few calls that wait (`item`, copies to the CPU,
`synchronize`, events) hand it to `translate`, which says that the call that waited is not where it happened.
"""

from __future__ import annotations

import os

from ddp.errors import CudaError

_KINDS = ("CUDARuntimeError", "CUDADriverError")  # CuPy's; by name, so that CuPy need not be there to ask
_HARMLESS = (2, 100, 101, 201, 709, 900, 901, 902, 903, 904, 905, 906, 907, 908)  # memory, a device's number, capture

_LATE = (
    "Work launches without waiting, so this may belong to an op that was launched before: `{call}` is where it came "
    "to light. Run again with CUDA_LAUNCH_BLOCKING=1: then every op waits for its work, and the one that failed is "
    "named with its shapes and its line."
)
_LOST = " Its memory is lost to this process, which has to be started again."


def blocking() -> bool:
    """Whether CUDA_LAUNCH_BLOCKING=1 asks for every op to wait for its work."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def is_cuda(error: BaseException) -> bool:
    """Whether CUDA reported this, through CuPy."""
    return type(error).__name__ in _KINDS


def translate(error: BaseException, call: str) -> BaseException:
    """What to raise where `call` came upon `error`: a CudaError for CUDA's, else the same."""
    if not is_cuda(error):
        return error
    status = status_of(error)
    if status in _HARMLESS:
        return CudaError(f"{call}: {error}", status)
    if blocking():
        return CudaError(f"{call}: {error}.{_LOST}", status)
    return CudaError(f"{call}: {error}. {_LATE.format(call=call)}{_LOST}", status)


def attribute_to_op(error: BaseException, op: str, inputs: str, line: str) -> BaseException:
    """What to raise where every op waits: the error belongs to this one."""
    if not is_cuda(error):
        return error
    status = status_of(error)
    lost = "" if status in _HARMLESS else _LOST
    return CudaError(f"{op}: {error}; the inputs were {inputs}; {line}.{lost}", status)


def status_of(error: BaseException) -> int | None:
    """CUDA's number of the error, where CuPy knows it."""
    status = getattr(error, "status", None)
    return None if status is None else int(status)
