"""The door for arrays on a GPU, as a communicator holds it: made when it first meets such an array."""

from __future__ import annotations

from collectives._gpu import cuda
from collectives._gpu.movements import DeviceMovements
from collectives._gpu.reductions import DeviceReductions
from collectives.calls import Calls
from collectives.errors import BackendError, CollectivesError
from collectives.transport import Transport


class Door(DeviceReductions, DeviceMovements):
    """All collectives of one communicator on device arrays."""


def open_door(calls: Calls, transport: Transport, wanted: str | None) -> Door:
    """The door of one communicator, for arrays on the current device of this thread.

    wanted: "nccl" if NCCL was asked for by name
    Raises: BackendError if this process cannot use a GPU.
    """
    absent = cuda.why_absent()
    if absent is not None:
        raise BackendError(f"rank {calls.rank}: the array is on a GPU, but {absent}: pip install 'ddp-runtime[cuda12]'")
    try:
        return Door(calls, transport, cuda.load(), wanted)
    except CollectivesError as error:
        raise BackendError(f"rank {calls.rank}: the array is on a GPU, but {error}") from error
