"""How many files the launcher may have open: all that the system allows it, a connection to every rank among them.

Its ranks find the user's own limit: programs that still use `select` break with more than 1024, others close all that
there may be.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.job import UsageError

# What a job needs besides its connections.
_OTHERS = 16


@contextmanager
def many_files(ranks: int) -> Iterator[tuple[int, int]]:
    """While entered, this process may open as many files as the hard limit says; the limits of before.

    Raises: UsageError if a job of so many ranks needs more.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = before
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (OSError, ValueError):
        pass  # no limit at all, which is more than the kernel grants: the soft one must do
    try:
        if soft != resource.RLIM_INFINITY and ranks + _OTHERS + len(os.listdir("/proc/self/fd")) > soft:
            raise UsageError(f"{ranks} ranks need more open files than this process may have: {soft} (ulimit -n)")
        yield before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
