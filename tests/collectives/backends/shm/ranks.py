"""Ranks as threads of one process that share memory all the same, and stand on nodes as a test wants them to.

A segment is reached through /proc by the process that made it, too, so that nothing of it is faked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from collectives import Communicator, run_threads
from collectives.backends.mpi.mpi_world import rank_info_of
from collectives.backends.shm.hierarchy import use_shared_memory
from collectives.backends.threads import ThreadTransport
from collectives.engine.queue import run_to_completion

T = TypeVar("T")


class PlacedTransport(ThreadTransport):
    """A thread's transport. nodes: where each rank of the world stands"""

    def __init__(self, nodes: Sequence[int], *args: Any) -> None:
        super().__init__(*args)
        self._nodes = nodes
        placement = rank_info_of([f"node {nodes[member]}" for member in self._members], self.rank)
        self.local_rank = placement.local_rank
        self.local_size = placement.local_size
        self.node = placement.node

    def _part(self, members: Sequence[int], key: str) -> PlacedTransport:
        part = super()._part(members, key)
        return PlacedTransport(self._nodes, part._group, part.rank, part._world_notices, part.key, part._members)


def sharing(world: Communicator, nodes: Sequence[int]) -> Communicator:
    """A communicator of the ranks of a simulated world, through the memory of those nodes."""
    whole: Any = world.transport
    plain = whole._part(range(world.size), "beside")
    below = PlacedTransport(nodes, plain._group, plain.rank, plain._world_notices, plain.key, plain._members)
    return Communicator(
        run_to_completion("share", use_shared_memory(below), below, world.timeout), world.timeout, world.registry
    )


def run_sharing(fn: Callable[[Communicator], T], nodes: Sequence[int], timeout: float = 20.0) -> list[T]:
    """Runs `fn(comm)` on one thread a rank. nodes: each rank's"""
    return run_threads(lambda world: fn(sharing(world, nodes)), len(nodes), timeout=timeout)
