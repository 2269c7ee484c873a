"""Ranks on several nodes: each node combines in its memory, and one rank of it, the leader, talks to other nodes.

The network is the slowest part, and what the ranks of a node have in common should cross it once. So a reduction goes
from every rank to the first of its node in shared memory, between these over MPI, and back in shared memory. What is
different for each pair of ranks (gathers, scatters, all_to_all) gains nothing by such steps, and goes over MPI as it
is.

MPI gives one rank the same bits as another (MPI 4.1, §6.9.6, requires it of MPI_Allreduce), and the values of a node
are combined in the order of `reduction.tree`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from collectives.backends.shm.algorithms import Waits
from collectives.backends.shm.segment import ControlBlock, SharedArrays, control_bytes, share_segment
from collectives.backends.shm.shm_transport import ShmTransport, StepTest
from collectives.backends.single import SingleTransport
from collectives.reduction import Array, ReduceOp
from collectives.transport import (
    Finish,
    LayeredTransport,
    Placement,
    Signature,
    Signatures,
    Steps,
    Test,
    Transport,
    all_of,
    make_group,
    offsets,
)


class HierarchicalTransport(LayeredTransport):
    """The transport of ranks on several nodes, at least one of which has several.

    inner: of all ranks; intra_node: of the ranks of this node, in their order; leaders: of the nodes' first ranks, in
    the order of nodes, None on other ranks; nodes: each rank's node
    """

    shares_memory = True

    def __init__(
        self, inner: Transport, intra_node: Transport, leaders: Transport | None, nodes: Sequence[int]
    ) -> None:
        super().__init__(inner)
        self.intra_node, self.leaders = intra_node, leaders
        self.shared_arrays = intra_node.shared_arrays
        self._nodes = nodes
        self.neighbours = [rank for rank, node in enumerate(nodes) if node == inner.node]
        self._place = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]  # each rank's number on its node
        self._by_node = sorted(range(inner.size), key=lambda rank: nodes[rank])
        assert (intra_node.rank, intra_node.size) == (self.local_rank, self.local_size)
        assert (leaders is not None) == (intra_node.rank == 0)

    # Verification ----------------------------------------------------------------------------------------------------

    def exchange_signatures(
        self, header: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        intra_node = self.intra_node.exchange_signatures(header, payload, out)
        return all_of([intra_node, self._inner.exchange_signatures(header)])

    def signatures(self) -> Signatures | None:
        return self._inner.signatures()

    def root_prefix(self, buffer: Array, root: int) -> Test:
        return self._inner.root_prefix(buffer, root)  # what was shown in shared memory is the next operation's

    def verified_groups(self) -> Sequence[tuple[Transport, Sequence[int]]]:
        # Those between nodes are only exchanged for a communicator's first calls.
        return [(self._inner, range(self.size)), (self.intra_node, self.neighbours)]

    def empty(self, nbytes: int) -> Steps[Array | None]:
        return self.intra_node.empty(nbytes)

    def late(self) -> list[int]:
        return sorted({*self._inner.late(), *(self.neighbours[rank] for rank in self.intra_node.late())})

    # Over two levels -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None = None) -> Test:
        return StepTest(self._all_reduce(x, out, op, finish))

    def _all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None) -> Waits:
        yield self.intra_node.reduce(x, None if self.leaders is None else out, op, 0)
        if self.leaders is not None:
            yield self.leaders.all_reduce(out, out, op, finish)
        yield self.intra_node.broadcast(out.view(np.uint8), 0)

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, finish: Finish | None = None) -> Test:
        # The nodes' links carry at most twice what a tree to the root would, and the other ranks drop the total.
        return self.all_reduce(x, np.empty_like(x) if out is None else out, op, finish)

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None = None
    ) -> Test:
        return StepTest(self._reduce_scatter(x, out, counts, op, finish))

    def _reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None
    ) -> Waits:
        part: Array | None = None
        if self.leaders is None:
            yield self.intra_node.reduce(x, None, op, 0)
        else:
            total = np.empty_like(x)
            yield self.intra_node.reduce(x, total, op, 0)
            starts = offsets(counts)
            if self._by_node != list(range(self.size)):
                total = np.concatenate([total[starts[rank] :][: counts[rank]] for rank in self._by_node])
            shares = [0] * self.leaders.size
            for node, count in zip(self._nodes, counts, strict=True):
                shares[node] += count
            part = np.empty(shares[self.node], x.dtype)
            yield self.leaders.reduce_scatter(total, part, shares, op, finish)
        nbytes = [counts[rank] * x.itemsize for rank in self.neighbours]
        yield self.intra_node.scatter(None if part is None else part.view(np.uint8), out.view(np.uint8), nbytes, 0)

    def broadcast(self, x: Array, root: int) -> Test:
        return StepTest(self._broadcast(x, root))

    def _broadcast(self, x: Array, root: int) -> Waits:
        home = self._nodes[root]
        if self.node == home:
            yield self.intra_node.broadcast(x, self._place[root])
        if self.leaders is not None:
            yield self.leaders.broadcast(x, home)
        if self.node != home:
            yield self.intra_node.broadcast(x, 0)

    def barrier(self) -> Test:
        return StepTest(self._barrier())

    def _barrier(self) -> Waits:
        yield self.intra_node.barrier()
        if self.leaders is not None:
            yield self.leaders.barrier()
        yield self.intra_node.barrier()

    # Over the inner transport alone ----------------------------------------------------------------------------------

    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int) -> Test:
        return self._inner.gather(x, out, counts, root)

    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        return self._inner.scatter(x, out, counts, root)

    def all_gather(self, x: Array, out: Array, counts: Sequence[int]) -> Test:
        return self._inner.all_gather(x, out, counts)

    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        return self._inner.all_to_all(x, out, table)

    def close(self) -> None:
        if self.leaders is not None:
            self.leaders.close()
        super().close()


_log = logging.getLogger("collectives")


def share(inner: Transport, like: Transport | None = None) -> Steps[Transport]:
    """The transport of the same ranks that uses the memory of their nodes; `inner` where no node has two of them.

    Where the ranks of any node may not share memory, all go through `inner`, and the log says why.
    like: what this function made of the transport whose duplicate `inner` is: its arrays are this one's too
    """
    if inner.size == 1 or not (like is None or like.shares_memory):
        return inner
    nodes, made, reason = yield from share_segment(inner, control_bytes(inner.local_size))
    if reason:
        if inner.rank == 0:
            _log.warning("ranks of a node go through %s and not through shared memory: %s", inner.name, reason)
        return inner
    if len(set(nodes)) == inner.size:
        return inner
    intra_node: Transport = SingleTransport()
    if made is not None:
        arrays = None if like is None else like.shared_arrays
        if arrays is None:
            arrays = SharedArrays(inner.local_rank, inner.local_size)
        node = inner if inner.local_size == inner.size else _node_of(inner)
        intra_node = ShmTransport(node, ControlBlock(made, inner.local_rank, inner.local_size), arrays)
    if inner.local_size == inner.size:
        return intra_node
    first = [nodes.index(node) for node in range(len(set(nodes)))]
    leaders = yield from make_group(inner, first if inner.rank in first else None, f"{inner.key}:leaders", 0)
    return HierarchicalTransport(inner, intra_node, leaders, nodes)


def _node_of(inner: Transport) -> SingleTransport:
    """The inner transport of one node's ranks among several nodes, who only share memory through it."""
    transport = SingleTransport(f"{inner.key}:node {inner.node}")
    transport.placement = Placement(inner.local_rank, inner.local_size, inner.local_rank, inner.local_size, 0)
    return transport
