"""Long work on all ranks, such as a download or writing to a slow disk, which may take longer than any time limit.

A rank that waited in one collective for an hour would exceed `comm.timeout`, and the launcher would report a hang. So
while the ranks work, a thread of each rank calls a small collective every second, in which the ranks exchange their
states. Ranks that are alive join this collective within about a second. Like any other collective, it fails if a rank
has died or was stopped.
"""

from __future__ import annotations

import threading
from types import TracebackType

import numpy as np

from collectives.communicator import Communicator
from collectives.errors import CollectiveTimeout, ranks_with_verb
from collectives.time_limit import Deadline

# Seconds between two exchanges while any rank works; a short time limit makes them more frequent.
INTERVAL = 1.0
_WORKS, _DONE, _FAILED, _STUCK = range(4)


class MonitoredSection:
    """A `with` block that all ranks enter, and leave together when the last of them has finished it.

    comm: a communicator that nothing else uses meanwhile (`comm.duplicate()`). Its time limit holds for every exchange.
        So a rank that enters too late, or is stopped for too long, makes the exchange time out
    patience: seconds without `progress` after which a rank counts as stuck, even if it is alive; None: never

    failed: set at the end of the block: the ranks whose block raised, in rank order; the same on every rank

    Raises at the end of the block: CollectiveTimeout on every rank if a rank was stuck; then `comm` must not be used
    any more, since that rank may still be in its block. PeerLeft and other errors, as any collective does. If this
    rank's own block raised, its exception is raised instead.
    """

    def __init__(self, comm: Communicator, patience: float | None = None) -> None:
        self.failed: tuple[int, ...] = ()
        self._comm = comm
        self._patience = patience
        self._interval = min(INTERVAL, comm.timeout / 4)
        self._state = _WORKS
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._stuck: list[int] = []
        self.progress()

    def progress(self) -> None:
        """Restarts the time of `patience` on this rank. May be called from any thread, as often as desired."""
        self._deadline = None if self._patience is None else Deadline(self._patience)

    def __enter__(self) -> MonitoredSection:
        self.progress()
        self._thread: threading.Thread | None = threading.Thread(target=self._monitor, name="monitor", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            # From Python 3.12 on, no thread can start once the script has ended. Then `__exit__` calls `_monitor`, and
            # the other ranks wait in their exchange until then. So the block must end within the time limit of `comm`.
            self._thread = None
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = _DONE if error is None else _FAILED
        self._ended.set()
        if self._thread is None:
            self._monitor()
        else:
            self._thread.join()
        if error is not None:
            return
        if self._error is not None:
            raise self._error
        if self._stuck:
            stuck = ranks_with_verb(self._stuck, "has", "have")
            raise CollectiveTimeout(
                f"rank {self._comm.rank}: {stuck} made no progress for {self._patience:g} s, though still alive"
            )

    def _monitor(self) -> None:
        try:
            while True:
                self._ended.wait(self._interval)
                state = self._state
                if state == _WORKS and self._deadline is not None and self._deadline.passed():
                    state = _STUCK
                states = self._comm.all_gather(np.array([state], np.int64), lengths="equal")
                if _WORKS not in states:
                    break
        except BaseException as error:  # re-raised at the end of the block
            self._error = error
            return
        self.failed = tuple(np.flatnonzero(states == _FAILED).tolist())
        self._stuck = np.flatnonzero(states == _STUCK).tolist()
