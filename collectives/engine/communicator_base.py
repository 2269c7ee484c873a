"""What every collective shares: the ranks it runs among, the comparison of their calls, and the way to the queue.

Before data moves the ranks show each other what they are about to call: a wrong call is an error, never a hang. A
header is a line of int64 words. One of them is a hash of all that must be the same on every rank (the collective, its
op, root and scale, dtype and shape; the length along axis 0 only where it may not differ), so comparing costs one look
a rank.
Where they differ the ranks tell each other in words what they called, and each raises the same table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from collectives.arrays import as_bytes, is_device_array
from collectives.engine.call import CollectiveOp, Plan, Work
from collectives.engine.host_arrays import HostArrays
from collectives.engine.queue import CallQueue
from collectives.engine.registry import CommunicatorRegistry
from collectives.errors import ArgumentError, CollectivesError, MismatchError
from collectives.transport import Signature, Signatures, Steps, Transport, differ, gather_records, spans

T = TypeVar("T")
Scale = float | Callable[[], float] | None
#: What a call does, step by step.
Describe = Callable[[CollectiveOp[T]], Steps[T]]
# Beyond that many plans the oldest are forgotten: calls of ever new shapes are not made again.
_KEPT = 4096

#: Characters of each text of a call, in the table.
LONGEST = 200


def table(made: Sequence[Sequence[str]], ranks: Sequence[int], me: int, number: int) -> str:
    """The error that every rank raises: one line a call, with the ranks that made it.

    made: name, other arguments, array and site of each rank's call; ranks: their numbers
    """
    calls: dict[tuple[str, ...], list[int]] = {}
    for rank, words in zip(ranks, made, strict=True):
        calls.setdefault(tuple(words), []).append(rank)
    rows = [("rank", "call", "with", "array", "at")]
    for (name, more, array, site), who in calls.items():
        rows.append((spans(who), f"{name} #{number}", more or "-", array or "-", site))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["  " + "  ".join(row).rstrip() for row in padded]
    return (
        f"rank {me}: the ranks made different calls at the same place in the order, or brought arrays that do not fit "
        "each other:\n" + "\n".join(lines) + "\n  Every rank must make the same calls in the same order."
    )


class CommunicatorBase:
    """One rank's end of a communicator, without any collective: each family of them inherits this."""

    def __init__(self, transport: Transport, timeout: float, registry: CommunicatorRegistry | None = None) -> None:
        self.transport = transport
        self.registry = CommunicatorRegistry() if registry is None else registry
        self.queue = CallQueue(transport, self._ended)
        self.registry.join(transport.key, self.queue)
        self._host = HostArrays(self)
        self._plans: dict[Hashable, Plan] = {}
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

    def _arrays(self, x: Any) -> Any:
        """What reads and makes the arrays of a call on x: `HostArrays`, or `DeviceArrays` where x lies on a GPU."""
        if type(x) is np.ndarray or not is_device_array(x):
            return self._host
        return self._device(x).arrays()

    def _ended(self) -> None:
        self.registry.leave(self.transport.key)

    def _plan(self, make: Callable[..., Plan], kind: tuple[Any, ...]) -> Plan:
        """The plan of calls of this kind, which starts with `where` of `HostArrays`. make: makes it at the first"""
        try:
            plan = self._plans.get(kind)
        except TypeError:  # an argument that is no number, and no text: `make` says which
            plan = None
        if plan is not None:
            return plan
        plan = make(*kind)
        where = kind[0]
        if where:
            plan = replace(plan, more=f"{plan.more} {where}".lstrip())
        elif plan.layout is not None:
            plan.inline = self.transport.inline_calls(plan, self._steps, self._after_exchange)
        while len(self._plans) >= _KEPT:
            self._plans.pop(next(iter(tuple(self._plans))), None)  # another thread may be as far, too
        self._plans[kind] = plan
        return plan

    def _described(self, plan: Plan, steps: Describe[T]) -> CollectiveOp[T]:
        """A call of a plan that says nothing of its steps."""
        call: CollectiveOp[T] = CollectiveOp(plan, self.timeout)
        call.steps = steps(call)
        return call

    def _run(self, call: CollectiveOp[Any], async_op: bool, ordered: bool = True, awaited: bool = True) -> Any:
        """Carries a call out, or starts it. ordered: after all collectives before it; awaited: as in `submit`"""
        if async_op:
            self.queue.submit(call, ordered, awaited)
            return Work(call)
        return self.queue.run(call, ordered)

    def _steps(self, call: CollectiveOp[Any]) -> Steps[Any]:
        """The steps of a call on host arrays."""
        plan = call.plan
        if callable(call.scale):
            call.ask_scale()
        sent, received = call.arrays.buffers(call)
        payload = as_bytes(sent) if plan.shown and sent is not None else None
        out = None
        if received is not None and plan.reduction is not None and plan.reduction.in_place:  # others may write there
            out = payload if received is sent else as_bytes(received)
        yield self.transport.exchange_signatures(Signature(call.digest, plan.rows), payload, out, plan.prefix)
        yield from self.compare(call)
        return (yield from plan.body(call, self.transport, sent, received))

    def _after_exchange(self, call: CollectiveOp[Any]) -> Steps[Any]:
        """The same from where the ranks have shown each other their signatures."""
        yield from self.compare(call)
        return (yield from call.plan.body(call, self.transport, *call.arrays.buffers(call)))

    def verify(self, call: CollectiveOp[Any]) -> Steps[Signatures | None]:
        """Shows the others what is called here, without an array, and compares it as `compare` does."""
        yield self.transport.exchange_signatures(Signature(call.digest, call.plan.rows), prefix=call.plan.prefix)
        return (yield from self.compare(call))

    def compare(self, call: CollectiveOp[Any]) -> Steps[Signatures | None]:
        """Looks at what the other ranks call, once all have shown it.

        Returns: the signatures of all ranks, None if they were not exchanged
        Raises: MismatchError on every rank if they differ; on the ranks of one node, and the communicator is of no use
        any more, if those of other nodes were not compared with them. What the function given as scale has raised.
        """
        call.signatures = signatures = self.transport.signatures()
        for transport, ranks in self.transport.verified_groups():
            found = transport.signatures()
            if found is not None and differ(found):
                error = yield from self._mismatch(call, transport, ranks)
                if signatures is None and transport is not self.transport:
                    self.queue.break_off(error, lambda: None)  # other nodes know nothing of it, and go on
                raise error from call.failure
        if isinstance(call.failure, ArgumentError):
            # Where ranks are not compared the others go on by now: no ArgumentError, after which this one could.
            raise CollectivesError(f"the function given as scale failed: {call.failure}") from call.failure
        if call.failure is not None:
            raise call.failure
        return signatures

    def _mismatch(self, call: CollectiveOp[Any], transport: Transport, ranks: Sequence[int]) -> Steps[MismatchError]:
        """What these ranks raise, whose transport it is: they have made different calls, and tell each other which."""
        arguments = call.more
        if call.scale is not None and not callable(call.scale):
            arguments = f"{call.more} scale {call.scale!r}"
        texts = (call.name, arguments, call.array, call.site)
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


# s; 30 years. Time limits of the operating system can be neither infinite nor much longer.
_LONGEST_TIMEOUT = 1e9


def check_timeout(timeout: Any) -> float:
    """A time limit in seconds; infinity becomes 30 years. Raises: ArgumentError if it is no number above 0."""
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ArgumentError(f"timeout should be seconds above 0, is {timeout!r}")
    return min(timeout, _LONGEST_TIMEOUT)
