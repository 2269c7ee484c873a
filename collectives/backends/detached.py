"""The world as seen by a process that works for a rank and is none: it knows its place, and takes part in nothing.

A worker that reads data asks which part of it is its rank's. Were it alone in a world of its own, as a process is that
no engine has started, every rank's workers would read the same in silence. A process that the user's script starts
(subprocess, a pool) inherits what the engine told the rank, and would take itself for that rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from collectives.backends.single import SingleTransport
from collectives.backends.transport import Signature, Test
from collectives.communicator import Communicator
from collectives.errors import no_rank
from collectives.reduction import Array
from collectives.world import APART, World, promised, started_by_torchrun, torchrun_job

# How the names of the processes begin that start ranks.
_ENGINES = ("hydra", "mpiexec", "mpirun", "orte", "prte", "slurmstepd", "srun")


class Place(NamedTuple):
    """Of the rank that the process works for: see `Transport`. What an engine does not say is as in a world of one."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int


def passed_on(comm: Communicator | None, promised: World | None, pid: int | None = None) -> dict[str, str]:
    """The variables by which a process that works for this rank knows its place.

    comm: of all ranks, None if the rank has not joined them yet; promised: what its engine said, None if there is none
    pid: of this process, if they hold for those alone that it starts
    """
    if comm is not None:
        where = Place(comm.rank, comm.size, comm.local_rank, comm.local_size, comm.node)
    elif promised is not None:
        where = Place(promised.rank, promised.size, promised.local_rank or 0, promised.local_size or 1, 0)
    else:
        return {}
    numbers = " ".join(map(str, where if pid is None else (*where, pid)))
    return {APART: f"{numbers};{torchrun_job(os.environ)}"}


def place(environ: Mapping[str, str]) -> Place | None:
    """Where the rank stands that this process works for, None if it works for nobody.

    With the rank's pid, the variable holds for processes below it in the process tree, and only where the engine's
    variables were inherited, too: a program that was started without them is a world of its own. So are the ranks of a
    torchrun that the rank has started.
    """
    if APART not in environ or started_by_torchrun(environ):
        return None
    numbers = [int(word) for word in environ[APART].partition(";")[0].split()]
    where, rank = Place._make(numbers[:5]), numbers[5:]
    return where if not rank or (promised(environ) is not None and _works_for(rank[0])) else None


def _works_for(pid: int) -> bool:
    """True if that process is above this one, and no engine between them, which starts ranks of other worlds."""
    above = os.getppid()
    try:
        while above not in (0, pid):
            with open(f"/proc/{above}/stat") as stat:
                name, _, rest = stat.read().partition("(")[2].rpartition(")")
            if name.startswith(_ENGINES):
                return False
            above = int(rest.split()[1])
    except OSError:  # no /proc, or an ancestor has just ended
        return False
    return above == pid


class DetachedTransport(SingleTransport):
    """Knows its place; whatever is to be done together raises WorldError."""

    def __init__(self, where: Place) -> None:
        super().__init__()
        self.rank, self.size, self.local_rank, self.local_size, self.node = where

    def exchange_signatures(
        self, header: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        self._refuse()

    def send(self, x: Array, dst: int, tag: int) -> Test:
        self._refuse()

    def recv(self, out: Array, src: int, tag: int) -> Test:
        self._refuse()

    def arrived(self) -> tuple[int, Array] | None:
        self._refuse()

    def group(self, members: Sequence[int], key: str, missing: list[int]) -> tuple[SingleTransport, Test]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise no_rank(self.rank, self.size)
