"""Setting up what the ranks of each node share: one makes a segment, the others map it, all agree on whether it worked.

Every step is an exchange over the transport below, so that no rank is left with memory that the others do not have.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator

import numpy as np

from collectives.backends.shm import segment
from collectives.backends.shm.control_block import ControlBlock, control_bytes
from collectives.backends.shm.hierarchy import HierarchicalTransport
from collectives.backends.shm.shared_arrays import SharedArrays, segment_bytes
from collectives.backends.shm.shm_transport import ShmTransport
from collectives.backends.single import SingleTransport
from collectives.backends.transport import Test, Transport
from collectives.engine.call import Steps
from collectives.reduction import Array

_log = logging.getLogger("collectives")
_TEXT = 200  # bytes that a rank has for the reason why it cannot share memory


def share(below: Transport, like: Transport | None = None) -> Steps[Transport]:
    """The transport of the same ranks that uses the memory of their nodes; `below` where no node has two of them.

    Where the ranks of any node may not share memory, all go through `below`, and the log says why.
    like: what this function made of the transport whose duplicate `below` is: its arrays are this one's too
    """
    if below.size == 1 or not (like is None or isinstance(like, ShmTransport | HierarchicalTransport)):
        return below
    nodes, made, reason = yield from _segments(below, control_bytes(below.local_size))
    if reason:
        if below.rank == 0:
            _log.warning("ranks of a node go through %s and not through shared memory: %s", below.name, reason)
        return below
    if len(set(nodes)) == below.size:
        return below
    near: ShmTransport | SingleTransport = SingleTransport()
    if made is not None:
        known = None if like is None else sharing(like)
        shared = SharedArrays(below.local_rank, below.local_size) if known is None else known.shared
        seat = below if below.local_size == below.size else _seat(below)
        near = ShmTransport(seat, ControlBlock(made, below.local_rank, below.local_size), shared)
    if below.local_size == below.size:
        return near
    first = [nodes.index(node) for node in range(len(set(nodes)))]
    leaders, ready = below.split(first if below.rank in first else None, f"{below.key}:leaders")
    yield ready
    return HierarchicalTransport(below, near, leaders, nodes)


def sharing(transport: Transport) -> ShmTransport | None:
    """The transport whose ranks share memory with this one; None if there are none."""
    near = transport.near if isinstance(transport, HierarchicalTransport) else transport
    return near if isinstance(near, ShmTransport) else None


def add_array(transport: ShmTransport, nbytes: int) -> Generator[Test, None, Array | None]:
    """A new array on every rank, (nbytes,) uint8, in memory that all share; None if that is refused."""
    _, made, reason = yield from _segments(transport, segment_bytes(nbytes, transport.size))
    if made is None or reason:
        if transport.rank == 0:
            _log.warning("comm.empty gives each rank memory of its own, and reducing it takes copies: %s", reason)
        return None
    return transport.shared.add(made, nbytes)


def _seat(below: Transport) -> SingleTransport:
    """What stands below the ranks of one node among several, who are asked for nothing but to share memory."""
    seat = SingleTransport(f"{below.key}:node {below.node}")
    seat.rank = seat.local_rank = below.local_rank
    seat.size = seat.local_size = below.local_size
    return seat


def _segments(transport: Transport, nbytes: int) -> Steps[tuple[list[int], segment.Segment | None, str]]:
    """One segment a node with several ranks, made by the first and mapped by all of them.

    nbytes: of the segment of this rank's node
    Returns: each rank's node; this node's segment, None for a rank alone; why there are none, the same on every rank
    """
    mine: segment.Segment | None = None
    several = transport.local_size > 1
    reason = segment.supported() if several else ""
    place = np.zeros(4, np.int64)  # node, then the address of the segment
    place[0] = transport.node
    if several and transport.local_rank == 0 and not reason:
        try:
            mine = segment.create(nbytes)
            place[1:] = mine.address
        except (OSError, OverflowError) as error:  # the latter: more bytes than a number of 64 bits holds
            reason = f"rank {transport.rank} cannot make a segment of {nbytes} bytes: {error}"
    places = np.empty((transport.size, 4), np.int64)
    yield transport.all_gather(place.view(np.uint8), places.reshape(-1).view(np.uint8), [place.nbytes] * transport.size)
    nodes: list[int] = places[:, 0].tolist()
    if len(set(nodes)) == transport.size:
        return nodes, None, ""
    maker = nodes.index(transport.node)
    address = segment.Address(*places[maker, 1:].tolist())
    try:
        if several and transport.rank != maker and address.pid and not reason:
            mine = segment.attach(address, nbytes)
    except (OSError, ValueError) as error:
        reason = f"rank {transport.rank} (pid {os.getpid()}) cannot map the segment of rank {maker}: {error}"
    told = np.zeros((transport.size, _TEXT), np.uint8)
    text = reason.encode()[:_TEXT]
    said = np.frombuffer(text.ljust(_TEXT, b"\0"), np.uint8)
    yield transport.all_gather(said, told.reshape(-1), [_TEXT] * transport.size)
    if mine is not None:
        mine.release()
    reasons = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in told if row[0]]
    return (nodes, None, reasons[0]) if reasons else (nodes, mine, "")
