"""What code that runs in a worker process can know about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerInfo:
    """A worker process. id: 0 to num_workers - 1; seed: of this worker, of this pass; dataset: its copy."""

    id: int
    num_workers: int
    seed: int
    dataset: Any


_here: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """Which worker this process is: `id`, `num_workers`, `seed` and `dataset`; None outside of workers."""
    return _here


def become(info: WorkerInfo) -> None:
    """This process is that worker from now on."""
    global _here
    _here = info
