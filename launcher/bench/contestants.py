"""Who is measured: `collectives`, on ordinary arrays or on those of `comm.empty`. Rivals have the same methods.

A contestant binds one collective to two buffers and returns a call without arguments, so that nothing but the
collective itself is in what is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from collectives import Communicator, DtypeError
from launcher.bench.expected import Array
from launcher.bench.kinds import ROOT, Kind, partner
from launcher.job import UsageError

Call = Callable[[], Any]


class Contestant(Protocol):
    """One way to run collectives.

    name: what tables and legends call it
    refusals: exceptions that mean that it cannot do what was asked
    """

    name: str
    refusals: tuple[type[Exception], ...]

    def empty(self, nbytes: int) -> Any:
        """A buffer of (nbytes,) uint8. Every rank asks for the same."""

    def write(self, buffer: Any, values: Array) -> None:
        """Fills a buffer with values of its dtype."""

    def read(self, buffer: Any) -> Array:
        """What a buffer holds."""

    def bind(self, kind: Kind, x: Any, out: Any, op: str) -> Call:
        """The collective on these buffers; out None: x is read and written.

        Raises: one of `refusals`, here or at the first call and on every rank, if it cannot do that.
        """

    def settle(self) -> None:
        """Waits until calls that have returned are over."""

    def close(self) -> None:
        """The last call."""


class OnHost:
    """Buffers in the process's own memory, and calls that return when they are over."""

    def empty(self, nbytes: int) -> Any:
        return np.zeros(nbytes, np.uint8)

    def write(self, buffer: Any, values: Array) -> None:
        buffer[...] = values

    def read(self, buffer: Any) -> Array:
        return np.asarray(buffer)

    def settle(self) -> None:
        return


class Ours(OnHost):
    """`collectives` on ordinary arrays."""

    refusals: tuple[type[Exception], ...] = (DtypeError,)

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.name = f"ours {comm.backend}"

    def bind(self, kind: Kind, x: Any, out: Any, op: str) -> Call:
        comm = self.comm
        # Like the rivals, every rank knows that all bring the same lengths.
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.all_reduce(x, op, out=out),
            "reduce": lambda: comm.reduce(x, op, ROOT, out=out),
            "broadcast": lambda: comm.broadcast(x, ROOT),
            "gather": lambda: comm.gather(x, ROOT, lengths="equal", out=out),
            "scatter": lambda: comm.scatter(x, ROOT, out=out),
            "all_gather": lambda: comm.all_gather(x, lengths="equal", out=out),
            "reduce_scatter": lambda: comm.reduce_scatter(x, op, out=out),
            "all_to_all": lambda: comm.all_to_all(x, lengths="equal", out=out),
            "barrier": comm.barrier,
        }
        if kind.name != "send_recv":
            return calls[kind.name]
        other = partner(comm.rank, comm.size)
        to = -1 if other is None else other
        return ping_pong(comm.rank, other, lambda: comm.send(x, to), lambda: comm.recv(to, out=out))

    def close(self) -> None:
        return  # the world's communicator lives as long as the process


class OursShared(Ours):
    """`collectives` on arrays of `comm.empty`, which the ranks of a node share."""

    def __init__(self, comm: Communicator) -> None:
        self._empty: Any = getattr(comm, "empty", None)
        if self._empty is None:
            raise UsageError(f"--empty: the communicator of backend {comm.backend} has no empty()")
        super().__init__(comm)
        self.name = f"ours {comm.backend} empty"

    def empty(self, nbytes: int) -> Any:
        array = self._empty((nbytes,), np.uint8)
        array[...] = 0  # every page is there before the first call
        return array


def ping_pong(rank: int, other: int | None, send: Call, receive: Call) -> Call:
    """One round trip between two ranks, begun by the lower one. The last of an odd number of ranks does nothing."""
    if other is None:
        return lambda: None
    first, second = (send, receive) if rank < other else (receive, send)

    def call() -> None:
        first()
        second()

    return call
