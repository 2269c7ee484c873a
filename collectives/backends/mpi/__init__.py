"""Ranks as MPI processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectives.world import World

if TYPE_CHECKING:
    from collectives.backends.mpi.mpi_transport import MPITransport
    from collectives.backends.mpi.mpi_world import MPIWorld


def join(expected: World | None, timeout: float, checks: int | None) -> tuple[MPITransport, MPIWorld]:
    """Joins MPI's world. If the node has several ranks, limits BLAS to a part of the cores, and chooses the rank's GPU.

    Each of the two is left out if environment variables show that the launcher or the user did it.
    Raises: what `MPIWorld` raises.
    """
    # Imported late, so that importing this package does not load MPI: a world of one may not need it.
    from collectives.backends.device.cuda import take_local_gpu
    from collectives.backends.mpi.mpi_transport import world_transport
    from collectives.backends.mpi.mpi_world import MPIWorld, limit_threads

    membership = MPIWorld(expected, timeout, checks)
    if membership.size > 1:
        local_rank = membership.node.index(membership.rank)
        limit_threads(membership.cores, local_rank)
        if len(membership.node) > 1:
            take_local_gpu(local_rank)
    return world_transport(membership), membership
