"""What every collective shares: the ranks it runs among, and the way from checked arguments to a call in the line."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from collectives.backends.shm.hierarchy import HierarchicalTransport
from collectives.backends.transport import Transport
from collectives.engine.call import CallArguments, CollectiveOp, Steps, Work
from collectives.engine.call_site import user_site
from collectives.engine.queue import CallQueue
from collectives.engine.registry import CommunicatorRegistry
from collectives.engine.verify import TEXT, Signature, Signatures, differ, table, to_text
from collectives.errors import ArgumentError, MismatchError
from collectives.reduction import Array

if TYPE_CHECKING:
    from collectives._gpu.device import Door

T = TypeVar("T")
Scale = float | Callable[[], float] | None
#: What a call does, step by step.
Describe = Callable[[CollectiveOp[T]], Steps[T]]


class CommunicatorBase:
    """One rank's end of a communicator, without any collective: each family of them inherits this."""

    def __init__(self, transport: Transport, timeout: float, registry: CommunicatorRegistry | None = None) -> None:
        self._transport = transport
        self.registry = CommunicatorRegistry() if registry is None else registry
        self.queue = CallQueue(transport, self._ended)
        self.registry.join(transport.key, self.queue)
        self.timeout = timeout
        self.rank = transport.rank
        self.size = transport.size
        self.local_rank = transport.local_rank
        self.local_size = transport.local_size
        self.node = transport.node
        self.backend = self.registry.wanted or transport.name
        self._door: Door | None = None

    def _device(self, x: Any) -> Door:
        """Where a call goes whose array is on a GPU, like x; made at the first of them."""
        if self._door is None:
            from collectives._gpu.device import open_door  # here: host arrays need nothing of it

            self._door = open_door(self, self._transport, x)
        return self._door

    def watch_device(self, name: str) -> None:
        """A graph with captured collectives of this communicator was launched on the current stream: it has to end.

        Where it does not within the communicator's time limit, it is treated as a collective that does not.
        Raises: what has gone wrong on the device before.
        """
        if self._door is not None:
            self._door.watch_stream(name)

    def enter(self) -> None:
        """Has the ranks meet in NCCL if it was asked for by name. Collective.

        Raises: BackendError on every rank if one of them cannot use it.
        """
        if self.registry.wanted == "nccl":
            from collectives._gpu.device import enter_nccl

            self._door = enter_nccl(self, self._transport)

    def _hand_down(self, child: CommunicatorBase | None, color: int | None, key: int) -> Steps[None]:
        """Gives a communicator made of this one its part of the NCCL communicator that this one has. Collective.

        child: None on a rank that is in none; color, key: not negative, the same and the order within a new one
        """
        if self._door is not None:
            transport = None if child is None else child._transport
            door = yield from self._door.split(child, transport, color, key)
            if child is not None:
                child._door = door

    def _ended(self) -> None:
        if self._door is not None:
            self._door.close()
        self.registry.leave(self._transport.key)

    @overload
    def _run(self, name: str, x: Array | None, steps: Describe[T], async_op: Literal[False], more: str = "") -> T: ...
    @overload
    def _run(self, name: str, x: Array | None, steps: Describe[T], async_op: bool, more: str = "") -> T | Work[T]: ...
    def _run(self, name: str, x: Array | None, steps: Describe[T], async_op: bool, more: str = "") -> T | Work[T]:
        """Puts a call in the queue."""
        call: CollectiveOp[T] = CollectiveOp(name, CallArguments(x, more), user_site(), self.timeout)
        call.steps = steps(call)
        if async_op:
            self.queue.submit(call)
            return Work(call)
        return self.queue.run(call)

    def _verify(
        self,
        call: CollectiveOp[Any],
        header: Signature,
        payload: Array | None = None,
        out: Array | None = None,
        prefix: Array | None = None,
    ) -> Steps[Signatures | None]:
        """The first step of every collective: shows the others what is called here, and looks at what they call.

        Returns: the headers of all ranks, None if they were not exchanged
        Raises: MismatchError on every rank if they differ; on the ranks of one node, and the communicator is of no use
        any more, if those of other nodes were not compared with them.
        """
        yield self._transport.exchange_signatures(header, payload, out, prefix)
        call.signatures = signatures = self._transport.signatures()
        if signatures is not None and differ(signatures):
            raise (yield from self._told_apart(call, self._transport, range(self.size)))
        if signatures is None and isinstance(self._transport, HierarchicalTransport):
            near = self._transport.near.signatures()
            if near is not None and differ(near):
                error = yield from self._told_apart(call, self._transport.near, self._transport.neighbours)
                self.queue.break_off(error, _unheard)  # other nodes know nothing of it, and go on
                raise error
        return signatures

    def _told_apart(self, call: CollectiveOp[Any], transport: Transport, ranks: Sequence[int]) -> Steps[MismatchError]:
        """What these ranks raise, whose transport it is: they have made different calls, and tell each other which."""
        texts = np.empty((transport.size, TEXT), np.uint8)
        what = call.what
        array = "" if what.dtype is None else f"{what.dtype} {what.shape}"
        mine = to_text(call.name, what.more, array, str(call.site))
        yield transport.all_gather(mine, texts.reshape(-1), [TEXT] * transport.size)
        return MismatchError(table(texts, ranks, self.rank, call.number))

    def _check_root(self, root: Any) -> int:
        """The root as a plain number. Raises: ArgumentError if there is no such rank."""
        return whole(root, 0, self.size - 1, "root should be a rank")


def whole(number: Any, least: int, most: int, what: str) -> int:
    """A whole number of any kind, NumPy's too, as Python's. Raises: ArgumentError if it is none, or out of bounds."""
    if type(number) is int and least <= number <= most:
        return number
    try:
        plain = operator.index(number)
    except TypeError:
        plain = least - 1
    if not least <= plain <= most:
        raise ArgumentError(f"{what} from {least} to {most}, is {number!r}")
    return int(plain)


def _unheard() -> None:
    return
