"""Starts the ranks of a job, watches them, and explains failures.

From the shell: `ddp-launch -n 4 train.py`. From Python: `launcher.launch(launcher.Job(script="train.py", n=4))`.
Every agent imports this file and should need little memory, so public names are imported when they are first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # Not from `typing`, whose import would cost every agent 0.3 to 0.5 MB.
if TYPE_CHECKING:
    from typing import Any

    from launcher.errors import RankError as RankError
    from launcher.errors import UsageError as UsageError
    from launcher.function import run as run
    from launcher.job import Job as Job
    from launcher.supervisor.supervisor import launch as launch

__all__ = ["Job", "RankError", "UsageError", "launch", "run"]

# The module from which each public name is imported.
_MODULES = {
    "Job": "launcher.job",
    "RankError": "launcher.function",
    "UsageError": "launcher.job",
    "launch": "launcher.supervisor.supervisor",
    "run": "launcher.function",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
