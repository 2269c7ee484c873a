"""What every collective shares: the ranks it runs among, the comparison of their calls, and the way to the queue.

Before data moves the ranks show each other what they are about to call: a wrong call is an error, never a hang. A
header is a line of int64 words. One of them is a hash of all that must be the same on every rank (the collective, its
op, root and scale, dtype and shape; the length along axis 0 only where it may not differ), so comparing costs one look
a rank.
Where they differ the ranks tell each other in words what they called, and each raises the same table.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from collectives.arrays import as_array, as_bytes, check_out, contiguous, is_device_array, writable
from collectives.engine.call import MISS, CollectiveOp, Work
from collectives.engine.queue import CallQueue, CommunicatorRegistry
from collectives.errors import ArgumentError, MismatchError
from collectives.reduction import Array, scale_bits
from collectives.transport import Signature, Signatures, Steps, Test, Transport, differ, gather_records, spans

T = TypeVar("T")
Scale = float | Callable[[], float] | None
#: What a call does, step by step.
Describe = Callable[[CollectiveOp[T]], Steps[T]]
#: How a collective moves arrays: on a transport of the host or a GPU, what this rank sends; and all signatures.
Body = Callable[[Any, Any, Signatures | None], Steps[Any]]
#: Makes a `CallPlan` of all ranks' signatures.
Plan = Callable[[Signatures], Any]

#: Characters of each text of a call, in the table.
LONGEST = 200


@functools.lru_cache(maxsize=4096)
def signature_hash(name: str, more: str, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> int:
    """A hash, the same in every process, of what ranks must agree on; 63 bits."""
    text = repr((name, more, None if dtype is None else (dtype.str, dtype.name), shape))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


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
        self._call_cache = transport.call_cache(self.queue)
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
        return self._device(x).arrays() if is_device_array(x) else HostArrays(self)

    def _ended(self) -> None:
        self.registry.leave(self.transport.key)

    def _collective(
        self, name: str, x: Array | None, steps: Describe[Any], more: str = "", plan: Plan | None = None
    ) -> CollectiveOp[Any]:
        """A call of this communicator. plan: makes the plan by which the call cache carries out the next one"""
        call: CollectiveOp[Any] = CollectiveOp(name, x, more, self.timeout)
        call.steps, call.plan = steps(call), plan
        return call

    def _run(self, call: CollectiveOp[Any], async_op: bool) -> Any:
        """Carries a call out, or starts it."""
        if async_op:
            self.queue.submit(call)
            return Work(call)
        return self.queue.run(call)

    def _call(
        self,
        describe: Callable[..., CollectiveOp[Any]],
        x: Any,
        option: tuple[Any, ...],
        out: Any = None,
        scale: Any = None,
        async_op: bool = False,
        like: Any = None,
    ) -> Any:
        """Carries out, or starts, the collective that the caller's caller asks for.

        describe: makes the call of arrays, x, out, scale and `option`: name, op, root and the like
        like: an array that says whether the call's arrays are on a GPU, where x does not
        """
        cache = None if async_op else self._call_cache
        if cache is None:
            arrays = self._arrays(x if like is None else like)
            return arrays.run(describe(arrays, x, out, scale, *option), async_op)
        frame = sys._getframe(2)
        result = cache.run(frame, option, x, out, scale)
        if result is MISS:
            arrays = self._arrays(x if like is None else like)
            call = describe(arrays, x, out, scale, *option)
            result = arrays.run(call, False)
            cache.learn(frame, option, call, lambda *again: describe(HostArrays(self), *again, *option))
        return result

    def signature(self, call: CollectiveOp[Any], shape: tuple[int, ...] | None = None, rows: int = 0) -> Signature:
        """What the ranks compare: name, arguments and scale, and with a shape the dtype and that shape."""
        dtype = None if shape is None else call.dtype
        return Signature(signature_hash(call.name, call.more, dtype, shape) ^ scale_bits(call.scale), rows)

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
        arguments = call.more if call.scale is None else f"{call.more} scale {call.scale!r}"
        texts = (call.name, arguments, call.array, call.site)
        calls = yield from gather_records(transport, [text[:LONGEST] for text in texts])
        return MismatchError(table(calls, ranks, self.rank, call.number))

    def _check_root(self, root: Any) -> int:
        """The root as a plain number. Raises: ArgumentError if there is no such rank."""
        return whole(root, 0, self.size - 1, "root should be a rank")


class HostArrays:
    """The arrays of one call on the host: how they are read, made, shown to the other ranks and handed out.

    `DeviceArrays` is the same for arrays on a GPU, so that a collective is described once for both.
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm

    def read(self, x: Any, what: str = "x", written: bool = False) -> Array:
        """x as an array that shares its memory. Raises: ArgumentError if it cannot be read, or written where it is."""
        array = as_array(x, what)
        return writable(array, what) if written else array

    def result(self, shape: tuple[int, ...], dtype: np.dtype[Any], source: Array | None, target: Array | None) -> Array:
        """Where a result arrives: in `target` if it can be there at once, which must not be the memory of `source`."""
        if target is None or target.shape != shape or target.dtype != dtype:
            return np.empty(shape, dtype)
        overlaps = source is not None and np.may_share_memory(target, source)
        return (
            target if target.flags.c_contiguous and target.flags.writeable and not overlaps else np.empty(shape, dtype)
        )

    def complete(self, operation: Test) -> Steps[None]:
        """Waits for an operation of the transport."""
        yield operation

    def copy(self, target: Array, source: Array) -> None:
        """target = source"""
        np.copyto(target, source)

    def deliver(self, whole: Array, target: Array | None, out: Any) -> Any:
        """The result: what arrived, or `out` as the caller gave it, whose array is `target`."""
        if target is None:
            return whole
        if target is not whole:
            np.copyto(check_out(target, whole.shape, whole.dtype), whole)
        return out

    def call(
        self,
        name: str,
        source: Array | None,
        body: Body,
        more: str,
        *,
        shape: tuple[int, ...] | None = None,
        rows: int = 0,
        shown: bool = True,
        prefix: Array | None = None,
        plan: Plan | None = None,
    ) -> CollectiveOp[Any]:
        """A call whose `body` moves what it gets of `source` once the ranks have compared it.

        shape: what the ranks must agree on, with the dtype; rows: the length along axis 0
        shown: the others may read `source` as soon as this rank has come; prefix: what they are shown before it
        """

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent = None if source is None else contiguous(source)
            payload = None if sent is None or not shown else as_bytes(sent)
            signature = self._comm.signature(call, shape, rows)
            signatures = yield from self._comm.verify(call, signature, payload, prefix=prefix)
            return (yield from body(self._comm.transport, sent, signatures))

        return self._comm._collective(name, source, steps, more, plan)

    def run(self, call: CollectiveOp[Any], async_op: bool) -> Any:
        """Carries a call out, or starts it."""
        return self._comm._run(call, async_op)


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
