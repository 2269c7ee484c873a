"""The arrays of calls on the host: how they are read, made, converted for the wire, and handed out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays import as_array, check_out, contiguous, flat, is_plain, writable
from collectives.engine.call import CollectiveOp, Plan, Work
from collectives.native import astype, copy
from collectives.reduction import COMBINE, Array, ReduceOp, Reduction, combine_in_tree, finish, wire_op
from collectives.transport import Finish, Steps, Test

if TYPE_CHECKING:
    from collectives.engine.communicator_base import CommunicatorBase


class HostArrays:
    """What reads, makes and hands out the arrays of calls.

    `DeviceArrays` is the same for arrays on a GPU, so that a collective is described once for both.

    where: what plans and reports say of the arrays beside dtype and shape
    """

    where = ""

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm

    read = staticmethod(as_array)
    check_writable = staticmethod(writable)
    scratch = staticmethod(np.empty)

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

    def early(self, shape: tuple[int, ...], dtype: Any, source: Array | None, target: Array | None) -> None:
        """On the host a result's memory is made when it is needed, on a GPU in the caller's thread."""
        return

    def reduction_target(self, plan: Plan, source: Array, out: Any, in_place: bool) -> Array | None:
        """`out` as an array, or None. Raises: ArgumentError if the result does not fit."""
        if out is None or plan.result is None:
            return None
        array = source if in_place else as_array(out, "out")
        # Looked at here, since a call of `check_out` takes as long as all of this.
        if array.shape == plan.result and array.dtype == source.dtype and array.flags.writeable:
            return array
        return check_out(array, plan.result, source.dtype)

    def buffers(self, call: CollectiveOp[Any]) -> tuple[Array | None, Array | None]:
        """What a call sends, C-contiguous, and for reductions where the total arrives on the ranks that get it."""
        reduction = call.plan.reduction
        if reduction is not None:
            return _buffers(call.source, call.target, reduction)
        return None if call.source is None else contiguous(call.source), None

    def reduce(
        self, call: CollectiveOp[Any], reduction: Reduction, transport: Any, sent: Array, total: Array | None
    ) -> Steps[Any]:
        """The steps of a reduction once the ranks have compared it. sent, total: of `buffers`"""
        payload = flat(sent)
        received = None
        if total is not None:
            received = payload if total is sent else flat(total)
        apply = _finisher(reduction.op, self._comm.size, call.scale)
        op = wire_op(reduction.op)

        def combine(parts: Array) -> None:
            combine_in_tree(list(parts), COMBINE[op], parts[0])
            if apply is not None:
                apply(parts[0])

        if reduction.in_tree and self._comm.size > 2 and not transport.combines_in_tree:
            yield from reduction.start_in_parts(self, self._comm, transport, payload, received, combine)
        else:
            yield reduction.start(transport, op, payload, received, apply)
        if total is None:
            return None
        total = _deliver(total, call.target, call.plan.dtype)
        return total if call.out is None else call.out

    def start(
        self,
        plan: Plan,
        source: Array | None,
        target: Array | None = None,
        out: Any = None,
        async_op: bool = False,
        scale: Any = None,
        early: None = None,
    ) -> Any:
        """Carries a call out, or starts it. early: what `early` has made"""
        comm = self._comm
        call: CollectiveOp[Any] = CollectiveOp(plan, comm.timeout, self, source, target, out, scale)
        if plan.inline is None:
            call.steps = comm._steps(call)
        if async_op:
            comm.queue.submit(call)
            return Work(call)
        return comm.queue.run(call)


def _to_wire(source: Array, wire: np.dtype[Any]) -> Array:
    if wire == source.dtype:
        return contiguous(source)
    if source.dtype.kind == "b":
        return contiguous(source).view(wire)
    return astype(source, wire, "C")


def _finisher(op: ReduceOp, size: int, scale: float | None) -> Finish | None:
    """What makes of any part of the total the same part of the answer; None if the total is the answer."""
    if (op is not ReduceOp.MEAN or size == 1) and (scale is None or scale == 1.0):
        return None
    return lambda total: finish(total, op, size, scale)


def _deliver(total: Array, target: Array | None, dtype: np.dtype[Any]) -> Array:
    if target is total:
        return total
    if target is None:
        return total if total.dtype == dtype else astype(total, dtype)
    copy(target, total)  # back from the wire's dtype
    return target


def _buffers(source: Array, target: Array | None, reduction: Reduction) -> tuple[Array, Array | None]:
    """What a reduction sends, and where its total arrives: the same array for in place; None if it does not."""
    in_place = reduction.in_place
    if in_place and target is source and reduction.wire == source.dtype and is_plain(source):
        return source, source
    sent = _to_wire(source, reduction.wire)
    if in_place and sent.size and not np.may_share_memory(sent, source):  # without an item x may look like a copy
        return sent, sent  # a private copy can take the result as well
    if reduction.shape is None:
        return sent, None
    fits = target is not None and target.dtype == reduction.wire and is_plain(target)
    if fits and not np.may_share_memory(sent, target):
        return sent, target
    return sent, np.empty(reduction.shape, reduction.wire)
