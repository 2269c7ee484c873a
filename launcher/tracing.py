"""`--trace DIR`: gives the ranks a folder for their parts of the trace, and merges these when the job has ended.

A separate process merges the parts after the last rank has ended: this needs `ddp`, which the launcher does not import.
If some ranks died and left no parts, the others are merged.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from collectives.errors import ROOT
from launcher.errors import UsageError

# Files of an earlier trace: the ranks' parts, and what `ddp.tracing` made of them.
_TRACE_FILES = re.compile(r"rank-\d+\.steps\.json|trace\.json|step\.png")
# Time limit for merging the parts (s).
_LIMIT = 120.0


def prepare(folder: str) -> str:
    """Creates the folder, removes an earlier trace from it, and returns its absolute path.

    Without the removal, an old part would be merged if a rank died before it wrote its own.

    Raises: UsageError if the folder cannot be created or written to.
    """
    try:
        folder = os.path.abspath(folder)
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):
            if _TRACE_FILES.fullmatch(name):
                os.remove(os.path.join(folder, name))
    except OSError as error:
        raise UsageError(f"the trace folder {folder} cannot be used: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"the trace folder {folder} cannot be written to")
    return folder


def merge(folder: str) -> str:
    """Merges the ranks' parts in the folder. Returns: one line for the user, about the result or the failure."""
    try:
        completed = subprocess.run(
            [sys.executable, "-m", "ddp.tracing", folder],
            # The folder of the packages: no module in the user's working folder may shadow `ddp`.
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"the trace took more than {_LIMIT:g} s to merge: python -m ddp.tracing {folder}"
    output = (completed.stdout if completed.returncode == 0 else completed.stderr).strip().splitlines()
    if completed.returncode in (0, 1) and output:
        return output[-1]
    reason = output[-1] if output else f"status {completed.returncode}"
    return f"the trace could not be merged ({reason}): python -m ddp.tracing {folder}"
