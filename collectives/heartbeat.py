"""Long work side by side: ranks that write to a slow disk, or wait for a download, for longer than any time limit.

A rank that waited in one collective for an hour would be given up after `comm.timeout`, and the launcher would take the
job for hung. So while ranks work, a thread of each makes a small collective every second, in which they tell each other
how they do: it never waits long for ranks that live, and a rank that died or was stopped is noticed as in any other
collective.
"""

from __future__ import annotations

import threading
from types import TracebackType

import numpy as np

from collectives.communicator import Communicator
from collectives.errors import CollectiveTimeout
from collectives.time_limit import TimeLimit
from collectives.transport import name_ranks

EVERY = 1.0  # s; a beat while somebody works
_WORKS, _DONE, _FAILED, _STUCK = range(4)


class Heartbeat:
    """A `with` block that ranks go through side by side, and leave together when the last of them is at its end.

    comm: a communicator that nobody else uses meanwhile (`comm.duplicate()`); its time limit holds for every beat, and
        so for a rank that enters late, or is stopped
    patience: seconds without `progress` after which a rank is given up, however alive it is; None: never

    failed: afterwards the ranks that left by an exception, in order, the same on every rank

    Raises, at the end of the block: CollectiveTimeout on every rank if one was given up, after which `comm` must not be
    used: that rank may still be in its block; PeerLeft and its kin as any collective does. An exception of this
    rank's own block goes before these.
    """

    def __init__(self, comm: Communicator, patience: float | None = None) -> None:
        self.failed: tuple[int, ...] = ()
        self._comm = comm
        self._patience = patience
        self._every = min(EVERY, comm.timeout / 4)
        self._state = _WORKS
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._stuck: list[int] = []
        self.progress()

    def progress(self) -> None:
        """Says that this rank gets on; from any thread, as often as one likes."""
        self._limit = None if self._patience is None else TimeLimit(self._patience)

    def __enter__(self) -> Heartbeat:
        self.progress()
        self._thread: threading.Thread | None = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            # From Python 3.12 on no thread starts any more once the script has ended. The others hear of this rank when
            # it is at its end, if that is within the time limit of a collective.
            self._thread = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._state = _DONE if error is None else _FAILED
        self._ended.set()
        if self._thread is None:
            self._beat()
        else:
            self._thread.join()
        if error is not None:
            return
        if self._error is not None:
            raise self._error
        if self._stuck:
            have = "has" if len(self._stuck) == 1 else "have"
            raise CollectiveTimeout(
                f"rank {self._comm.rank}: {name_ranks(self._stuck)} {have} made no progress for {self._patience:g} s, "
                "though still alive"
            )

    def _beat(self) -> None:
        try:
            while True:
                self._ended.wait(self._every)
                state = self._state
                if state == _WORKS and self._limit is not None and self._limit.passed():
                    state = _STUCK
                states = self._comm.all_gather(np.array([state], np.int64), lengths="equal")
                if _WORKS not in states:
                    break
        except BaseException as error:  # raised where the block ends
            self._error = error
            return
        self.failed = tuple(np.flatnonzero(states == _FAILED).tolist())
        self._stuck = np.flatnonzero(states == _STUCK).tolist()
