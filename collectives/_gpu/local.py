"""Ranks that a bare mpiexec or srun started all stand at the first GPU of their node: `init` gives each its own.

ddp-launch, and some clusters, show each rank one GPU only; then there is nothing to take. CuPy is imported only where
this machine has several GPUs that CUDA shows.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from collectives.errors import CollectivesError

_log = logging.getLogger("collectives")
#: The driver's folder: one entry a GPU of the machine.
_GPUS = Path("/proc/driver/nvidia/gpus")


def take_local_gpu(local_rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Makes a GPU of its own current for this thread: the one of the local rank's number, counted round.

    Who has chosen a device before, or is shown one alone, keeps it.
    """
    if shown_alone(environ.get("CUDA_VISIBLE_DEVICES")) or ("cupy" not in sys.modules and not _several()):
        return
    from collectives._gpu import cuda

    if cuda.why_absent() is not None:
        return
    try:
        cuda.load().take_turns(local_rank)
    except CollectivesError as error:  # whoever has arrays on a GPU will hear of it; others need none
        _log.info("no GPU is taken: %s", error)


def shown_alone(visible: str | None) -> bool:
    """True if CUDA shows one device or none, by the value of CUDA_VISIBLE_DEVICES, None where it is not set.

    >>> [shown_alone(value) for value in (None, "0,1", "3", "", "-1", "MIG-4e1c")]
    [False, False, True, True, True, True]
    """
    return visible is not None and "," not in visible.strip(", ")


def _several() -> bool:
    try:
        return len(os.listdir(_GPUS)) > 1
    except OSError:  # no driver; or one that shows itself otherwise, and then libcuda is asked
        return not _GPUS.parents[1].exists()
