"""Starts the ranks of a job, watches over them and explains how they failed.

From the shell: `ddp-launch -n 4 train.py`. From Python: `launcher.launch(launcher.Job(script="train.py", n=4))`.
This file imports nothing until asked: every agent imports it, and must stay small.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not of `typing`, whose import would cost every agent a tenth of its memory
if TYPE_CHECKING:
    from typing import Any

    from launcher.errors import RankError as RankError
    from launcher.errors import UsageError as UsageError
    from launcher.function import run as run
    from launcher.job import Job as Job
    from launcher.supervisor.supervisor import launch as launch

__all__ = ["Job", "RankError", "UsageError", "launch", "run"]

_HOMES = {
    "Job": "launcher.job",
    "RankError": "launcher.function",
    "UsageError": "launcher.job",
    "launch": "launcher.supervisor.supervisor",
    "run": "launcher.function",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
