"""Files that killed MPI jobs have left in shared memory, where they take memory until the next boot.

Their names do not tell whether somebody uses them, but the kernel does: it grants a write lease only on a file that
nobody else has open or mapped, in whatever container.
"""

from __future__ import annotations

import fcntl
import os
import signal
from typing import NamedTuple

#: Where MPIs keep what ranks of a machine share.
FOLDER = "/dev/shm"
# MPICH's, Open MPI's since 5 and before, UCX's.
_NAMES = ("mpich_shm_", "mpich_vci_", "sm_segment.", "vader_segment.", "ucx_shm_posix_")


class StaleSegments(NamedTuple):
    """How many files nobody uses, and the bytes that they take."""

    files: int
    nbytes: int


def look(folder: str = FOLDER) -> StaleSegments:
    """Counts this user's. Only for the main thread, as it has to ignore a signal."""
    try:
        paths = [os.path.join(folder, name) for name in os.listdir(folder) if name.startswith(_NAMES)]
    except OSError:
        paths = []
    # Whoever opens a file while we have a lease on it makes the kernel send SIGIO, which would end this process.
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        sizes = [size for path in paths if (size := _unused(path)) is not None]
    finally:
        signal.signal(signal.SIGIO, before)
    return StaleSegments(len(sizes), sum(sizes))


def sweep(folder: str = FOLDER) -> int:
    """`ddp-doctor sweep`: removes them and says so; returns 1 if some are still there, else 0."""
    from launcher.linux import remove_stale_segments

    before = look(folder)
    remove_stale_segments(0.0, folder)
    left = look(folder)
    freed = (before.nbytes - left.nbytes) / 2**20
    print(f"{before.files - left.files} files of killed MPI jobs removed from {folder} ({freed:.0f} MiB)")
    if left.files:
        print(f"{left.files} could not be removed")
    return 1 if left.files else 0


def _unused(path: str) -> int | None:
    """The bytes that a file takes; None if it is used, or not this user's."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            return None
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return found.st_blocks * 512
    except OSError:  # in use, or a file system that grants no leases
        return None
    finally:
        os.close(fd)
