"""A lock on a folder, so that one job at a time saves there, and a check that all ranks see the same folder.

A second job would remove checkpoints that the first still needs. The lock is an flock, which the system releases when a
process is killed. Some network file systems have no flock, or one for each host (NFS with `local_lock=flock`). There a
second job can save, too, and `keep` counts the checkpoints of both jobs. Their saves do not write to the same folder,
because the name of an incomplete folder contains a random token. Without flock, incomplete folders are not removed:
they may be the other job's. With one flock for each host they are removed, and the other job's save fails."""

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
from ddp.checkpoint.checkpoint_files import open_file
from ddp.checkpoint.rank_group import describing_os_errors
from ddp.checkpoint.remote_files import is_url
from ddp.errors import CheckpointError

NAME = ".lock"
# How long to wait for the lock (s). A killed job may stay in the kernel until its writes are on the disk.
_PATIENCE = 20.0
# How long to wait until a file that another host has written is visible (s): file systems cache names.
_VISIBLE = 10.0
# Bytes of the lock file. They are overwritten in place, which works on a full disk, too.
_LENGTH = 256
# Errors of a file system without locks.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

_log = logging.getLogger("ddp.checkpoint")


class FolderLock:
    """Rank 0's lock on a folder. It ends with `close` or with this process, even if the process is killed.

    exclusive: whether the folder is locked; False at a URL, and if the file system has no locks
    """

    def __init__(self, folder: str) -> None:
        self.exclusive = False
        self.close: Callable[[], object] = lambda: None  # releases the lock
        self._folder = folder
        self._path = os.path.join(folder, NAME)

    def take(self) -> str:
        """Makes the folder, locks it and writes the lock file. Returns the file's content. At a URL, nothing is locked.

        Raises: CheckpointError if another job still holds the lock after 20 s, or the folder or file cannot be made.
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
            # O_NOFOLLOW: a link could make us overwrite another file.
            fd = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            self.close = weakref.finalize(self, os.close, fd)
            # A forked child inherits the lock with the descriptor, and may outlive its parent.
            os.register_at_fork(after_in_child=self.close)
            self.exclusive = self._lock(fd)
            os.pwrite(fd, content.ljust(_LENGTH).encode(), 0)
        if not self.exclusive:
            _log.warning("%s: its file system has no locks: let one job alone save there", self._folder)
        return content

    def _lock(self, fd: int) -> bool:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    return False
                if error.errno != errno.EWOULDBLOCK:
                    raise
                if time.monotonic() > deadline:
                    holder = os.pread(fd, _LENGTH, 0).decode(errors="replace").strip() or "another process"
                    raise CheckpointError(
                        f"{self._folder} is in use by {holder}: one job at a time may save there; end that one, or "
                        "give another folder"
                    ) from None
            time.sleep(0.1)


def wait_for_content(folder: str, content: str) -> None:
    """Waits until this rank can read what rank 0 wrote to the lock file. Raises: CheckpointError after 10 s."""

    def is_visible() -> bool:
        try:
            with open_file(os.path.join(folder, NAME), os.O_RDONLY | os.O_NOFOLLOW) as file:
                return file.read(_LENGTH).decode(errors="replace").strip() == content
        except OSError:
            return False

    if not wait_until(is_visible):
        raise CheckpointError(
            f"{folder} on {socket.gethostname()} is not the folder that rank 0 has under that name: give one on a file "
            "system that all hosts share"
        )


def wait_until(is_visible: Callable[[], bool]) -> bool:
    """Waits up to 10 s until `is_visible` returns True, and returns its result. Hosts may see new files late."""
    deadline = time.monotonic() + _VISIBLE
    while not is_visible():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
