"""Ranks on several nodes: what a node holds is combined in its memory, and only one rank a node speaks to the others.

The wire is the slowest part, and what the ranks of a node have in common should cross it once. So a reduction goes from
every rank to the first of its node in shared memory, between these over MPI, and back to the node in shared memory.
What is different for each pair of ranks (gathers, scatters, all_to_all) gains nothing by such steps, and goes over MPI
as it is.

MPI gives one rank the same bits as another (MPI 4.1, §6.9.6, requires it of MPI_Allreduce), and the values of a node
are combined in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.backends.layered import LayeredTransport
from collectives.backends.shm.algorithms import Waits
from collectives.backends.shm.shm_transport import StepTest
from collectives.backends.transport import Finish, Test, Transport, all_of, offsets
from collectives.engine.verify import Signature, Signatures
from collectives.reduction import Array, ReduceOp

_NOTHING: Array = np.empty(0, np.uint8)


class HierarchicalTransport(LayeredTransport):
    """The transport of ranks on several nodes, at least one of which has several.

    below: of all ranks; near: of the ranks of this node, in their order; leaders: of the nodes' first ranks, in the
    order of nodes, None on other ranks; nodes: each rank's node
    """

    def __init__(self, below: Transport, near: Transport, leaders: Transport | None, nodes: Sequence[int]) -> None:
        super().__init__(below)
        self.near, self.leaders = near, leaders
        self._nodes = nodes
        self.neighbours = [rank for rank, node in enumerate(nodes) if node == below.node]
        self._place = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]  # each rank's number on its node
        self._by_node = sorted(range(below.size), key=lambda rank: nodes[rank])
        assert (near.rank, near.size) == (self.local_rank, self.local_size)
        assert (leaders is not None) == (near.rank == 0)

    # Meeting ---------------------------------------------------------------------------------------------------------

    def exchange_signatures(
        self, header: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        near = self.near.exchange_signatures(header, payload, out)
        return all_of([near, self._below.exchange_signatures(header)])

    def signatures(self) -> Signatures | None:
        return self._below.signatures()

    def root_prefix(self, room: Array, root: int) -> Test:
        return self._below.root_prefix(room, root)

    def all_prefixes(self, prefix: Array, room: Array) -> Test:
        return self._below.all_prefixes(prefix, room)

    def late(self) -> list[int]:
        return sorted({*self._below.late(), *(self.neighbours[rank] for rank in self.near.late())})

    # In steps --------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None = None) -> Test:
        return StepTest(self._all_reduce(x, out, op, finish))

    def _all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None) -> Waits:
        yield self.near.reduce(x, None if self.leaders is None else out, op, 0)
        if self.leaders is not None:
            yield self.leaders.all_reduce(out, out, op, finish)
        yield self.near.broadcast(out.view(np.uint8), 0)

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, finish: Finish | None = None) -> Test:
        return StepTest(self._reduce(x, out, op, root, finish))

    def _reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, finish: Finish | None) -> Waits:
        home, place = self._nodes[root], self._place[root]
        total = out
        if self.leaders is None:
            yield self.near.reduce(x, None, op, 0)
        else:
            part = np.empty_like(x)
            yield self.near.reduce(x, part, op, 0)
            if self.node == home and out is None:
                total = np.empty_like(x)
            yield self.leaders.reduce(part, total, op, home, finish)
        if self.node == home and place != 0:
            counts = [x.nbytes] + [0] * (self.local_size - 1)
            sent = _NOTHING if self.leaders is None or total is None else total.view(np.uint8)
            yield self.near.gather(sent, None if out is None else out.view(np.uint8), counts, place)

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None = None
    ) -> Test:
        return StepTest(self._reduce_scatter(x, out, counts, op, finish))

    def _reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None
    ) -> Waits:
        part: Array | None = None
        if self.leaders is None:
            yield self.near.reduce(x, None, op, 0)
        else:
            total = np.empty_like(x)
            yield self.near.reduce(x, total, op, 0)
            starts = offsets(counts)
            if self._by_node != list(range(self.size)):
                total = np.concatenate([total[starts[rank] :][: counts[rank]] for rank in self._by_node])
            shares = [0] * self.leaders.size
            for node, count in zip(self._nodes, counts, strict=True):
                shares[node] += count
            part = np.empty(shares[self.node], x.dtype)
            yield self.leaders.reduce_scatter(total, part, shares, op, finish)
        nbytes = [counts[rank] * x.itemsize for rank in self.neighbours]
        yield self.near.scatter(None if part is None else part.view(np.uint8), out.view(np.uint8), nbytes, 0)

    def broadcast(self, x: Array, root: int) -> Test:
        return StepTest(self._broadcast(x, root))

    def _broadcast(self, x: Array, root: int) -> Waits:
        home = self._nodes[root]
        if self.node == home:
            yield self.near.broadcast(x, self._place[root])
        if self.leaders is not None:
            yield self.leaders.broadcast(x, home)
        if self.node != home:
            yield self.near.broadcast(x, 0)

    def barrier(self) -> Test:
        return StepTest(self._barrier())

    def _barrier(self) -> Waits:
        yield self.near.barrier()
        if self.leaders is not None:
            yield self.leaders.barrier()
        yield self.near.barrier()

    # Below -----------------------------------------------------------------------------------------------------------

    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int) -> Test:
        return self._below.gather(x, out, counts, root)

    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        return self._below.scatter(x, out, counts, root)

    def all_gather(self, x: Array, out: Array, counts: Sequence[int]) -> Test:
        return self._below.all_gather(x, out, counts)

    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        return self._below.all_to_all(x, out, table)

    def close(self) -> None:
        if self.leaders is not None:
            self.leaders.close()
        super().close()
