"""What every collective shares: the ranks it runs among, and the way from checked arguments to a call in the queue."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from collectives.engine.call import MISS, CollectiveOp, Work
from collectives.engine.queue import CallQueue, CommunicatorRegistry
from collectives.engine.verify import LONGEST, signature_hash, table
from collectives.errors import ArgumentError, MismatchError
from collectives.reduction import Array
from collectives.transport import Signature, Signatures, Steps, Transport, differ, gather_records

T = TypeVar("T")
Scale = float | Callable[[], float] | None
#: What a call does, step by step.
Describe = Callable[[CollectiveOp[T]], Steps[T]]


class CommunicatorBase:
    """One rank's end of a communicator, without any collective: each family of them inherits this."""

    def __init__(self, transport: Transport, timeout: float, registry: CommunicatorRegistry | None = None) -> None:
        self.transport = transport
        self.registry = CommunicatorRegistry() if registry is None else registry
        self.queue = CallQueue(transport, self._ended)
        self.registry.join(transport.key, self.queue)
        self._call_cache = transport.call_cache(self.queue)
        self._cached: Callable[..., Any] = _not_cached if self._call_cache is None else self._call_cache.run
        self.timeout = timeout
        self.rank = transport.rank
        self.size = transport.size
        self.local_rank = transport.local_rank
        self.local_size = transport.local_size
        self.node = transport.node
        self.backend = self.registry.wanted or transport.name

    def _device(self, x: Any) -> Any:
        """The end of this communicator that a call goes to whose array is on a GPU, like x: see `Communicator`."""
        raise NotImplementedError

    def _ended(self) -> None:
        self.registry.leave(self.transport.key)

    def _collective(
        self, name: str, x: Array | None, steps: Describe[Any], more: str = "", plan: Callable[[], Any] | None = None
    ) -> CollectiveOp[Any]:
        """A call of this communicator. plan: how the next one like it can be carried out by the call cache"""
        call: CollectiveOp[Any] = CollectiveOp(name, x, more, self.timeout)
        call.steps, call.plan = steps(call), plan
        return call

    def _run(self, call: CollectiveOp[Any], async_op: bool) -> Any:
        """Carries a call out, or starts it."""
        if async_op:
            self.queue.submit(call)
            return Work(call)
        result = self.queue.run(call)
        if call.plan is not None and self._call_cache is not None and call.signatures is not None:
            self._call_cache.learn(call)
        return result

    def _signature(self, call: CollectiveOp[Any], shape: tuple[int, ...] | None = None, rows: int = 0) -> Signature:
        """What the ranks compare: name and arguments, and with a shape the dtype and that shape."""
        dtype = None if shape is None else call.dtype
        return Signature(signature_hash(call.name, call.more, dtype, shape), rows)

    def verify(
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
        yield self.transport.exchange_signatures(header, payload, out, prefix)
        call.signatures = signatures = self.transport.signatures()
        for transport, ranks in self.transport.verified_groups():
            found = transport.signatures()
            if found is not None and differ(found):
                error = yield from self._mismatch(call, transport, ranks)
                if signatures is None and transport is not self.transport:
                    self.queue.break_off(error, lambda: None)  # other nodes know nothing of it, and go on
                raise error
        return signatures

    def _mismatch(self, call: CollectiveOp[Any], transport: Transport, ranks: Sequence[int]) -> Steps[MismatchError]:
        """What these ranks raise, whose transport it is: they have made different calls, and tell each other which."""
        texts = (call.name, call.more, call.array, call.site)
        calls = yield from gather_records(transport, [text[:LONGEST] for text in texts])
        return MismatchError(table(calls, ranks, self.rank, call.number))

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


def check_timeout(timeout: Any) -> float:
    """A time limit. Raises: ArgumentError if it is no number above 0."""
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ArgumentError(f"timeout should be seconds above 0, is {timeout!r}")
    return timeout


def _not_cached(*_: Any) -> Any:
    return MISS
