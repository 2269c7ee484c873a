"""Setting up what the ranks of each node share: one makes a segment, the others map it, all agree on whether it worked.

Every step is an exchange over the transport below, so that no rank is left with memory that the others do not have.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator

import numpy as np

from collectives._shared import segment
from collectives._shared.arrays import SharedArrays, segment_bytes
from collectives._shared.board import Board, board_bytes
from collectives._shared.hierarchy import HierarchicalTransport
from collectives._shared.transport import SharedTransport
from collectives._single import SingleTransport
from collectives.progress import Steps
from collectives.reduction import Array
from collectives.transport import Test, Transport

_log = logging.getLogger("collectives")
_TEXT = 200  # bytes that a rank has for the reason why it cannot share memory


def share(below: Transport, shared: SharedArrays | None = None) -> Steps[Transport]:
    """The transport of the same ranks that uses the memory of their nodes; `below` where no node has two of them.

    Where a node's ranks may not share memory, they go over MPI instead, and the log says why.
    shared: of a communicator of the same ranks in the same order, whose arrays then are this one's too
    """
    if below.local_size == below.size:
        return (yield from _share_node(below, shared))
    nodes = np.empty(below.size, np.int64)
    mine = np.array([below.node], np.int64)
    yield below.all_gather(mine.view(np.uint8), nodes.view(np.uint8), [mine.nbytes] * below.size)
    return (yield from _share_nodes(below, nodes.tolist(), shared))


def _share_node(below: Transport, shared: SharedArrays | None) -> Steps[Transport]:
    if below.size == 1:
        return below
    made = yield from _segment(below, board_bytes(below.size))
    if isinstance(made, str):
        if below.rank == 0:
            _log.warning("ranks of this node go through MPI and not through shared memory: %s", made)
        return below
    if shared is None:
        shared = SharedArrays(below.rank, below.size)
    return SharedTransport(below, Board(made, below.rank, below.size), shared)


def _share_nodes(below: Transport, nodes: list[int], shared: SharedArrays | None) -> Steps[Transport]:
    first = [nodes.index(node) for node in range(max(nodes) + 1)]
    if len(first) == below.size:
        return below
    mates = [rank for rank, node in enumerate(nodes) if node == below.node]
    near, ready = below.split(mates if len(mates) > 1 else None, f"{below.key}:node {below.node}")
    yield ready
    leaders, ready = below.split(first if below.rank in first else None, f"{below.key}:leaders")
    yield ready
    near = SingleTransport() if near is None else (yield from _share_node(near, shared))
    return HierarchicalTransport(below, near, leaders, nodes)


def sharing(transport: Transport) -> SharedTransport | None:
    """The transport whose ranks share memory with this one; None if there are none."""
    near = transport.near if isinstance(transport, HierarchicalTransport) else transport
    return near if isinstance(near, SharedTransport) else None


def add_array(transport: SharedTransport, nbytes: int) -> Generator[Test, None, Array | None]:
    """A new array on every rank, (nbytes,) uint8, in memory that all share; None if that is refused."""
    made = yield from _segment(transport, segment_bytes(nbytes, transport.size))
    if isinstance(made, str):
        transport.shared.skip()
        if transport.rank == 0:
            _log.warning("comm.empty gives each rank memory of its own, and reducing it takes copies: %s", made)
        return None
    return transport.shared.add(made, nbytes)


def _segment(transport: Transport, nbytes: int) -> Generator[Test, None, segment.Segment | str]:
    """A segment that all ranks have mapped, made by rank 0; or the reason why there is none, the same on every rank."""
    mine: segment.Segment | None = None
    reason = segment.supported()
    address = np.zeros(3, np.int64)
    if transport.rank == 0 and not reason:
        try:
            mine = segment.create(nbytes)
            address[:] = mine.address
        except OSError as error:
            reason = f"no segment of {nbytes} bytes can be made: {error}"
    yield transport.broadcast(address.view(np.uint8), 0)
    try:
        if transport.rank != 0 and address.any() and not reason:
            mine = segment.attach(segment.Address(*address.tolist()), nbytes)
    except (OSError, ValueError) as error:
        reason = f"rank {transport.rank} (pid {os.getpid()}) cannot map the segment of rank 0: {error}"
    told = np.zeros((transport.size, _TEXT), np.uint8)
    text = reason.encode()[:_TEXT]
    said = np.frombuffer(text.ljust(_TEXT, b"\0"), np.uint8)
    yield transport.all_gather(said, told.reshape(-1), [_TEXT] * transport.size)
    if mine is not None:
        mine.release()
    for row in told:
        if row[0]:
            return row.tobytes().rstrip(b"\0").decode(errors="replace")
    assert mine is not None
    return mine
