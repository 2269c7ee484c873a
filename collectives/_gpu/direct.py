"""Device arrays over an MPI that reads and writes the GPU's memory itself, by sends and receives between the ranks.

Sends and receives alone: they are what the probe has seen to work, and Open MPI takes device memory neither in its
nonblocking collectives nor in reductions of anybody's own making. What is reduced is reduced by kernels, in the ranks'
order, so the same bits come out on every rank and every run, for every dtype and op that host arrays have.

    all_reduce    each rank gets its part of everyone's array, reduces it, and sends the result to all
    broadcast     the root deals the array out in parts, and the ranks give each other theirs

MPI knows nothing of streams: whoever drives the call asks an event until what stands before it is done, and starts the
sends then.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from collectives._gpu.carrier import Rest, parts_of
from collectives._gpu.cuda import Cuda
from collectives._shared.hierarchy import HierarchicalTransport
from collectives._shared.transport import SharedTransport
from collectives.arrays import as_bytes
from collectives.call import Steps
from collectives.lengths import even_lengths
from collectives.reduction import COMBINE, ReduceOp, wire_op
from collectives.transport import TAGS, Transport, all_of

_TAG = 2 * TAGS  # beyond those of `send` and `recv`; collectives follow each other in one order


def mpi_below(transport: Transport) -> Transport | None:
    """The transport that speaks to MPI itself, beneath the memory that ranks of a node share; None if there is none."""
    while isinstance(transport, SharedTransport | HierarchicalTransport):
        transport = transport.below
    return transport if transport.name == "mpi" else None


class Direct:
    """The carrier whose transport moves device memory; mpi: only its `send` and `recv` are used."""

    name = "MPI"
    capturable = False  # the host takes part in it

    def __init__(self, cuda: Cuda, mpi: Transport) -> None:
        self._cuda = cuda
        self._mpi = mpi
        self._ranks = range(mpi.size)
        self.stream = cuda.stream()

    # Reductions ------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, out: Any, op: ReduceOp, factor: Any) -> Steps[Rest]:
        counts = even_lengths(x.size, self._mpi.size)
        mine = parts_of(out, counts)[self._mpi.rank]
        rest = yield from self.reduce_scatter(x, mine, counts, op, factor)
        yield from self.all_gather(as_bytes(mine), as_bytes(out), [n * x.itemsize for n in counts])
        return rest

    def reduce(self, x: Any, out: Any | None, op: ReduceOp, factor: Any, root: int) -> Steps[Rest]:
        counts = even_lengths(x.size, self._mpi.size)
        mine = self._empty((counts[self._mpi.rank],), x.dtype)
        rest = yield from self.reduce_scatter(x, mine, counts, op, factor)
        whole = None if out is None else as_bytes(out)
        yield from self.gather(as_bytes(mine), whole, [n * x.itemsize for n in counts], root)
        return rest._replace(made=(*rest.made, mine))

    def reduce_scatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp, factor: Any) -> Steps[Rest]:
        """As the protocol says; `out` may be x's own part of this rank besides."""
        everyones = self._empty((self._mpi.size, counts[self._mpi.rank]), x.dtype)
        sends = {rank: as_bytes(part) for rank, part in parts_of(x, counts).items()}
        yield from self._exchange(sends, {rank: as_bytes(everyones[rank]) for rank in self._ranks})
        combine = getattr(self._cuda.xp, COMBINE[wire_op(op)].__name__)
        with self._cuda.on(self.stream):
            self._cuda.xp.copyto(out, everyones[0])
            for row in everyones[1:]:
                combine(out, row, out=out)
        return Rest(op, factor, (everyones,))

    # Movements -------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Any, root: int) -> Steps[None]:
        parts = parts_of(x, even_lengths(x.size, self._mpi.size))
        me = self._mpi.rank
        others = [rank for rank in self._ranks if rank not in (root, me)]
        if me == root:
            yield from self._exchange({rank: parts[rank] for rank in others}, {})
            yield from self._exchange(dict.fromkeys(others, parts[root]), {})
        else:
            yield from self._exchange({}, {root: parts[me]})
            theirs = {rank: parts[rank] for rank in (root, *others)}
            yield from self._exchange(dict.fromkeys(others, parts[me]), theirs)

    def gather(self, x: Any, out: Any | None, counts: Sequence[int], root: int) -> Steps[None]:
        yield from self._exchange({root: x}, {} if out is None else parts_of(out, counts))

    def all_gather(self, x: Any, out: Any, counts: Sequence[int]) -> Steps[None]:
        yield from self._exchange(dict.fromkeys(self._ranks, x), parts_of(out, counts))

    def scatter(self, x: Any | None, out: Any, counts: Sequence[int], root: int) -> Steps[None]:
        yield from self._exchange({} if x is None else parts_of(x, counts), {root: out})

    def all_to_all(self, x: Any, out: Any, table: Sequence[Sequence[int]]) -> Steps[None]:
        me = self._mpi.rank
        yield from self._exchange(parts_of(x, table[me]), parts_of(out, [row[me] for row in table]))

    # Life ------------------------------------------------------------------------------------------------------------

    def watch(self, event: Any, call: object) -> None:
        return  # what can wait for other ranks is over already: the host took part in it

    def check(self) -> None:
        return

    def close(self) -> None:
        return

    # Shared parts ----------------------------------------------------------------------------------------------------

    def _exchange(self, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> Steps[None]:
        """Arrays of bytes to some ranks and from some; both sides know which are empty."""
        me = self._mpi.rank
        own = sends.get(me) if me in receives else None
        if own is not None and own.size and own.data.ptr != receives[me].data.ptr:
            with self._cuda.on(self.stream):
                self._cuda.xp.copyto(receives[me], own)
        yield functools.partial(self._cuda.passed, self._cuda.mark(self.stream))
        # An MPI looks for the GPU in the thread that calls it.
        with self._cuda.on(self.stream):
            moved = all_of(
                [self._mpi.recv(part, peer, _TAG) for peer, part in receives.items() if part.size and peer != me]
                + [self._mpi.send(part, peer, _TAG) for peer, part in sends.items() if part.size and peer != me]
            )

        def test() -> bool:
            with self._cuda.on(self.stream):
                return moved()

        yield test

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        with self._cuda.on(self.stream):
            return self._cuda.empty(shape, dtype)
