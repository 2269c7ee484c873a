"""Collectives that combine values: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays import (
    as_array,
    check_out,
    contiguous,
    flat,
    is_device_array,
    is_plain,
    writable,
)
from collectives.backends.shm import call_cache
from collectives.backends.shm.call_cache import MISS, CallPlan, Start
from collectives.engine.call import CollectiveOp
from collectives.engine.communicator_base import CommunicatorBase, Scale
from collectives.engine.verify import signature_hash
from collectives.errors import ArgumentError, CollectivesError
from collectives.lengths import split_rows
from collectives.reduction import Array, ReduceOp, check_scale, finish, wire_dtype, wire_op
from collectives.transport import Finish, Signature, Steps, Test, then


class Reductions(CommunicatorBase):
    """The reductions of a communicator."""

    def all_reduce(
        self, x: Any, op: ReduceOp | str = ReduceOp.SUM, *, scale: Scale = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """The reduction of all ranks' x, on every rank.

        x: (...), the same shape and dtype on every rank
        op: what `ReduceOp` has; a mean of integers is rounded toward zero
        scale: the result is multiplied by it; a function is called when all earlier calls of this communicator are
        complete, so that it may depend on one of them
        out: (...) of x's dtype; `out=x` reduces in place
        Returns: (...) of x's dtype, a NumPy array whatever x is; or `out` itself
        Raises: DtypeError if op has no meaning for the dtype; ArgumentError if out does not fit.
        """
        if self._call_cache is not None and not async_op and type(x) is np.ndarray:
            y = self._call_cache.run("all_reduce", x, op, out, scale)
            if y is not MISS:
                return y
        if is_device_array(x):
            return self._device(x).all_reduce(x, op, scale=scale, out=out, async_op=async_op)
        source, given = as_array(x), op
        op = ReduceOp.parse(op)
        wire = wire_dtype(source.dtype, op)
        check_scale(source.dtype, scale)
        target = _target(out, x, source)
        header = Signature(signature_hash("all_reduce", op.value, source.dtype, source.shape))

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent, total = _buffers(source, target, wire)
            wire_in = flat(sent)
            wire_out = wire_in if total is sent else flat(total)
            yield from self.verify(call, header, wire_in, wire_out)
            yield self.transport.all_reduce(wire_in, wire_out, wire_op(op), _finisher(op, self.size, scale))
            total = _deliver(total, target, source.dtype)
            return total if out is None else out

        plan = None
        if source is x:

            def start(x: Array, out: Array | None, scale: float | None) -> tuple[Test, Array]:
                total = np.empty(x.shape, wire) if out is None else out
                sent = flat(x)
                finish = _finisher(op, self.size, scale)
                return self.transport.all_reduce(sent, sent if out is x else flat(total), wire_op(op), finish), total

            plan = _plan(given, wire, source, partial(call_cache.reduced, op=op), start)
        return self._run("all_reduce", source, steps, async_op, op.value, plan)

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
        if self._call_cache is not None and not async_op and type(x) is np.ndarray:
            y = self._call_cache.run("reduce", x, (op, root), out if self.rank == root else None, scale)
            if y is not MISS:
                return y
        root = self._check_root(root)
        if is_device_array(x):
            return self._device(x).reduce(x, op, root, scale=scale, out=out, async_op=async_op)
        source, given = as_array(x), op
        op = ReduceOp.parse(op)
        wire = wire_dtype(source.dtype, op)
        check_scale(source.dtype, scale)
        here = self.rank == root
        target = _target(out, x, source) if here else None
        more = f"{op.value} root {root}"
        header = Signature(signature_hash("reduce", more, source.dtype, source.shape))

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent = _to_wire(source, wire)
            total = None
            if here:
                total = target if target is not None and _takes(target, wire, sent) else np.empty(source.shape, wire)
            finish = _finisher(op, self.size, scale)
            yield from self.verify(call, header, flat(sent))
            yield self.transport.reduce(flat(sent), None if total is None else flat(total), wire_op(op), root, finish)
            if total is None:
                return None
            total = _deliver(total, target, source.dtype)
            return total if out is None else out

        plan = None
        if source is x:

            def start(x: Array, out: Array | None, scale: float | None) -> tuple[Test, Array | None]:
                total = None
                if here:
                    total = np.empty(x.shape, wire) if out is None or out is x else out
                arrived = None if total is None else flat(total)
                finish = _finisher(op, self.size, scale)
                test = self.transport.reduce(flat(x), arrived, wire_op(op), root, finish)
                if out is not x or total is None:
                    return test, total
                return then(test, lambda came: np.copyto(x, came), total), x

            plan = _plan((given, root), wire, source, partial(call_cache.reduced, op=op) if here else None, start)
        return self._run("reduce", source, steps, async_op, more, plan)

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
        if self._call_cache is not None and not async_op and lengths is None and type(x) is np.ndarray:
            y = self._call_cache.run("reduce_scatter", x, op, out, scale)
            if y is not MISS:
                return y
        if is_device_array(x):
            return self._device(x).reduce_scatter(x, op, scale=scale, lengths=lengths, out=out, async_op=async_op)
        source, given = as_array(x), op
        op = ReduceOp.parse(op)
        wire = wire_dtype(source.dtype, op)
        check_scale(source.dtype, scale)
        if source.ndim == 0:
            raise ArgumentError("reduce_scatter splits axis 0, and x is 0-d")
        parts = split_rows(len(source), lengths, self.size)
        shape = (parts[self.rank], *source.shape[1:])
        target = None if out is None else check_out(out, shape, source.dtype)
        more = op.value if lengths is None else f"{op.value} lengths {parts}"
        header = Signature(signature_hash("reduce_scatter", more, source.dtype, source.shape))

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent = _to_wire(source, wire)
            total = target if target is not None and _takes(target, wire, sent) else np.empty(shape, wire)
            width = int(np.prod(source.shape[1:], dtype=np.int64))
            counts = [n * width for n in parts]
            yield from self.verify(call, header, flat(sent))
            finish = _finisher(op, self.size, scale)
            yield self.transport.reduce_scatter(flat(sent), flat(total), counts, wire_op(op), finish)
            total = _deliver(total, target, source.dtype)
            return total if out is None else out

        plan = None
        if source is x and lengths is None:
            first = sum(parts[: self.rank])
            mine = (first, first + parts[self.rank])
            counts = [n * math.prod(source.shape[1:]) for n in parts]

            def start(x: Array, out: Array | None, scale: float | None) -> tuple[Test, Array]:
                total = np.empty(shape, wire) if out is None else out
                finish = _finisher(op, self.size, scale)
                return self.transport.reduce_scatter(flat(x), flat(total), counts, wire_op(op), finish), total

            plan = _plan(given, wire, source, partial(call_cache.reduced, op=op, rows=mine), start)
        return self._run("reduce_scatter", source, steps, async_op, more, plan)


def _to_wire(source: Array, wire: np.dtype[Any]) -> Array:
    if wire == source.dtype:
        return contiguous(source)
    if source.dtype.kind == "b":
        return contiguous(source).view(wire)
    return source.astype(wire, order="C")


def _plan(
    option: Hashable,
    wire: np.dtype[Any],
    source: Array,
    result: Callable[..., call_cache.Result] | None,
    start: Start,
) -> CallPlan:
    dtype, shape = source.dtype, source.shape
    starts = start if wire == dtype else None  # else the way to the wire's dtype and back is what takes time
    if result is None:
        return CallPlan(option, wire, lambda control, signatures: call_cache.no_result(), starts)
    return CallPlan(option, wire, lambda control, signatures: result(control, dtype=dtype, shape=shape), starts)


def _finisher(op: ReduceOp, size: int, scale: Scale) -> Finish | None:
    """What makes of any part of the total the same part of the answer; None if the total is the answer."""
    factor = _ask(scale) if callable(scale) else scale
    if (op is not ReduceOp.MEAN or size == 1) and (factor is None or factor == 1.0):
        return None
    return lambda total: finish(total, op, size, factor)


def _ask(scale: Callable[[], float]) -> float:
    """Raises: CollectivesError if that function returns no number, or raises an error of ours.

    The others may be in the midst of this call by now, so it is no ArgumentError, after which ranks could go on.
    """
    try:
        factor = scale()
        check_scale(np.dtype(np.float64), factor)
    except ArgumentError as error:
        raise CollectivesError(f"the function given as scale failed: {error}") from error
    return factor


def _deliver(total: Array, target: Array | None, dtype: np.dtype[Any]) -> Array:
    if target is total:
        return total
    if target is None:
        return total if total.dtype == dtype else total.astype(dtype)
    np.copyto(target, total, casting="unsafe")  # back from the wire's dtype
    return target


def _target(out: Any, x: Any, source: Array) -> Array | None:
    if out is None:
        return None
    return writable(source, "out") if out is x else check_out(out, source.shape, source.dtype)


def _buffers(source: Array, target: Array | None, wire: np.dtype[Any]) -> tuple[Array, Array]:
    """What a reduction sends, and where its total arrives: the same array for in place."""
    if target is source and wire == source.dtype and is_plain(source):
        return source, source
    sent = _to_wire(source, wire)
    if sent.size and not np.may_share_memory(sent, source):  # without an item x itself may look like a copy
        return sent, sent  # a private copy can take the result as well
    if target is not None and _takes(target, wire, sent):
        return sent, target
    return sent, np.empty(source.shape, wire)


def _takes(target: Array, wire: np.dtype[Any], sent: Array) -> bool:
    """True if the wire's total can arrive in `target` itself."""
    return target.dtype == wire and is_plain(target) and not np.may_share_memory(sent, target)
