"""Chooses NCCL or host memory for device arrays, on all ranks together: one rank without NCCL would block the others.

Each rank describes its GPU, its NCCL version and, if it cannot use NCCL, the reason. The decision is a pure function of
all ranks' descriptions, so all ranks make the same decision. If they choose NCCL, they connect. Connecting may fail
although every rank has the library. Then no rank uses NCCL.
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

# Maximum size of a capability as JSON (bytes), and maximum length of each text in it.
_BYTES = 8192
_TEXT = 600
# The first NCCL that lets ranks share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
_SHARING = (2, 30)

_logged: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Whether one rank can use NCCL, and with which GPU, version and options.

    reason: why the rank cannot use NCCL, "" if it can; node: the number of the rank's node
    gpu: distinguishes the rank's GPU from all others of the node; nccl: NCCL's version, for example (2, 30, 4)
    allows_shared_gpu: whether the rank has NCCL_MULTI_RANK_GPU_ENABLE=1; config: the NCCL options that are set, as text
    """

    reason: str = ""
    node: int = 0
    gpu: str = ""
    nccl: tuple[int, ...] = ()
    allows_shared_gpu: bool = False
    config: str = ""


def decide(capabilities: Sequence[Capability]) -> tuple[bool, str]:
    """Whether to use NCCL for device arrays, and why.

    NCCL is used if every rank can use it, in the same version and with the same options, on a GPU of its own. From NCCL
    2.30 on, ranks may share a GPU if every rank allows it.
    """
    reasons = [f"rank {rank}: {capability.reason}" for rank, capability in enumerate(capabilities) if capability.reason]
    if reasons:
        return False, "; ".join(reasons)
    first = capabilities[0]
    version = _dotted(first.nccl)
    if any(capability.nccl != first.nccl for capability in capabilities):
        table = ", ".join(f"rank {rank}: {_dotted(capability.nccl)}" for rank, capability in enumerate(capabilities))
        return False, f"the ranks have different NCCLs ({table})"
    owners: dict[tuple[int, str], int] = {}
    sharing = first.nccl[:2] >= _SHARING and all(capability.allows_shared_gpu for capability in capabilities)
    for rank, capability in enumerate(capabilities):
        if capability.config != first.config:
            texts = f"rank 0 has ({first.config}), rank {rank} ({capability.config})"
            return False, f"the ranks were given different NcclConfigs: {texts}"
        owner = owners.setdefault((capability.node, capability.gpu), rank)
        if owner != rank and not sharing:
            return False, (
                f"ranks {owner} and {rank} share GPU {capability.gpu}, which NCCL {version} refuses (from 2.30 on "
                "NCCL_MULTI_RANK_GPU_ENABLE=1 allows it)"
            )
    return True, f"NCCL {version} on every rank"


def negotiate(
    cuda: Cuda | None,
    transport: Transport,
    timeout: float,
    requested: str | None,
    watchdog: Watchdog,
    why_not: str = "",
    config: NcclConfig | None = None,
) -> Steps[DeviceTransport]:
    """The transport of device arrays between the ranks of `transport`. Collective.

    cuda: this rank's device; None if it cannot use one; why_not: the reason why it cannot
    requested: "nccl" if NCCL was requested by name; config: options of NCCL's communicator
    Raises: BackendError on every rank if NCCL was requested, and a rank cannot use it; BackendError on a rank without a
    device.
    """
    if cuda is not None and transport.size == 1 and requested != "nccl":
        return SingleDeviceTransport(cuda)
    settings = [f"{name}={value}" for name, value in asdict(config or NcclConfig()).items() if value is not None]
    nccl, own_capability = capability(cuda, transport.node, why_not, ", ".join(settings))
    use_nccl, reason = decide((yield from _exchange(transport, own_capability)))
    communicator: NcclCommunicator | None = None
    if use_nccl:
        assert cuda is not None
        assert nccl is not None
        communicator, trouble = yield from _connect(cuda, nccl, transport, timeout, config)
        use_nccl, reason = decide((yield from _exchange(transport, replace(own_capability, reason=trouble, config=""))))
        if not use_nccl and communicator is not None:
            communicator.close()
    if requested == "nccl" and not use_nccl:
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
    """NCCL, if it can be loaded, and this rank's capability."""
    if cuda is None:
        return None, Capability(reason=why_not, node=node)
    allows_shared_gpu = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    own_capability = Capability(node=node, gpu=cuda.identity(), allows_shared_gpu=allows_shared_gpu, config=config)
    try:
        nccl = library.load()
    except CollectivesError as error:
        return None, replace(own_capability, reason=str(error))
    return nccl, replace(own_capability, nccl=nccl.version)


def _exchange(transport: Transport, own_capability: Capability) -> Steps[list[Capability]]:
    """All ranks' capabilities, in rank order; long texts are truncated. Collective."""
    truncated = replace(own_capability, reason=own_capability.reason[:_TEXT], config=own_capability.config[:_TEXT])
    records = yield from gather_records(transport, asdict(truncated), _BYTES)
    return [Capability(**{**record, "nccl": tuple(record["nccl"])}) for record in records]


def _connect(
    cuda: Cuda, nccl: Nccl, transport: Transport, timeout: float, config: NcclConfig | None
) -> Steps[tuple[NcclCommunicator | None, str]]:
    """This rank's end of a new NCCL communicator, or None and the reason why there is none."""
    message = np.zeros(1 + UNIQUE_ID_BYTES, np.uint8)  # First 1 if rank 0 has an id, else 0. Then the id.
    trouble = ""
    if transport.rank == 0:
        try:
            message[1:] = np.frombuffer(unique_id(nccl), np.uint8)
            message[0] = 1
        except CollectivesError as error:
            trouble = str(error)
    yield transport.broadcast(message, 0)  # The id travels over the host transport.
    if not message[0]:
        return None, trouble or "rank 0 could not make an id"
    rank = transport.rank
    size = transport.size
    unique = message[1:].tobytes()

    def connect() -> NcclCommunicator:
        return NcclCommunicator.connect(nccl, unique, rank, size, timeout=timeout, enter=cuda.use, config=config)

    connected = run_in_thread(connect, "collectives-connect")  # `connect` blocks until all ranks connect.
    yield connected.done
    try:
        return connected.result(), ""
    except CollectivesError as error:
        return None, str(error)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
