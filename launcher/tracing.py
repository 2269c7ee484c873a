"""`--trace DIR`: the ranks get a folder to write to, and their parts are merged when the job has ended.

Merging is a process of its own, after the last rank: it needs `ddp`, of which the launcher knows nothing, and works as
well when ranks have died and left no part.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from launcher.errors import UsageError

# What an earlier trace has left, all of it made by `ddp.tracing`: else a rank that dies would seem to have left a part.
_OLD = re.compile(r"rank-\d+\.steps\.json|trace\.json|step\.png")
_LIMIT = 120.0  # seconds


def prepare(folder: str) -> str:
    """Makes the folder, removes an earlier trace from it, and returns its absolute path.

    Raises: UsageError if it cannot be made or written to.
    """
    try:
        folder = os.path.abspath(folder)
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):
            if _OLD.fullmatch(name):
                os.remove(os.path.join(folder, name))
    except OSError as error:
        raise UsageError(f"the trace folder {folder} cannot be used: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"the trace folder {folder} cannot be written to")
    return folder


def merge(folder: str) -> str:
    """Merges the ranks' parts in that folder; returns one line for the user, whether that worked or not."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-m", "ddp.tracing", folder]
    later = f"python -m ddp.tracing {folder}"
    try:
        # In the folder of this package: no module in the user's working folder may take the place of `ddp`.
        done = subprocess.run(
            command,
            cwd=here,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"the trace took more than {_LIMIT:g} s to merge: {later}"
    output = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode in (0, 1) and output:
        return output[-1]
    return f"the trace could not be merged ({output[-1] if output else f'status {done.returncode}'}): {later}"
