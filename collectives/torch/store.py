"""Makes a communicator of the ranks of PyTorch's default group, and lets ranks find each other without MASTER_ADDR.

mpiexec, srun, ddp-launch and torchrun start a world, and give each process a rank. PyTorch's ranks must be the same.
Processes that only PyTorch's store connects (`torch.multiprocessing.spawn` with `file://`) meet at an address that rank
0 writes into the store.
"""

from __future__ import annotations

import importlib
import os
import secrets
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from collectives.backends.mpi.rendezvous import SECRET, settings
from collectives.communicator import Communicator
from collectives.errors import WorldError
from collectives.start import init, joined
from collectives.world import world_from_env


def set_variables() -> None:
    """Sets RANK and WORLD_SIZE, which scripts read, if mpiexec, srun or ddp-launch started this rank.

    Also sets LOCAL_RANK, if the local rank is known. Variables that are set already stay as they are.
    """
    world = world_from_env()
    if world is None:
        return
    os.environ.setdefault("RANK", str(world.rank))
    os.environ.setdefault("WORLD_SIZE", str(world.size))
    if world.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    elif "SLURM_LOCALID" in os.environ:  # MPICH under srun speaks PMI, which has no local rank
        os.environ.setdefault("LOCAL_RANK", os.environ["SLURM_LOCALID"])


def add_rendezvous() -> None:
    """Makes `init_method="env://"`, the default, work without MASTER_ADDR and MASTER_PORT if a launcher set the ranks.

    Rank 0 then serves the store at a free port, and broadcasts the address. It does the same if both variables are set,
    but this process has joined its world before: then this is a second default group. An early rank could find the
    store of the first group at MASTER_PORT, which rank 0 is about to close.
    """
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    from_variables = handlers["env"]

    def from_mpi(url: str, timeout: timedelta, **more: Any) -> Iterator[tuple[Any, int, int]]:
        set_whole = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        if world_from_env() is None or (set_whole and joined() is None):
            yield from from_variables(url, timeout=timeout, **more)
            return
        comm = init(timeout=timeout.total_seconds())
        store = None
        if comm.rank == 0:
            name = "localhost" if comm.local_size == comm.size else socket.gethostname()
            host = os.environ.get("MASTER_ADDR", name)
            store = dist.TCPStore(host, 0, comm.size, True, timeout, wait_for_workers=False)
        host, port = comm.broadcast_object(store and (store.host, store.port))
        store = store or dist.TCPStore(host, port, comm.size, False, timeout)
        asked = dict(parse_qsl(urlsplit(url).query))  # the arguments of init_process_group
        yield store, int(asked.get("rank", comm.rank)), int(asked.get("world_size", comm.size))

    handlers["env"] = from_mpi


def join(store: Any, rank: int, size: int, timeout: float) -> Communicator:
    """A communicator of PyTorch's default group.

    Raises: WorldError if the process was started as another rank; what `init` and `create_group` raise.
    """
    by_store = world_from_env() is None and size > 1
    world = _meet(store, rank, size, timeout) if by_store else init(timeout=timeout)
    if (world.rank, world.size) != (rank, size):
        raise WorldError(
            f"PyTorch was told that this is rank {rank} of {size}, but it was started as rank {world.rank} of "
            f'{world.size}: leave rank and world_size out of init_process_group("ddp")'
        )
    return world.create_group(range(size), timeout=timeout)


def _meet(store: Any, rank: int, size: int, timeout: float) -> Communicator:
    """Joins the world with the variables that torchrun would set. Rank 0 writes the address into the store.

    Returns: the communicator of all ranks
    """
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        base = store
        while isinstance(base, dist.PrefixStore):
            base = base.underlying_store
        host = getattr(base, "host", "localhost")  # of a TCPStore, which rank 0 serves
        store.set("collectives", f"{host} {port - 1} {secrets.token_hex(16)}")
    host, port, secret = store.get("collectives").decode().split()
    wanted = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": port, SECRET: secret}
    before = {name: os.environ.pop(name) for name in wanted if name in os.environ}
    try:
        with settings(wanted):
            return init(timeout=timeout)
    finally:
        os.environ.update(before)
