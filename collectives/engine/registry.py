"""The communicators of one world on one rank: how many calls each has made, which the other ranks hear at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collectives.engine.queue import CallQueue
from collectives.time_limit import TimeLimit


class CommunicatorRegistry:
    """The call queues of all communicators of one world on this rank; of a closed communicator, the number of calls.

    wanted: the backend for arrays on GPUs that was asked for by name, if any
    nccl: the `NcclConfig` with which its communicators are made
    """

    def __init__(self, wanted: str | None = None, nccl: Any = None) -> None:
        self.wanted = wanted
        self.nccl = nccl
        self._open: dict[str, CallQueue] = {}
        self._closed: dict[str, int] = {}  # calls, by communicator, and of sends and receives by pair of ranks
        self._closed_with: dict[str, list[CallQueue]] = {}  # what was made of a communicator for its own use

    def join(self, key: str, queue: CallQueue) -> None:
        """A communicator has been made."""
        self._open[key] = queue

    def leave(self, key: str) -> None:
        """A communicator has been closed, and its calls are finished."""
        # Entered first: a rank that leaves at this moment must find it in one of the two.
        self._closed.update(_calls_of(key, self._open[key]))
        del self._open[key]
        self._close_followers(key)

    def close_with(self, key: str, queue: CallQueue) -> None:
        """Closes `queue` when the communicator of `key` is closed, or now if it is."""
        self._closed_with.setdefault(key, []).append(queue)
        if key not in self._open:
            self._close_followers(key)

    def calls(self) -> Mapping[str, int]:
        """How many calls each communicator made, and how many sends and receives by pair; closed ones too."""
        calls: dict[str, int] = {}
        for key, queue in self._open.copy().items():
            calls.update(_calls_of(key, queue))
        return {**calls, **self._closed.copy()}

    def drain(self, limit: TimeLimit) -> None:
        """Waits until no call is under way, or the limit is over."""
        for queue in self._open.copy().values():
            queue.drain(limit)

    def broken(self) -> bool:
        """True if a call ended half-way on any of them."""
        return any(queue.broken for queue in self._open.copy().values())

    def close(self) -> None:
        """Closes all of them."""
        for queue in self._open.copy().values():
            queue.close()

    def _close_followers(self, key: str) -> None:
        for queue in self._closed_with.pop(key, []):
            queue.close()


def _calls_of(key: str, queue: CallQueue) -> dict[str, int]:
    return {key: queue.started, **queue.p2p_counts()}
