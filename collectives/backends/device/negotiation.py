"""NCCL or host memory for device arrays: decided by all ranks, since one without NCCL would leave the others waiting.

Each rank says what it can do: what keeps it from using NCCL, if anything, which GPU it has, which NCCL. The decision is
a pure function of what all ranks say, so every rank comes to the same one. Those that chose NCCL then connect; the
library may be there, and the ranks still not reach each other: then again no rank uses it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from collectives.backends.device.cuda import Cuda
from collectives.backends.device.device_transport import DeviceTransport, HostStagedTransport, SingleDeviceTransport
from collectives.backends.device.nccl_transport import NcclTransport, issuer_of
from collectives.backends.nccl import library
from collectives.backends.nccl.library import UNIQUE_ID_BYTES, Nccl, NcclConfig
from collectives.backends.nccl.nccl_communicator import NcclCommunicator, unique_id
from collectives.backends.nccl.watchdog import Watchdog
from collectives.errors import BackendError, CollectivesError
from collectives.time_limit import run_in_thread
from collectives.transport import Steps, Transport, gather_records

logger = logging.getLogger("collectives")

_BYTES, _TEXT = 8192, 600  # of a capability; characters of each text in it
_SHARING = (2, 30)  # the first NCCL that lets ranks share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1 asks for it

_logged: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What one rank can do.

    reason: why it cannot use NCCL, "" if it can; gpu: tells its GPU from every other of its node
    nccl: NCCL's version, (2, 30, 4); shares: ranks may share a GPU; config: what is set of NCCL's
    """

    reason: str = ""
    node: int = 0
    gpu: str = ""
    nccl: tuple[int, ...] = ()
    shares: bool = False
    config: str = ""


def decide(capabilities: Sequence[Capability]) -> tuple[bool, str]:
    """Whether NCCL serves device arrays, and why: every rank can use it, and no two of them want the same GPU."""
    against = [f"rank {rank}: {each.reason}" for rank, each in enumerate(capabilities) if each.reason]
    if against:
        return False, "; ".join(against)
    first, version = capabilities[0], _dotted(capabilities[0].nccl)
    if any(each.nccl != first.nccl for each in capabilities):
        table = ", ".join(f"rank {rank}: {_dotted(each.nccl)}" for rank, each in enumerate(capabilities))
        return False, f"the ranks have different NCCLs ({table})"
    owners: dict[tuple[int, str], int] = {}
    sharing = first.nccl[:2] >= _SHARING and all(each.shares for each in capabilities)
    for rank, each in enumerate(capabilities):
        if each.config != first.config:
            texts = f"rank 0 has ({first.config}), rank {rank} ({each.config})"
            return False, f"the ranks were given different NcclConfigs: {texts}"
        owner = owners.setdefault((each.node, each.gpu), rank)
        if owner != rank and not sharing:
            return False, (
                f"ranks {owner} and {rank} share GPU {each.gpu}, which NCCL {version} refuses (from 2.30 on "
                "NCCL_MULTI_RANK_GPU_ENABLE=1 allows it)"
            )
    return True, f"NCCL {version} on every rank"


def negotiate(
    cuda: Cuda | None,
    transport: Transport,
    timeout: float,
    wanted: str | None,
    watchdog: Watchdog,
    why_not: str = "",
    config: NcclConfig | None = None,
) -> Steps[DeviceTransport]:
    """What moves device arrays between the ranks of `transport`. Collective.

    cuda: this rank's device, None if it has none, for the reason `why_not`
    wanted: "nccl" if NCCL was asked for by name; config: how NCCL's communicator is made
    Raises: BackendError on every rank if NCCL was asked for, and one of them cannot use it.
    """
    if cuda is not None and transport.size == 1 and wanted != "nccl":
        return SingleDeviceTransport(cuda)
    settings = [f"{name}={value}" for name, value in asdict(config or NcclConfig()).items() if value is not None]
    nccl, mine = capability(cuda, transport.node, why_not, ", ".join(settings))
    use_nccl, reason = decide((yield from _exchange(transport, mine)))
    communicator: NcclCommunicator | None = None
    if use_nccl:
        assert cuda is not None
        assert nccl is not None
        communicator, trouble = yield from _connect(cuda, nccl, transport, timeout, config)
        use_nccl, reason = decide((yield from _exchange(transport, replace(mine, reason=trouble, config=""))))
        if not use_nccl and communicator is not None:
            communicator.close()
    if wanted == "nccl" and not use_nccl:
        raise BackendError(f'rank {transport.rank}: backend "nccl" was asked for, but cannot be used: {reason}')
    text = f"arrays on GPUs go over {'NCCL' if use_nccl else 'host memory'}: {reason}"
    if transport.rank == 0 and text not in _logged:
        _logged.add(text)
        logger.info(text)
    if cuda is None:
        raise BackendError(f"rank {transport.rank} has no GPU whose arrays could be moved: {why_not}")
    if not use_nccl or communicator is None:
        return HostStagedTransport(cuda, transport)
    return NcclTransport(cuda, communicator, issuer_of(cuda.index, cuda.use), watchdog)


def capability(cuda: Cuda | None, node: int, why_not: str, config: str) -> tuple[Nccl | None, Capability]:
    """NCCL, if it can be loaded, and what this rank says of itself."""
    if cuda is None:
        return None, Capability(reason=why_not, node=node)
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    mine = Capability(node=node, gpu=cuda.identity(), shares=shares, config=config)
    try:
        nccl = library.load()
    except CollectivesError as error:
        return None, replace(mine, reason=str(error))
    return nccl, replace(mine, nccl=nccl.version)


def _exchange(transport: Transport, mine: Capability) -> Steps[list[Capability]]:
    """All ranks' capabilities, in rank order; long texts are cut. Collective."""
    cut = replace(mine, reason=mine.reason[:_TEXT], config=mine.config[:_TEXT])
    everyones = yield from gather_records(transport, asdict(cut), _BYTES)
    return [Capability(**{**each, "nccl": tuple(each["nccl"])}) for each in everyones]


def _connect(
    cuda: Cuda, nccl: Nccl, transport: Transport, timeout: float, config: NcclConfig | None
) -> Steps[tuple[NcclCommunicator | None, str]]:
    """This rank's end of a new NCCL communicator, or why there is none."""
    message = np.zeros(1 + UNIQUE_ID_BYTES, np.uint8)  # whether there is an id, and the id
    trouble = ""
    if transport.rank == 0:
        try:
            message[1:] = np.frombuffer(unique_id(nccl), np.uint8)
            message[0] = 1
        except CollectivesError as error:
            trouble = str(error)
    yield transport.broadcast(message, 0)  # the id travels by the host's transport
    if not message[0]:
        return None, trouble or "rank 0 could not make an id"
    rank, size, unique = transport.rank, transport.size, message[1:].tobytes()

    def connect() -> NcclCommunicator:
        return NcclCommunicator.connect(nccl, unique, rank, size, timeout=timeout, enter=cuda.use, config=config)

    connected = run_in_thread(connect, "collectives-connect")  # it waits for the other ranks
    yield connected.done
    try:
        return connected.result(), ""
    except CollectivesError as error:
        return None, str(error)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
