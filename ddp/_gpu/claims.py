"""Who looks at GPU memory that this process has sent: each has an end of a pipe, which the kernel always closes."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import Any

from ddp.errors import SharingError

Array = Any  # cupy.ndarray


class Claim:
    """The receiver's end of the pipe that keeps the sender's array alive.

    token: names the array; pid: of the process whose it is
    """

    __slots__ = ("__weakref__", "_fd", "pid", "token")

    def __init__(self, fd: int, token: str, pid: int) -> None:
        self._fd, self.token, self.pid = fd, token, pid

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


class _Sent:
    """What this process has sent and others may still look at, by token: the array, our end of its pipe, its event."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[Array, int, Any]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._arrays)

    def hold(self, array: Array, event: Any = None) -> Claim:
        """Keeps `array` and the event of its writes until the claim and all its copies are closed."""
        ours, theirs = os.pipe()
        claim = Claim(theirs, os.urandom(8).hex(), os.getpid())
        with self._lock:
            self._arrays[claim.token] = (array, ours, event)
        return claim

    def sweep(self) -> int:
        """Lets go of what nobody claims any more; how many arrays are left."""
        with self._lock:
            poll = select.poll()
            for _, fd, _ in self._arrays.values():
                poll.register(fd, 0)  # that the other end is closed is always told
            closed = {fd for fd, _ in poll.poll(0)}
            for token, (_, fd, _) in list(self._arrays.items()):
                if fd in closed:
                    del self._arrays[token]
                    os.close(fd)
            return len(self._arrays)

    def find(self, token: str) -> tuple[Array, Any]:
        """The array that was sent under that token, and its event. Raises: SharingError if it has been let go of."""
        with self._lock:
            if token not in self._arrays:
                raise SharingError("GPU memory came back to its process after that had let go of it")
            array, _, event = self._arrays[token]
            return array, event

    def forget(self) -> None:
        """In a forked child: these are the parent's."""
        self._lock = threading.Lock()
        for _, fd, _ in self._arrays.values():
            with contextlib.suppress(OSError):  # closed by whoever forked
                os.close(fd)
        self._arrays = {}


sent = _Sent()
os.register_at_fork(after_in_child=sent.forget)
