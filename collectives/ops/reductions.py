"""Collectives that combine values: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.arrays import as_array, check_out, contiguous, flat, is_device_array, is_plain, writable
from collectives.backends.shm.call_cache import CallPlan, Piece, nothing, reduced
from collectives.engine.call import CollectiveOp
from collectives.engine.communicator_base import CommunicatorBase, Scale
from collectives.errors import ArgumentError, CollectivesError, MismatchError
from collectives.native import astype, copy
from collectives.reduction import HALVES, Array, ReduceOp, Reduction, check_scale, describe, finish, wire_op
from collectives.transport import Finish, Signatures, Steps


class Reductions(CommunicatorBase):
    """The reductions of a communicator."""

    def all_reduce(
        self, x: Any, op: ReduceOp | str = ReduceOp.SUM, *, scale: Scale = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """The reduction of all ranks' x, on every rank.

        x: (...), the same shape and dtype on every rank
        op: what `ReduceOp` has; a mean of integers is rounded toward zero
        scale: the result is multiplied by it: the same number on every rank, or a function that returns it. The
        function is called when all earlier calls of this communicator are complete, so that it may depend on one of
        them. Ranks compare the numbers, except what a function returns for x on a GPU
        out: (...) of x's dtype; `out=x` reduces in place
        Returns: (...) of x's dtype, a NumPy array whatever x is; or `out` itself
        Raises: DtypeError if op has no meaning for the dtype; ArgumentError if out does not fit.
        """
        return self._call(self._reduce, x, ("all_reduce", op), out, scale, async_op)

    def reduce(
        self,
        x: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        root: int = 0,
        *,
        scale: Scale = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """The reduction of all ranks' x, on the root alone.

        x, op, scale, out: as in `all_reduce`; out is used on the root only
        Returns: (...) of x's dtype on the root, None elsewhere
        Raises: as `all_reduce`; ArgumentError if there is no such root.
        """
        out = out if self.rank == root else None
        return self._call(self._reduce, x, ("reduce", op, root), out, scale, async_op)

    def reduce_scatter(
        self,
        x: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        scale: Scale = None,
        lengths: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """The reduction of all ranks' x, of which each rank gets its own rows.

        x: (n, ...), the same shape and dtype on every rank; op, scale: as in `all_reduce`
        lengths: the rows of each rank, the same list on every rank; None: `np.array_split`'s rule, as even as possible,
        longer parts first
        out: (n_r, ...) of x's dtype
        Returns: (n_r, ...) of x's dtype
        Raises: as `all_reduce`; ArgumentError if x is 0-d or lengths do not add up to n.
        """
        return self._call(self._reduce, x, ("reduce_scatter", op, 0, lengths), out, scale, async_op)

    def _reduce(
        self,
        arrays: Any,
        x: Any,
        out: Any,
        scale: Scale,
        name: str,
        op: ReduceOp | str,
        root: int = 0,
        lengths: Sequence[int] | None = None,
    ) -> CollectiveOp[Any]:
        root = self._check_root(root)
        if is_device_array(x):
            return self._device(x).reduce(arrays, name, x, op, scale, out, root, lengths)
        source = as_array(x)
        reduction = describe(name, source, op, scale, root, lengths, self.rank, self.size)
        in_place, shape, dtype = name == "all_reduce", source.shape, source.dtype
        if dtype in HALVES and self.transport.combines_halves:
            reduction = reduction._replace(wire=dtype)
        target = None
        if out is not None and reduction.shape is not None:
            same = out is x and reduction.shape == source.shape
            target = writable(source, "out") if same else check_out(out, reduction.shape, source.dtype)

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent, total = _buffers(source, target, reduction, in_place)
            payload = flat(sent)
            received = None if total is None else payload if total is sent else flat(total)
            failure = _ask(scale, call) if callable(scale) else None
            signature = self.signature(call, source.shape)
            try:
                yield from self.verify(call, signature, payload, received if in_place else None)
            except MismatchError as mismatch:
                raise mismatch from failure
            if failure is not None:
                raise failure
            apply = _finisher(reduction.op, self.size, call.scale)
            yield reduction.start(self.transport, wire_op(reduction.op), payload, received, apply)
            if total is None:
                return None
            total = _deliver(total, target, source.dtype)
            return total if out is None else out

        def plan(signatures: Signatures) -> CallPlan:  # a finished Work holds it, so it must not hold `source`
            if reduction.shape is None:
                return CallPlan(reduction.wire, [], nothing)
            first = last = None
            if reduction.parts:
                first = sum(reduction.parts[: self.rank])
                last = first + reduction.parts[self.rank]
            pieces = [Piece(rank, shape, first, last) for rank in range(self.size)]
            combine = reduced(reduction.op, reduction.wire, dtype, self.size)
            return CallPlan(reduction.wire, pieces, combine)

        call = self._collective(name, source, steps, reduction.text, plan if source is x else None)
        call.scale = reduction.scale
        if callable(scale):
            call.small = False  # its first step asks that function, which may take its time
        return call


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


def _ask(scale: Callable[[], float], call: CollectiveOp[Any]) -> Exception | None:
    """Calls the function given as scale, and sets the call's scale to its result.

    Returns: the exception that it raised, if any. The text of the call says so, too, so that it differs from the call
    of a rank where the function did not fail.
    """
    try:
        call.scale = check_scale(np.dtype(np.float64), scale())
        if call.scale is None:
            raise ArgumentError("it returned no number")
    except Exception as error:
        call.more = f"{call.more} with a scale that failed"
        if not isinstance(error, ArgumentError):
            return error
        # Where ranks are not compared the others reduce by now: no ArgumentError, after which this one could go on.
        failure = CollectivesError(f"the function given as scale failed: {error}")
        failure.__cause__ = error
        return failure
    return None


def _deliver(total: Array, target: Array | None, dtype: np.dtype[Any]) -> Array:
    if target is total:
        return total
    if target is None:
        return total if total.dtype == dtype else astype(total, dtype)
    copy(target, total)  # back from the wire's dtype
    return target


def _buffers(source: Array, target: Array | None, reduction: Reduction, in_place: bool) -> tuple[Array, Array | None]:
    """What a reduction sends, and where its total arrives: the same array for in place; None if it does not."""
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
