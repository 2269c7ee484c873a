"""A folder that one job holds, and that all its ranks see as the same one."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time

from ddp.checkpoint._lock import NAME, InUse, Lock, token_in
from ddp.checkpoint._trouble import Failed, doing

_VISIBLE = 10.0  # s; what one host has written, another sees when the caches of its file system have aged

_log = logging.getLogger("ddp.checkpoint")


class Holding:
    """Rank 0's hold on a folder, which is made if there is none."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock: Lock | None = None

    def take(self) -> str:
        """Locks the folder, unless it is; the token by which `look_for` knows it. Raises: Failed."""
        if self._lock is not None and self._lock.intact():
            return self._lock.token
        if self._lock is not None:
            self.close()
            if not os.path.isdir(self._folder):
                raise Failed(f"{self._folder} was removed while the job ran: make it again, or save elsewhere")
        with doing("making the folder", self._folder):
            try:
                os.makedirs(self._folder, exist_ok=True)
            except FileExistsError:
                raise NotADirectoryError(errno.ENOTDIR, "") from None
        with doing("locking", os.path.join(self._folder, NAME)):
            try:
                self._lock = Lock(self._folder, os.urandom(8).hex())
            except InUse as error:
                raise Failed(
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


def look_for(folder: str, token: str) -> None:
    """Waits until another rank sees the file that rank 0 has written. Raises: Failed if that does not come about."""
    limit = time.monotonic() + _VISIBLE
    while token_in(folder) != token:
        if time.monotonic() > limit:
            raise Failed(
                f"{folder} on {socket.gethostname()} is not the folder that rank 0 has under that name: give one on a "
                "file system that all hosts share"
            )
        time.sleep(0.05)


def wait_for(folder: str) -> None:
    """Waits, for a while, until this rank sees a folder that rank 0 has made."""
    limit = time.monotonic() + _VISIBLE
    while not os.path.isdir(folder) and time.monotonic() < limit:
        time.sleep(0.05)
