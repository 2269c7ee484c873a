"""Segment files that a killed MPI leaves in /dev/shm, removed once the kernel says that nobody has them open or mapped.

`collectives` unlinks them when all ranks are up; who is killed before that, or uses MPI alone, leaves them. Their names
do not tell whose they are, but a write lease is granted only on a file that nobody else holds, in whatever container.
"""

from __future__ import annotations

import fcntl
import os
import signal

_FOLDER = "/dev/shm"
# MPICH's, Open MPI's since 5 and before, UCX's, Open MPI's for locks. All hold such a file from its making to its end.
_NAMES = ("mpich_shm_", "mpich_vci_", "sm_segment.", "vader_segment.", "ucx_shm_posix_", "open_mpi.")
# s; the clock of files lags behind by some milliseconds
_LAG = 0.1


def remove_leftovers(since: float, folder: str = _FOLDER) -> None:
    """Removes this user's segment files that were made later than `since` and that no process uses.

    since: `time.time()` when the job began
    """
    try:
        names = [name for name in os.listdir(folder) if name.startswith(_NAMES)]
    except OSError:
        return
    for name in names:
        _remove_if_unused(os.path.join(folder, name), since)


def _remove_if_unused(path: str, since: float) -> None:
    try:
        found = os.lstat(path)
        if found.st_uid != os.geteuid() or found.st_ctime < since - _LAG:
            return
        # O_NONBLOCK: the launcher of another job may have a lease on it in this moment.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # gone already, or in such hands
    try:
        # Whoever opens the file meanwhile makes the kernel send a signal: SIGIO would end this process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.unlink(path)  # under the lease: whoever opens it now waits for us
    except OSError:
        pass  # in use; or this file system grants no leases, and the file stays
    finally:
        os.close(fd)
