"""What all collectives share: the ranks, the comparison of their calls, and the way to the queue.

Before ranks use each other's data, they show each other signatures of their calls, so that a wrong call is an error and
not a hang. Ranks on different nodes may do so only for the first calls of a communicator.

A signature consists of int64 words. One of them is a hash of all that must be the same on every rank: the collective,
its op, root and scale, and, except for scatter, the dtype and the shape (without the length along axis 0 if that may
differ). So comparing costs one check per rank. If hashes differ, the ranks send each other a description of their
calls, and each raises an error with the same table.
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
from collectives.engine.queue import RECOVERABLE, CallQueue
from collectives.engine.registry import CommunicatorRegistry
from collectives.errors import ArgumentError, CollectivesError, MismatchError, align_columns, format_ranks
from collectives.transport import Signature, Signatures, Steps, Transport, differ, gather_records

T = TypeVar("T")
Scale = float | Callable[[], float] | None
#: Returns the steps of a call.
MakeSteps = Callable[[CollectiveOp[T]], Steps[T]]
# Maximum number of plans that a communicator keeps; the oldest plan is dropped first. Without a limit, shapes that
# change with every call would take more and more memory.
_MAX_PLANS = 4096

#: Maximum length of each text that describes a call in the table of a MismatchError.
MAX_TEXT = 200


def table(calls: Sequence[Sequence[str]], ranks: Sequence[int], me: int, number: int) -> str:
    """The text of a MismatchError: one line per different call, with the ranks that made it.

    calls: name, other arguments, array and site of each rank's call; ranks: the numbers of these ranks
    me: the rank that raises the error; number: the call's number on the communicator
    """
    ranks_by_call: dict[tuple[str, ...], list[int]] = {}
    for rank, texts in zip(ranks, calls, strict=True):
        ranks_by_call.setdefault(tuple(texts), []).append(rank)
    rows = [("rank", "call", "with", "array", "at")]
    for (name, more, array, site), callers in ranks_by_call.items():
        rows.append((format_ranks(callers), f"{name} #{number}", more or "-", array or "-", site))
    lines = "\n  ".join(align_columns(rows))
    return (
        f"rank {me}: the ranks made different calls at the same place in the order, or brought arrays that do not fit "
        f"each other:\n  {lines}\n  Every rank must make the same calls in the same order."
    )


class CommunicatorBase:
    """One rank's end of a communicator, without collectives. Each class of collectives inherits from it."""

    def __init__(self, transport: Transport, timeout: float, registry: CommunicatorRegistry | None = None) -> None:
        self.transport = transport
        self.registry = CommunicatorRegistry() if registry is None else registry
        self.queue = CallQueue(transport, self._on_closed)
        self.registry.join(transport.key, self.queue)
        self._host = HostArrays(self)
        self._plans: dict[Hashable, Plan] = {}
        self.timeout = timeout
        self.rank = transport.rank
        self.size = transport.size
        self.local_rank = transport.local_rank
        self.local_size = transport.local_size
        self.node = transport.node
        self.backend = self.registry.requested or transport.name

    def _device(self, x: Any) -> Any:
        """The part of this communicator for arrays on x's GPU. `Communicator` implements it."""
        raise NotImplementedError

    def _arrays(self, x: Any) -> Any:
        """Returns the object that handles the arrays of a call on x: a `HostArrays`, or a `DeviceArrays` on a GPU."""
        if type(x) is np.ndarray or not is_device_array(x):
            return self._host
        return self._device(x).arrays()

    def _on_closed(self) -> None:
        self.registry.leave(self.transport.key)

    def _plan(self, make: Callable[..., Plan], key: tuple[Any, ...]) -> Plan:
        """The plan of calls with this key; `make(*key)` makes it if none is kept. key: begins with `device_text`"""
        try:
            plan = self._plans.get(key)
        except TypeError:  # An argument is not hashable, so it is invalid; `make` raises the right error.
            plan = None
        if plan is not None:
            return plan
        plan = make(*key)
        device_text = key[0]
        if device_text:
            plan = replace(plan, more=f"{plan.more} {device_text}".lstrip())
        elif plan.layout is not None:
            plan.inline = self.transport.inline_calls(plan, self._steps, self._after_exchange)
        while len(self._plans) >= _MAX_PLANS:
            self._plans.pop(next(iter(tuple(self._plans))), None)  # Another thread may remove the same one.
        self._plans[key] = plan
        return plan

    def _new_call(self, plan: Plan, steps: MakeSteps[T]) -> CollectiveOp[T]:
        """A call with its own steps, for a plan without a body."""
        call: CollectiveOp[T] = CollectiveOp(plan, self.timeout)
        call.steps = steps(call)
        return call

    def _run(self, call: CollectiveOp[Any], async_op: bool, ordered: bool = True, awaited: bool = True) -> Any:
        """Runs a call; with `async_op`, starts it. ordered: after all earlier collectives; awaited: as in `submit`"""
        if async_op:
            self.queue.submit(call, ordered, awaited)
            return Work(call)
        return self.queue.run(call, ordered)

    def _steps(self, call: CollectiveOp[Any]) -> Steps[Any]:
        """The steps of a call on host arrays."""
        plan = call.plan
        if callable(call.scale):
            call.compute_scale()
        sent, received = call.arrays.buffers(call)
        payload = as_bytes(sent) if plan.shown and sent is not None else None
        out = None
        # In an all_reduce, other ranks may write into the result's memory.
        if received is not None and plan.reduction is not None and plan.reduction.in_place:
            out = payload if received is sent else as_bytes(received)
        yield self.transport.exchange_signatures(Signature(call.digest, plan.checksum), payload, out, plan.prefix)
        yield from self.compare(call)
        return (yield from plan.body(call, self.transport, sent, received))

    def _after_exchange(self, call: CollectiveOp[Any]) -> Steps[Any]:
        """The steps of a call on host arrays, after the exchange of signatures."""
        yield from self.compare(call)
        return (yield from call.plan.body(call, self.transport, *call.arrays.buffers(call)))

    def verify(self, call: CollectiveOp[Any]) -> Steps[Signatures | None]:
        """Shows the others this call, without an array, and compares it as `compare` does."""
        yield self.transport.exchange_signatures(Signature(call.digest, call.plan.checksum), prefix=call.plan.prefix)
        return (yield from self.compare(call))

    def compare(self, call: CollectiveOp[Any]) -> Steps[Signatures | None]:
        """Compares the calls of all ranks, once all have shown them.

        Returns: the signatures of all ranks, None if they were not exchanged
        Raises: MismatchError on every rank if the calls differ. If only the ranks of a node compared their calls, only
        these ranks raise it, and the communicator is broken. Also raises the exception of a failed scale function; a
        CollectivesError instead, if that exception is one of `RECOVERABLE`.
        """
        call.signatures = signatures = self.transport.signatures()
        for transport, ranks in self.transport.verified_groups():
            group_signatures = transport.signatures()
            if group_signatures is not None and differ(group_signatures):
                error = yield from self._mismatch(call, transport, ranks)
                if signatures is None and transport is not self.transport:
                    # The ranks of other nodes do not raise it, and continue.
                    self.queue.abort(error)
                raise error from call.failure
        if isinstance(call.failure, RECOVERABLE):
            # If ranks did not compare this call, the others have continued. So the queue must not go on.
            raise CollectivesError(f"the function given as scale failed: {call.failure}") from call.failure
        if call.failure is not None:
            raise call.failure
        return signatures

    def _mismatch(self, call: CollectiveOp[Any], transport: Transport, ranks: Sequence[int]) -> Steps[MismatchError]:
        """The error for the ranks of `transport`, whose calls differ. They exchange descriptions of their calls."""
        arguments = call.more
        if call.scale is not None and not callable(call.scale):
            arguments = f"{call.more} scale {call.scale!r}"
        texts = (call.name, arguments, call.array, call.site)
        calls = yield from gather_records(transport, [text[:MAX_TEXT] for text in texts])
        return MismatchError(table(calls, ranks, self.rank, call.number))

    def _check_root(self, root: Any) -> int:
        """The root as a Python int. Raises: ArgumentError if there is no such rank."""
        return check_int(root, 0, self.size - 1, "root should be a rank")


def check_int(number: Any, least: int, most: int, requirement: str) -> int:
    """An integer of any type, also NumPy's, as a Python int. Raises: ArgumentError if invalid or out of bounds."""
    if type(number) is int and least <= number <= most:
        return number
    try:
        plain = operator.index(number)
    except TypeError:
        plain = least - 1
    if not least <= plain <= most:
        raise ArgumentError(f"{requirement} from {least} to {most}, is {number!r}")
    return int(plain)


# The longest time limit (s), 30 years. The operating system accepts neither infinite nor much longer ones.
_LONGEST_TIMEOUT = 1e9


def check_timeout(timeout: Any) -> float:
    """Returns a time limit (s), lowered to 30 years if longer. Raises: ArgumentError if it is no number above 0."""
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ArgumentError(f"timeout should be seconds above 0, is {timeout!r}")
    return min(timeout, _LONGEST_TIMEOUT)
