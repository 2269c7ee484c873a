"""All communicators of one world on one rank, and how many calls each has made, which other ranks learn at exit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collectives.engine.queue import CallQueue
from collectives.time_limit import Deadline


class CommunicatorRegistry:
    """The call queues of all open communicators of one world on this rank, and the call counts of closed ones.

    requested: "nccl" if it was requested by name, else None. In a process that a rank has started: the name of any
    backend that was requested
    nccl: the `NcclConfig` of all NCCL communicators of this world
    """

    def __init__(self, requested: str | None = None, nccl: Any = None) -> None:
        self.requested = requested
        self.nccl = nccl
        self._open: dict[str, CallQueue] = {}
        self._closed: dict[str, int] = {}  # Like `calls`, for closed communicators.
        self._closed_with: dict[str, list[CallQueue]] = {}  # Queues to close together with the communicator.

    def join(self, key: str, queue: CallQueue) -> None:
        """Adds a new communicator."""
        self._open[key] = queue

    def leave(self, key: str) -> None:
        """Removes a communicator that is closed and whose calls are finished; keeps its counts."""
        # Counts are stored first: a rank that exits at this moment must find them in one of the two dicts.
        self._closed.update(_calls_of(key, self._open[key]))
        del self._open[key]
        self._close_followers(key)

    def close_with(self, key: str, queue: CallQueue) -> None:
        """Closes `queue` once the communicator of `key` is closed and its calls are finished, perhaps at once."""
        self._closed_with.setdefault(key, []).append(queue)
        if key not in self._open:
            self._close_followers(key)

    def calls(self) -> Mapping[str, int]:
        """The number of collectives of each communicator, open or closed, and its `p2p_counts`, in one dict."""
        calls: dict[str, int] = {}
        for key, queue in self._open.copy().items():
            calls.update(_calls_of(key, queue))
        return {**calls, **self._closed.copy()}

    def drain(self, deadline: Deadline) -> None:
        """Waits until no call is in progress, or the deadline has passed."""
        for queue in self._open.copy().values():
            queue.drain(deadline)

    def broken(self) -> bool:
        """True if any open communicator is broken: see `CallQueue.broken`."""
        return any(queue.broken for queue in self._open.copy().values())

    def close(self) -> None:
        """Closes all open communicators."""
        for queue in self._open.copy().values():
            queue.close()

    def _close_followers(self, key: str) -> None:
        for queue in self._closed_with.pop(key, []):
            queue.close()


def _calls_of(key: str, queue: CallQueue) -> dict[str, int]:
    return {key: queue.started, **queue.p2p_counts()}
