"""Which GPUs a process would see, told from what lies around: loading CUDA to count them takes a second and memory.

Apart from `launcher.seat`, which deals them, because `-n gpu` asks too. A keeper loads this before it forks.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # not of `typing`, for the keeper's sake
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = "/proc/driver/nvidia/gpus"


def visible(asked: str | None, driver: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """The GPUs that CUDA would show, as `CUDA_VISIBLE_DEVICES` names them.

    asked: that variable, None if it is not set; driver: what its driver lists; nodes: what /dev holds

    >>> visible(None, ["0000:17:00.0", "0000:65:00.0"], ["null", "nvidia0", "nvidia1", "nvidiactl"])
    ['0', '1']
    >>> visible("2,GPU-8a5e", [], ["nvidia0", "nvidia1", "nvidia2"])
    ['2', 'GPU-8a5e']
    """
    there = sum(1 for name in nodes if name.startswith("nvidia") and name[6:].isdigit())
    if driver:
        # A container sees all GPUs that the driver has, and the nodes of those that it was given: perhaps of none.
        there = min(there, len(driver))
    if asked is None:
        return [str(number) for number in range(there)]
    names = []
    for name in asked.split(","):
        # CUDA stops at the first that is none: "-1", "", "NoDevFiles", a number too large.
        name = name.strip()
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < there):
            break
        names.append(name)
    return names if there else []


def look(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that a process with this environment would see on this machine."""
    return visible(environ.get(VISIBLE), _names(_DRIVER), _names("/dev"))


def count(environ: Mapping[str, str] = os.environ) -> int:
    """How many ranks `-n gpu` means. Raises: UsageError if there is no GPU."""
    if found := look(environ):
        return len(found)
    from launcher.job import UsageError  # here, for the keeper's sake

    if VISIBLE in environ:
        raise UsageError(f"-n gpu: {VISIBLE}={environ[VISIBLE]} leaves no GPU to be seen")
    raise UsageError("-n gpu: this machine has no GPU (no /dev/nvidia0)")


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
