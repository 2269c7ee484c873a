"""What /proc says of the shared memory that a process holds."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path


def descriptors() -> int:
    """How many file descriptors of blocks this process has."""
    gc.collect(1)
    result = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            result += os.readlink(fd).startswith("/memfd:ddp-block")
    return result


def mappings() -> int:
    """How many blocks this process has mapped."""
    gc.collect(1)
    return Path("/proc/self/maps").read_text().count("/memfd:ddp-block")


def all_descriptors() -> set[tuple[str, str]]:
    """The file descriptors of this process, of whatever kind, each with what it is open on."""
    gc.collect(1)
    result = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            result.add((fd.name, os.readlink(fd)))
    return result
