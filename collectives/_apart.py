"""The world as seen by a process that works for a rank and is none: it knows its place, and takes part in nothing.

A worker that reads data asks which part of it is its rank's. Were it alone in a world of its own, as a process is that
no engine has started, every rank's workers would read the same in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from collectives._single import SingleTransport
from collectives.communicator import Communicator
from collectives.errors import WorldError
from collectives.meeting import Header
from collectives.reduction import Array
from collectives.transport import Test
from collectives.world import World

_VARIABLE = "DDP_APART"  # set by a rank for such processes


class Place(NamedTuple):
    """Of the rank that the process works for: see `Transport`. What an engine does not say is as in a world of one."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int


def passed_on(comm: Communicator | None, promised: World | None) -> dict[str, str]:
    """The variables by which a process that works for this rank knows its place.

    comm: of all ranks, None if the rank has not joined them yet; promised: what its engine said, None if there is none
    """
    if comm is not None:
        where = Place(comm.rank, comm.size, comm.local_rank, comm.local_size, comm.node)
    elif promised is not None:
        where = Place(promised.rank, promised.size, promised.local_rank or 0, promised.local_size or 1, 0)
    else:
        return {}
    return {_VARIABLE: " ".join(map(str, where))}


def place(environ: Mapping[str, str]) -> Place | None:
    """Where the rank stands that this process works for, None if it works for nobody."""
    return Place(*map(int, environ[_VARIABLE].split())) if _VARIABLE in environ else None


class ApartTransport(SingleTransport):
    """Knows its place; whatever is to be done together raises WorldError."""

    def __init__(self, where: Place) -> None:
        super().__init__()
        self.rank, self.size, self.local_rank, self.local_size, self.node = where

    def meet(
        self, header: Header, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        self._refuse()

    def send(self, x: Array, dst: int, tag: int) -> Test:
        self._refuse()

    def recv(self, out: Array, src: int, tag: int) -> Test:
        self._refuse()

    def arrived(self) -> tuple[int, Array] | None:
        self._refuse()

    def group(self, members: Sequence[int], key: str) -> tuple[SingleTransport, Test]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise WorldError(
            f"this process works for rank {self.rank} of {self.size} and is no rank: it has comm.rank and comm.size, "
            "and makes no calls"
        )
