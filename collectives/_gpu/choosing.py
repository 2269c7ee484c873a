"""From nothing to a carrier: the ranks vote, and those that chose NCCL meet in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from collectives._gpu import vote
from collectives._gpu.alone import Alone
from collectives._gpu.by_nccl import ByNccl
from collectives._gpu.carrier import Carrier
from collectives._gpu.cuda import Cuda
from collectives._gpu.staged import Staged
from collectives._nccl import issuer, library
from collectives._nccl.communicator import NcclCommunicator, unique_id
from collectives._nccl.config import NcclConfig
from collectives._nccl.limit import aside
from collectives._nccl.table import UNIQUE_ID_BYTES, Nccl
from collectives.backends.transport import Transport
from collectives.engine.call import Steps
from collectives.errors import BackendError, CollectivesError

T = TypeVar("T")


def choose(
    cuda: Cuda | None,
    transport: Transport,
    timeout: float,
    wanted: str | None,
    failed: Callable[[Exception], object],
    why_not: str = "",
    config: NcclConfig | None = None,
) -> Steps[Carrier]:
    """What moves device arrays between the ranks of `transport`. Collective.

    cuda: this rank's device, None if it has none, for the reason `why_not`
    wanted: "nccl" if NCCL was asked for by name; failed: as in `ByNccl`; config: how NCCL's communicator is made
    Raises: BackendError on every rank if NCCL was asked for, and one of them cannot use it.
    """
    if cuda is not None and transport.size == 1 and wanted != "nccl":
        return Alone(cuda)
    nccl, mine = _ballot(cuda, transport.node, why_not, str(config or ""))
    choice = vote.decide((yield from vote.collect(transport, mine)))
    carrier: Carrier | None = None
    if choice.backend == "nccl":
        assert cuda is not None
        assert nccl is not None
        carrier, trouble = yield from _meet(cuda, nccl, transport, timeout, failed, config)
        # The library may be there, and the ranks still not reach each other: then again nobody uses it.
        second = vote.Ballot(reason=trouble, node=transport.node, gpu=mine.gpu, nccl=mine.nccl, shares=mine.shares)
        choice = vote.decide((yield from vote.collect(transport, second)))
        if choice.backend == "mpi" and carrier is not None:
            carrier.close()
            carrier = None
    vote.announce(choice, wanted, transport.rank)
    if carrier is None:
        if cuda is None:
            raise BackendError(f"rank {transport.rank} has no GPU whose arrays could be moved: {why_not}")
        carrier = Staged(cuda, transport)
    return carrier


def _ballot(cuda: Cuda | None, node: int, why_not: str, config: str) -> tuple[Nccl | None, vote.Ballot]:
    if cuda is None:
        return None, vote.Ballot(reason=why_not, node=node)
    gpu = cuda.identity()
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    try:
        nccl = library.load()
    except CollectivesError as error:
        return None, vote.Ballot(reason=str(error), node=node, gpu=gpu, shares=shares)
    return nccl, vote.Ballot(node=node, gpu=gpu, nccl=nccl.version, shares=shares, config=config)


def _meet(
    cuda: Cuda,
    nccl: Nccl,
    transport: Transport,
    timeout: float,
    failed: Callable[[Exception], object],
    config: NcclConfig | None,
) -> Steps[tuple[ByNccl | None, str]]:
    """This rank's end of a new NCCL communicator, or why there is none."""
    told = np.zeros(UNIQUE_ID_BYTES + 1, np.uint8)
    trouble = ""
    if transport.rank == 0:
        try:
            told[1:] = np.frombuffer(unique_id(nccl), np.uint8)
            told[0] = 1
        except CollectivesError as error:
            trouble = str(error)
    yield transport.broadcast(told, 0)  # the id travels by the host's transport
    if not told[0]:
        return None, trouble or "rank 0 could not make an id"
    use = cuda.xp.cuda.Device(cuda.index).use

    def connect() -> NcclCommunicator:
        rank, size = transport.rank, transport.size
        unique = told[1:].tobytes()
        return NcclCommunicator.connect(nccl, unique, rank, size, timeout=timeout, enter=use, config=config)

    met = aside(connect, "collectives-choice")  # it waits for the other ranks
    yield met.done
    try:
        communicator = met.result()
    except CollectivesError as error:
        return None, str(error)
    return ByNccl(cuda, communicator, issuer.of_device(cuda.index, use), failed), ""
