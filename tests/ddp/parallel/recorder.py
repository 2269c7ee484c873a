"""A communicator that records which collectives are called on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives import Communicator
from tests.ddp.parallel.ranks import on_ranks

OBJECTS = {"all_gather_object", "broadcast_object", "gather_object", "scatter_object"}
ARRAYS = {"all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"}
COLLECTIVES = ARRAYS | OBJECTS | {"barrier", "create_group", "recv", "send", "split"}


def only_name(name: str, x: Any) -> Any:
    return name


class Recorder:
    """Records each collective of a communicator and of its duplicates in a list. note: what of (name, argument)"""

    def __init__(self, comm: Communicator, events: list[Any], note: Callable[[str, Any], Any] = only_name) -> None:
        self._comm = comm
        self._events = events
        self._note = note

    def __getattr__(self, name: str) -> Any:
        result = getattr(self._comm, name)
        if name not in COLLECTIVES:
            return result

        def call(*args: Any, **options: Any) -> Any:
            self._events.append(self._note(name, args[0] if args else None))
            return result(*args, **options)

        return call

    def duplicate(self, purpose: str = "") -> Recorder:
        return Recorder(self._comm.duplicate(purpose), self._events, self._note)


def calls_of(fn: Callable[[Any], Any], size: int = 2) -> list[str]:
    """The calls that `fn(comm)` makes, the same on every rank."""

    def rank(comm: Communicator) -> Any:
        calls: list[str] = []
        fn(Recorder(comm, calls))
        return calls

    ranks = on_ranks(rank, size)
    assert ranks == [ranks[0]] * size
    return ranks[0]
