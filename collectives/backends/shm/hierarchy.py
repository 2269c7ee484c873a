"""Collectives of ranks on several nodes: in shared memory within each node, and over MPI between nodes.

The network is the slowest part, so what the ranks of a node have in common should cross it only once. A reduction goes
from every rank to the first of its node, the leader, in shared memory, then between the leaders over MPI, and back in
shared memory. A broadcast and a barrier take such steps, too. gather, scatter and all_to_all gain nothing from such
steps, since their data differ for each pair of ranks. These three and all_gather go directly over MPI.

All ranks get the same bits of an all_reduce: MPI guarantees that for MPI_Allreduce (MPI 4.1, §6.9.6), and the values of
a node are combined in the order of `reduction.tree`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from collectives.backends.shm.algorithms import Waits
from collectives.backends.shm.segment import ControlBlock, SharedArrays, control_bytes, share_segment
from collectives.backends.shm.shm_transport import ShmTransport, in_steps
from collectives.backends.single import SingleTransport
from collectives.reduction import Array, ReduceOp
from collectives.transport import (
    Epilogue,
    LayeredTransport,
    RankInfo,
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
    """The transport of ranks on several nodes, at least one of which has several ranks.

    inner: the transport of all ranks; intra_node: the transport of this node's ranks, in order
    leaders: the transport of the first ranks of all nodes, in the order of nodes; None on other ranks
    nodes: each rank's node
    """

    shares_memory = True

    def __init__(
        self, inner: Transport, intra_node: Transport, leaders: Transport | None, nodes: Sequence[int]
    ) -> None:
        super().__init__(inner)
        self.intra_node = intra_node
        self.leaders = leaders
        self.shared_arrays = intra_node.shared_arrays
        self._nodes = nodes
        self.neighbours = [rank for rank, node in enumerate(nodes) if node == inner.node]
        self._local_ranks = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
        self._by_node = sorted(range(inner.size), key=lambda rank: nodes[rank])
        assert (intra_node.rank, intra_node.size) == (self.local_rank, self.local_size)
        assert (leaders is not None) == (intra_node.rank == 0)

    # Verification ----------------------------------------------------------------------------------------------------

    def exchange_signatures(
        self, signature: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        intra_node = self.intra_node.exchange_signatures(signature, payload, out)
        return all_of([intra_node, self._inner.exchange_signatures(signature)])

    def signatures(self) -> Signatures | None:
        return self._inner.signatures()

    def root_prefix(self, buffer: Array, root: int) -> Test:
        # The node's shared memory is not used: the signatures there describe the next operation on it.
        return self._inner.root_prefix(buffer, root)

    def verified_groups(self) -> Sequence[tuple[Transport, Sequence[int]]]:
        # Between nodes, signatures may be exchanged only for a communicator's first calls.
        return [(self._inner, range(self.size)), (self.intra_node, self.neighbours)]

    def empty(self, nbytes: int) -> Steps[Array | None]:
        return self.intra_node.empty(nbytes)

    def late(self) -> list[int]:
        return sorted({*self._inner.late(), *(self.neighbours[rank] for rank in self.intra_node.late())})

    # Over two levels -------------------------------------------------------------------------------------------------

    @in_steps
    def all_reduce(self, x: Array, out: Array, op: ReduceOp, epilogue: Epilogue | None = None) -> Waits:
        yield self.intra_node.reduce(x, None if self.leaders is None else out, op, 0)
        if self.leaders is not None:
            yield self.leaders.all_reduce(out, out, op, epilogue)
        yield self.intra_node.broadcast(out.view(np.uint8), 0)

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, epilogue: Epilogue | None = None) -> Test:
        # This sends about twice as much over each node's link as a tree would. Only the root keeps the total.
        return self.all_reduce(x, np.empty_like(x) if out is None else out, op, epilogue)

    @in_steps
    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, epilogue: Epilogue | None = None
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
            node_counts = [0] * self.leaders.size
            for node, count in zip(self._nodes, counts, strict=True):
                node_counts[node] += count
            part = np.empty(node_counts[self.node], x.dtype)
            yield self.leaders.reduce_scatter(total, part, node_counts, op, epilogue)
        nbytes = [counts[rank] * x.itemsize for rank in self.neighbours]
        yield self.intra_node.scatter(None if part is None else part.view(np.uint8), out.view(np.uint8), nbytes, 0)

    @in_steps
    def broadcast(self, x: Array, root: int) -> Waits:
        root_node = self._nodes[root]
        if self.node == root_node:
            yield self.intra_node.broadcast(x, self._local_ranks[root])
        if self.leaders is not None:
            yield self.leaders.broadcast(x, root_node)
        if self.node != root_node:
            yield self.intra_node.broadcast(x, 0)

    @in_steps
    def barrier(self) -> Waits:
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


def use_shared_memory(inner: Transport, original: Transport | None = None) -> Steps[Transport]:
    """A transport of the same ranks that uses shared memory within nodes; `inner` if no node has several ranks.

    If the ranks of any node cannot share memory, returns `inner` and logs why.
    original: if `inner` belongs to a duplicate, the transport of the original communicator. If that transport shares
    memory, both use the same shared arrays; if not, this function returns `inner`
    Raises: TooManyCommunicators on every rank if there is no room for the communicator of the leaders.
    """
    if inner.size == 1 or not (original is None or original.shares_memory):
        return inner
    nodes, segment, reason = yield from share_segment(inner, control_bytes(inner.local_size))
    if reason:
        if inner.rank == 0:
            _log.warning("ranks of a node go through %s and not through shared memory: %s", inner.name, reason)
        return inner
    if len(set(nodes)) == inner.size:
        return inner
    intra_node: Transport = SingleTransport()
    if segment is not None:
        arrays = None if original is None else original.shared_arrays
        if arrays is None:
            arrays = SharedArrays(inner.local_rank, inner.local_size)
        node = inner if inner.local_size == inner.size else _node_of(inner)
        intra_node = ShmTransport(node, ControlBlock(segment, inner.local_rank, inner.local_size), arrays)
    if inner.local_size == inner.size:
        return intra_node
    first = [nodes.index(node) for node in range(len(set(nodes)))]
    leaders = yield from make_group(inner, first if inner.rank in first else None, f"{inner.key}:leaders", 0)
    return HierarchicalTransport(inner, intra_node, leaders, nodes)


def _node_of(inner: Transport) -> SingleTransport:
    """The inner transport for a node's `ShmTransport` if there are several nodes. It only has the ranks' numbers."""
    transport = SingleTransport(f"{inner.key}:node {inner.node}")
    transport.rank_info = RankInfo(inner.local_rank, inner.local_size, inner.local_rank, inner.local_size, 0)
    return transport
