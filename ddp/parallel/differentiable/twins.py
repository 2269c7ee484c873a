"""The communicators of the collectives that autograd sees: a twin of each one that they are called with.

Their backward runs inside `loss.backward()`, while DataParallel reduces buckets and the user's own calls may be under
way. On one communicator the three would meet in another order on each rank; so each has its own.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import collectives
from collectives import Communicator


class _Place:
    """Where the twin of one communicator is kept: made by the first who asks, while others who ask wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.twin: Communicator | None = None


_lock = threading.Lock()  # never held during a collective: simulated ranks share it
_places: WeakKeyDictionary[Communicator, _Place] = WeakKeyDictionary()


def twin_of(comm: Communicator | None) -> Communicator:
    """The duplicate of `comm` (None: `collectives.init()`) for these collectives; it is closed with it.

    Collective the first time that it is asked for.
    """
    comm = collectives.init() if comm is None else comm
    with _lock:
        place = _places.setdefault(comm, _Place())
    with place.lock:
        if place.twin is None:
            place.twin = comm.duplicate()
            comm.registry.close_with(comm.key, place.twin.queue)
        return place.twin
