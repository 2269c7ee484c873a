"""A communicator's end for arrays on a GPU, as it holds it: made when it first meets such an array."""

from __future__ import annotations

import math
from typing import Any

from collectives.backends.device import cuda
from collectives.backends.device.device_ops import DeviceOps
from collectives.backends.device.nccl_transport import NcclTransport
from collectives.backends.nccl.nccl_communicator import NcclCommunicator
from collectives.engine.call import CallArguments, CollectiveOp
from collectives.engine.communicator_base import CommunicatorBase
from collectives.engine.verify import signature_hash
from collectives.errors import ArgumentError, BackendError, CollectivesError
from collectives.transport import Signature, Steps, Transport


class DeviceCommunicator(DeviceOps):
    """All collectives of one communicator on device arrays."""

    def negotiate(self) -> DeviceCommunicator:
        """This communicator, with what moves its arrays. Collective."""
        call = self._call("init", None, "nccl")
        call.steps = self.transport()
        self._comm.queue.run(call)
        return self

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of zeros, in memory that suits what moves the arrays. Collective.

        Raises: ArgumentError while a graph is captured; MismatchError on every rank if shapes or dtypes differ.
        """
        origin = self._cuda.current_stream()
        if self._cuda.capturing(origin):
            raise ArgumentError("empty: memory that ranks share cannot be made while a graph is captured")
        nbytes = math.prod(shape) * dtype.itemsize
        signature = Signature(signature_hash("empty", "on GPU", dtype, shape))
        call: CollectiveOp[Any] = CollectiveOp(
            "empty", CallArguments(None, f"{dtype} {shape} on GPU"), self._comm.timeout
        )

        def steps() -> Steps[Any]:
            yield from self._comm.verify(call, signature)
            transport = yield from self.transport()
            if not nbytes or not isinstance(transport, NcclTransport):
                return None
            return (yield from transport.memory(nbytes, self._transport))

        call.steps = steps()
        memory = self._comm.queue.run(call)
        self.watchdog.check()
        with self._cuda.on(origin):
            array = self._cuda.empty(shape, dtype) if memory is None else self._cuda.array_in(memory, shape, dtype)
            array[...] = 0
        return array

    def split_nccl(self, child: CommunicatorBase | None, color: int | None, key: int) -> Steps[NcclCommunicator | None]:
        """A part of this communicator's NCCL communicator, for one made of its ranks. Collective.

        child: the new communicator, None on a rank that is in none; color, key: as NCCL's split has them
        Returns: None where the new communicator's ranks are left to negotiate, at its first array on a GPU
        """
        transport = self._device_transport
        if not isinstance(transport, NcclTransport):
            return None
        if child is not None and child.size == 1 and child.registry.wanted != "nccl":
            color = None  # it copies
        return (yield from transport.split(color, key))

    def open_child(self, comm: CommunicatorBase, transport: Transport, nccl: NcclCommunicator) -> DeviceCommunicator:
        """The device's end of a communicator that has that part."""
        assert isinstance(self._device_transport, NcclTransport)
        child = DeviceCommunicator(comm, transport, self._cuda)
        child._device_transport = NcclTransport(self._cuda, nccl, self._device_transport.issuer, child.watchdog)
        return child


def open_device(comm: CommunicatorBase, transport: Transport, x: Any) -> DeviceCommunicator:
    """One communicator's end for arrays on the GPU that x is on.

    Raises: BackendError if this process cannot use it.
    """
    absent = cuda.why_absent()
    try:
        if absent is not None:
            raise BackendError(f"{absent} (pip install 'ddp-runtime[cuda12]', or [cuda13])")
        locate = getattr(x, "__dlpack_device__", None)
        return DeviceCommunicator(comm, transport, cuda.load(None if locate is None else int(locate()[1])))
    except CollectivesError as error:
        raise BackendError(f"rank {comm.rank}: {type(x).__name__} x is on a GPU, but {error}") from error


def connect_nccl(comm: CommunicatorBase, transport: Transport) -> DeviceCommunicator:
    """The end of a communicator for which NCCL was asked by name. Collective.

    Ranks of one node that all stand at its first GPU take one each.
    Raises: BackendError on every rank if any of them cannot use NCCL.
    """
    reason, device = cuda.why_absent() or "", None
    if not reason:
        try:
            device = cuda.load()
            device.take_turns(comm.local_rank)
        except CollectivesError as error:
            reason = str(error)
    return DeviceCommunicator(comm, transport, device, reason).negotiate()
