"""The arrays of calls on the host: reads and makes them, converts them for sending, and returns them to the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays import as_array, check_out, contiguous, flat, is_plain, writable
from collectives.engine.call import CollectiveOp, Plan, Work
from collectives.native import astype, copy
from collectives.reduction import COMBINE, Array, ReduceOp, Reduction, combine_in_tree, divide_and_scale, wire_op
from collectives.transport import Epilogue, Steps, Test

if TYPE_CHECKING:
    from collectives.engine.communicator_base import CommunicatorBase


class HostArrays:
    """Reads, makes and delivers the arrays of calls on the host.

    `DeviceArrays` does the same for arrays on a GPU, so that a collective is described once for both.

    device_text: what plans and reports say about the arrays in addition to dtype and shape
    """

    device_text = ""

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm

    read = staticmethod(as_array)
    check_writable = staticmethod(writable)
    scratch = staticmethod(np.empty)

    def result(self, shape: tuple[int, ...], dtype: np.dtype[Any], source: Array | None, target: Array | None) -> Array:
        """Memory for a result: `target` if it fits and does not overlap `source`, otherwise a new array."""
        if target is None or target.shape != shape or target.dtype != dtype:
            return np.empty(shape, dtype)
        overlaps = source is not None and np.may_share_memory(target, source)
        if target.flags.c_contiguous and target.flags.writeable and not overlaps:
            return target
        return np.empty(shape, dtype)

    def complete(self, operation: Test) -> Steps[None]:
        """Waits for an operation of the transport."""
        yield operation

    def copy(self, target: Array, source: Array) -> None:
        """Copies source into target."""
        np.copyto(target, source)

    def deliver(self, received: Array, target: Array | None, out: Any) -> Any:
        """Returns a call's result: `received` if `target` is None.

        Otherwise copies `received` into `target`, which is the array of `out`, and returns `out`.
        Raises: ArgumentError if `target` has another shape or dtype, or is read-only.
        """
        if target is None:
            return received
        if target is not received:
            np.copyto(check_out(target, received.shape, received.dtype), received)
        return out

    def preallocate(self, shape: tuple[int, ...], dtype: Any, source: Array | None, target: Array | None) -> None:
        """Does nothing. Only arrays on a GPU are allocated in the caller's thread, before the call."""
        return

    def reduction_target(self, plan: Plan, source: Array, out: Any, in_place: bool) -> Array | None:
        """`out` as an array; None without `out`, or without a result. Raises: ArgumentError if `out` does not fit."""
        if out is None or plan.result is None:
            return None
        array = source if in_place else as_array(out, "out")
        # The common case is checked here, because calling `check_out` would take as long as this whole method.
        if array.shape == plan.result and array.dtype == source.dtype and array.flags.writeable:
            return array
        return check_out(array, plan.result, source.dtype)

    def buffers(self, call: CollectiveOp[Any]) -> tuple[Array | None, Array | None]:
        """The array that a call sends, C-contiguous; and memory for a reduction's total, None without a total."""
        reduction = call.plan.reduction
        if reduction is not None:
            return _buffers(call.source, call.target, reduction)
        return None if call.source is None else contiguous(call.source), None

    def reduce(
        self, call: CollectiveOp[Any], reduction: Reduction, transport: Any, sent: Array, total: Array | None
    ) -> Steps[Any]:
        """The steps of a reduction after the ranks have compared it. sent, total: from `buffers`"""
        payload = flat(sent)
        received = None
        if total is not None:
            received = payload if total is sent else flat(total)
        epilogue = _epilogue(reduction.op, self._comm.size, call.scale)
        op = wire_op(reduction.op)

        def combine(parts: Array) -> None:
            combine_in_tree(list(parts), COMBINE[op], parts[0])
            if epilogue is not None:
                epilogue(parts[0])

        if reduction.in_tree and self._comm.size > 2 and not transport.combines_in_tree:
            yield from reduction.start_in_parts(self, self._comm, transport, payload, received, combine)
        else:
            operation = reduction.start(transport, op, payload, received, epilogue)
            call.posted = call.plan.beside
            yield operation
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
        preallocated: None = None,
        timeout: float | None = None,
    ) -> Any:
        """Runs a call; with `async_op`, starts it. preallocated: unused; timeout: s; None: the communicator's"""
        comm = self._comm
        call: CollectiveOp[Any] = CollectiveOp(plan, timeout or comm.timeout, self, source, target, out, scale)
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


def _epilogue(op: ReduceOp, size: int, scale: float | None) -> Epilogue | None:
    """The function that divides and scales any slice of the total; None if there is nothing to do."""
    if (op is not ReduceOp.MEAN or size == 1) and (scale is None or scale == 1.0):
        return None
    return lambda total: divide_and_scale(total, op, size, scale)


def _deliver(total: Array, target: Array | None, dtype: np.dtype[Any]) -> Array:
    if target is total:
        return total
    if target is None:
        return total if total.dtype == dtype else astype(total, dtype)
    copy(target, total)  # Converts back from the wire dtype.
    return target


def _buffers(source: Array, target: Array | None, reduction: Reduction) -> tuple[Array, Array | None]:
    """The array that a reduction sends, and memory for its total, maybe the same array; None without a total."""
    in_place = reduction.in_place
    if in_place and target is source and reduction.wire == source.dtype and is_plain(source):
        return source, source
    sent = _to_wire(source, reduction.wire)
    if in_place and sent.size and not np.may_share_memory(sent, source):  # Empty arrays never share memory.
        return sent, sent  # A private copy can also receive the total.
    if reduction.shape is None:
        return sent, None
    fits = target is not None and target.dtype == reduction.wire and is_plain(target)
    if fits and not np.may_share_memory(sent, target):
        return sent, target
    return sent, np.empty(reduction.shape, reduction.wire)
