"""NCCL or MPI for device arrays: a vote of all ranks, since one rank without NCCL would leave the others waiting.

Each rank casts a ballot: what keeps it from using NCCL, if anything, which GPU it has, which NCCL. The decision is a
pure function of all ballots, so every rank comes to the same one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from collectives.backends.transport import Transport
from collectives.engine.call import Steps
from collectives.errors import BackendError
from collectives.reduction import Array

logger = logging.getLogger("collectives")

_BYTES = 1024
_SHARING = (2, 30)  # the first NCCL that lets ranks share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1 asks for it

_told: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What one rank says. reason: why it cannot use NCCL, "" if it can; gpu: tells its GPU from every other of its node

    nccl: NCCL's version, (2, 30, 4); shares: it was told that ranks may share a GPU; config: what is set of NCCL's
    """

    reason: str = ""
    node: int = 0
    gpu: str = ""
    nccl: tuple[int, ...] = ()
    shares: bool = False
    config: str = ""

    def encode(self) -> Array:
        """(1024,) uint8"""
        room = np.zeros(_BYTES, np.uint8)
        fields = asdict(self)
        while len(text := json.dumps(fields).encode()) > _BYTES:
            fields["reason"] = fields["reason"][: len(fields["reason"]) // 2]
        room[: len(text)] = np.frombuffer(text, np.uint8)
        return room

    @staticmethod
    def decode(room: Array) -> Ballot:
        """The ballot that `encode` wrote."""
        fields = json.loads(room.tobytes().rstrip(b"\0"))
        return Ballot(**{**fields, "nccl": tuple(fields["nccl"])})


@dataclass(frozen=True, kw_only=True)
class Choice:
    """backend: "nccl" or "mpi"; reason: which NCCL it is, or why it is none"""

    backend: str
    reason: str


_WAYS = {"nccl": "NCCL", "mpi": "host memory"}


def decide(ballots: Sequence[Ballot]) -> Choice:
    """What serves device arrays: NCCL if every rank can use it, and no two of them want the same GPU."""
    against = [f"rank {rank}: {ballot.reason}" for rank, ballot in enumerate(ballots) if ballot.reason]
    if against:
        return Choice(backend="mpi", reason="; ".join(against))
    versions = sorted({ballot.nccl for ballot in ballots})
    if len(versions) > 1:
        table = ", ".join(f"rank {rank}: {_dotted(ballot.nccl)}" for rank, ballot in enumerate(ballots))
        return Choice(backend="mpi", reason=f"the ranks have different NCCLs ({table})")
    for rank, ballot in enumerate(ballots):
        if ballot.config != ballots[0].config:
            texts = f"rank 0 has ({ballots[0].config}), rank {rank} ({ballot.config})"
            return Choice(backend="mpi", reason=f"the ranks were given different NcclConfigs: {texts}")
    if versions[0][:2] < _SHARING or not all(ballot.shares for ballot in ballots):
        owners: dict[tuple[int, str], int] = {}
        for rank, ballot in enumerate(ballots):
            first = owners.setdefault((ballot.node, ballot.gpu), rank)
            if first != rank:
                return Choice(
                    backend="mpi",
                    reason=f"ranks {first} and {rank} share GPU {ballot.gpu}, which NCCL "
                    f"{_dotted(versions[0])} refuses (from 2.30 on NCCL_MULTI_RANK_GPU_ENABLE=1 allows it)",
                )
    return Choice(backend="nccl", reason=f"NCCL {_dotted(versions[0])} on every rank")


def collect(transport: Transport, mine: Ballot) -> Steps[list[Ballot]]:
    """All ranks' ballots, in rank order. Collective."""
    everyones = np.empty(transport.size * _BYTES, np.uint8)
    yield transport.all_gather(mine.encode(), everyones, [_BYTES] * transport.size)
    return [Ballot.decode(row) for row in everyones.reshape(transport.size, _BYTES)]


def announce(choice: Choice, wanted: str | None, rank: int) -> None:
    """Logs the choice, once, on rank 0. Raises: BackendError on every rank if NCCL was asked for by name and lost."""
    if choice.backend != "nccl" and wanted == "nccl":
        raise BackendError(f'rank {rank}: backend "nccl" was asked for, but cannot be used: {choice.reason}')
    if rank == 0:
        text = f"arrays on GPUs go over {_WAYS[choice.backend]}: {choice.reason}"
        if text not in _told:
            _told.add(text)
            logger.info(text)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
