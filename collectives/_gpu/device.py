"""The door for arrays on a GPU, as a communicator holds it: made when it first meets such an array."""

from __future__ import annotations

import math
from typing import Any

from collectives._gpu import cuda
from collectives._gpu.by_nccl import ByNccl
from collectives._gpu.letters import DeviceLetters
from collectives._gpu.movements import DeviceMovements
from collectives._gpu.reductions import DeviceReductions
from collectives.backends.transport import Transport
from collectives.engine.call import CallArguments, CollectiveOp, Steps
from collectives.engine.call_site import user_site
from collectives.engine.verify import Signature, signature_hash
from collectives.errors import ArgumentError, BackendError, CollectivesError
from collectives.ops.base import CommunicatorBase


class Door(DeviceReductions, DeviceMovements, DeviceLetters):
    """All collectives of one communicator on device arrays."""

    def ready(self) -> Door:
        """This door, with what carries its arrays. Collective."""
        call: CollectiveOp[Door] = CollectiveOp("init", CallArguments(None, "nccl"), user_site(), self._calls.timeout)

        def steps() -> Steps[Door]:
            yield from self.carrier()
            return self

        call.steps = steps()
        return self._calls.queue.run(call)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of zeros, in memory that suits what carries the arrays. Collective.

        Raises: ArgumentError while a graph is captured; MismatchError on every rank if shapes or dtypes differ.
        """
        origin = self._cuda.current_stream()
        if self._cuda.capturing(origin):
            raise ArgumentError("empty: memory that ranks share cannot be made while a graph is captured")
        nbytes = math.prod(shape) * dtype.itemsize
        header = Signature(signature_hash("empty", "on GPU", dtype, shape))
        call: CollectiveOp[Any] = CollectiveOp(
            "empty", CallArguments(None, f"{dtype} {shape} on GPU"), user_site(), self._calls.timeout
        )

        def steps() -> Steps[Any]:
            yield from self._calls._verify(call, header)
            carrier = yield from self.carrier()
            if not nbytes or not isinstance(carrier, ByNccl):
                return None
            return (yield from carrier.memory(nbytes, self._transport))

        call.steps = steps()
        memory = self._calls.queue.run(call)
        self.check()
        with self._cuda.on(origin):
            array = self._cuda.empty(shape, dtype) if memory is None else self._cuda.laid(memory, shape, dtype)
            array[...] = 0
        return array

    def split(
        self, calls: CommunicatorBase | None, transport: Transport | None, color: int | None, key: int
    ) -> Steps[Door | None]:
        """The door of a communicator made of this one's ranks, whose NCCL is split from this one's. Collective.

        calls, transport: of the new communicator, None on a rank that is in none; color, key: as NCCL's split has them
        Returns: None where the new communicator's ranks are left to choose for themselves, at its first array on a GPU
        """
        carrier = self._carrier
        if not isinstance(carrier, ByNccl) or not carrier.nccl.has("ncclCommSplit"):
            return None
        if calls is not None and calls.size == 1 and calls.registry.wanted != "nccl":
            color = None  # it copies
        made = yield from carrier.split(color, key)
        if made is None:
            return None
        assert calls is not None
        assert transport is not None
        door = Door(calls, transport, self._cuda)
        door._carrier = ByNccl(self._cuda, made, carrier.issuer, door._failed)
        return door


def open_door(calls: CommunicatorBase, transport: Transport, x: Any) -> Door:
    """The door of one communicator, for arrays on the GPU that x is on.

    Raises: BackendError if this process cannot use it.
    """
    absent = cuda.why_absent()
    try:
        if absent is not None:
            raise BackendError(f"{absent} (pip install 'ddp-runtime[cuda12]', or [cuda13])")
        locate = getattr(x, "__dlpack_device__", None)
        return Door(calls, transport, cuda.load(None if locate is None else int(locate()[1])))
    except CollectivesError as error:
        raise BackendError(f"rank {calls.rank}: {type(x).__name__} x is on a GPU, but {error}") from error


def enter_nccl(calls: CommunicatorBase, transport: Transport) -> Door:
    """The door of a communicator for which NCCL was asked by name. Collective.

    Ranks of one node that all stand at its first GPU take one each.
    Raises: BackendError on every rank if any of them cannot use NCCL.
    """
    reason, device = cuda.why_absent() or "", None
    if not reason:
        try:
            device = cuda.load()
            device.take_turns(calls.local_rank)
        except CollectivesError as error:
            reason = str(error)
    return Door(calls, transport, device, reason).ready()
