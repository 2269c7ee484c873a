"""A lock on a folder, so that one job at a time saves there, and a check that all its ranks see the same folder.

A second job would remove what the first still needs. The lock is an flock, which the system takes back from a process
that was killed. Network file systems that have none (or, as NFS with `local_lock=flock`, one for each host) let a
second job in; it destroys nothing, as names of folders that are not whole hold a token, but the two count each other's
checkpoints."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable

from ddp._files import open_regular
from ddp.checkpoint import remote_files
from ddp.checkpoint.agreement import describing_os_errors
from ddp.checkpoint.checkpoint_files import open_file
from ddp.checkpoint.remote_files import is_url
from ddp.errors import CheckpointError

NAME = ".lock"
_PATIENCE = 20.0  # s; a job that was killed may hang in the kernel until the disk has done what it was asked to
_VISIBLE = 10.0  # s; what one host has written, another sees when the caches of its file system have aged
_LENGTH = 256  # bytes; always the same ones, so that a file that exists needs no more room on a full disk
_UNKNOWN = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

_log = logging.getLogger("ddp.checkpoint")


class FolderLock:
    """Rank 0's lock on a folder, until `close`, or until this process ends however it may.

    exclusive: True if no other job can be in the folder; False where the file system knows no locks
    """

    def __init__(self, folder: str) -> None:
        self.exclusive = False
        self.close: Callable[[], object] = lambda: None  # lets another job have the folder
        self._folder, self._path = folder, os.path.join(folder, NAME)

    def take(self) -> str:
        """Makes the folder and locks it; what the lock file says since. At a URL there are no locks, but the file.

        Raises: CheckpointError
        """
        content = f"process {os.getpid()} on {socket.gethostname()} ({os.urandom(8).hex()})"
        if is_url(self._folder):
            with describing_os_errors("writing", self._path):
                remote_files.make_folder(self._folder)
                remote_files.write_file(self._path, [memoryview(content.encode())])
            return content
        with describing_os_errors("making the folder", self._folder):
            try:
                os.makedirs(self._folder, exist_ok=True)
            except FileExistsError:
                raise NotADirectoryError(errno.ENOTDIR, "") from None
        with describing_os_errors("locking", self._path):
            fd = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)  # it is written to
            self.close = weakref.finalize(self, os.close, fd)
            # A forked child has the lock too, until it closes its descriptor, and may outlive its parent.
            os.register_at_fork(after_in_child=self.close)
            self.exclusive = self._lock(fd)
            os.pwrite(fd, content.ljust(_LENGTH).encode(), 0)
        if not self.exclusive:
            _log.warning("%s: its file system has no locks: let one job alone save there", self._folder)
        return content

    def _lock(self, fd: int) -> bool:
        limit = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno in _UNKNOWN:
                    return False
                if error.errno != errno.EWOULDBLOCK:
                    raise
                if time.monotonic() > limit:
                    who = os.pread(fd, _LENGTH, 0).decode(errors="replace").strip() or "another process"
                    raise CheckpointError(
                        f"{self._folder} is in use by {who}: one job at a time may save there; end that one, or give "
                        "another folder"
                    ) from None
            time.sleep(0.1)


def wait_for_content(folder: str, content: str) -> None:
    """Waits until this rank sees the lock file that rank 0 has written. Raises: CheckpointError if it does not."""

    def seen() -> bool:
        try:
            with open_file(os.path.join(folder, NAME), os.O_RDONLY | os.O_NOFOLLOW) as file:
                return file.read(_LENGTH).decode(errors="replace").strip() == content
        except OSError:
            return False

    if not wait_until(seen):
        raise CheckpointError(
            f"{folder} on {socket.gethostname()} is not the folder that rank 0 has under that name: give one on a file "
            "system that all hosts share"
        )


def wait_until(visible: Callable[[], bool]) -> bool:
    """Waits, for a while, until this host sees what another has written; whether it does."""
    limit = time.monotonic() + _VISIBLE
    while not (seen := visible()) and time.monotonic() < limit:
        time.sleep(0.05)
    return seen
