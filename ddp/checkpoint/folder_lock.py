"""A folder that one job holds, and that all its ranks see as the same one.

A second job would remove what the first still needs. The lock is an flock, which the system takes back from a process
that was killed. Network file systems that have none (or, as NFS with `local_lock=flock`, one for each host) let a
second job in; it destroys nothing, as names of folders that are not whole hold a token, but the two count each other's
checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref

from ddp._files import open_regular
from ddp.checkpoint.agreement import LocalFailure, describing_os_errors

NAME = ".lock"
_PATIENCE = 20.0  # s; a job that was killed may hang in the kernel until the disk has done what it was asked to
_LENGTH = 256  # bytes; always the same ones, so that a file that is there needs no more room on a full disk
_UNKNOWN = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class InUse(Exception):
    """Another job has the lock; in words."""


class FolderLock:
    """The lock on a folder, until `close`, or until this process ends however it may.

    held: False where the file system knows no locks
    token: text in the lock's file by which other ranks know that they see the same folder

    Raises: InUse, OSError.
    """

    def __init__(self, folder: str, token: str) -> None:
        self.token = token
        self._path = os.path.join(folder, NAME)
        fd = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)  # it is written to
        self._close = weakref.finalize(self, os.close, fd)
        try:
            self.held = _locked(fd)
            content = json.dumps({"token": token, "host": socket.gethostname(), "pid": os.getpid()})
            os.pwrite(fd, content.ljust(_LENGTH).encode(), 0)
        except BaseException:
            self.close()
            raise
        self._id = os.fstat(fd).st_dev, os.fstat(fd).st_ino
        _open.add(self)

    def intact(self) -> bool:
        """False once the folder, or the lock in it, is another than it was."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return False
        return (stat.st_dev, stat.st_ino) == self._id

    def close(self) -> None:
        self._close()


def _locked(fd: int) -> bool:
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
                raise InUse(_holder(fd)) from None
        time.sleep(0.1)


def _holder(fd: int) -> str:
    found = _content(os.pread(fd, _LENGTH, 0))
    return f"by process {found.get('pid')} on {found.get('host')}" if "pid" in found else "by another process"


def token_in(folder: str) -> str | None:
    """The token in a folder's lock file, None if there is none."""
    try:
        with open(open_regular(os.path.join(folder, NAME), os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            token = _content(file.read(_LENGTH)).get("token")
    except OSError:
        return None
    return token if isinstance(token, str) else None


def _content(data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# A child that was forked has the lock too, until it closes its descriptor: it shall not have it for longer than its
# parent, whom it may outlive.
_open: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _open:
        lock.close()


os.register_at_fork(after_in_child=_after_fork)


_VISIBLE = 10.0  # s; what one host has written, another sees when the caches of its file system have aged

_log = logging.getLogger("ddp.checkpoint")


class FolderHold:
    """Rank 0's hold on a folder, which is made if there is none."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock: FolderLock | None = None

    def take(self) -> str:
        """Locks the folder, unless it is; the token by which `look_for` knows it. Raises: LocalFailure."""
        if self._lock is not None and self._lock.intact():
            return self._lock.token
        if self._lock is not None:
            self.close()
            if not os.path.isdir(self._folder):
                raise LocalFailure(f"{self._folder} was removed while the job ran: make it again, or save elsewhere")
        with describing_os_errors("making the folder", self._folder):
            try:
                os.makedirs(self._folder, exist_ok=True)
            except FileExistsError:
                raise NotADirectoryError(errno.ENOTDIR, "") from None
        with describing_os_errors("locking", os.path.join(self._folder, NAME)):
            try:
                self._lock = FolderLock(self._folder, os.urandom(8).hex())
            except InUse as error:
                raise LocalFailure(
                    f"{self._folder} is in use {error}: one job at a time may save there; end that one, or give "
                    "another folder"
                ) from None
        if not self._lock.held:
            _log.warning("%s: its file system has no locks: let one job alone save there", self._folder)
        return self._lock.token

    def alone(self) -> bool:
        """True if no other job can be in the folder."""
        return self._lock is not None and self._lock.held

    def close(self) -> None:
        """Lets another job have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def wait_for_token(folder: str, token: str) -> None:
    """Waits until another rank sees the file that rank 0 has written. Raises: LocalFailure if it does not."""
    limit = time.monotonic() + _VISIBLE
    while token_in(folder) != token:
        if time.monotonic() > limit:
            raise LocalFailure(
                f"{folder} on {socket.gethostname()} is not the folder that rank 0 has under that name: give one on a "
                "file system that all hosts share"
            )
        time.sleep(0.05)


def wait_for_folder(folder: str) -> None:
    """Waits, for a while, until this rank sees a folder that rank 0 has made."""
    limit = time.monotonic() + _VISIBLE
    while not os.path.isdir(folder) and time.monotonic() < limit:
        time.sleep(0.05)
