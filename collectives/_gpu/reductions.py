"""Reductions of arrays on a GPU: in the dtype that `collectives.reduction` says, cast on the communication stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives._gpu.carrier import Carrier, Rest
from collectives._gpu.door import Desk, overlap
from collectives._gpu.passage import Passage
from collectives.arrays import flat
from collectives.engine.call import Steps
from collectives.engine.verify import Signatures
from collectives.errors import ArgumentError
from collectives.lengths import split_rows
from collectives.ops.base import Scale
from collectives.reduction import ReduceOp, check_scale, finish, wire_dtype


class DeviceReductions(Desk):
    """all_reduce, reduce and reduce_scatter, with the arguments that `Communicator` documents."""

    def all_reduce(
        self, x: Any, op: ReduceOp | str, *, scale: Scale = None, out: Any = None, async_op: bool = False
    ) -> Any:
        source = self._array(x)
        op, wire = _agreed(source, op, scale)
        passage = self._passage(source)
        result = self._result(out, x, source, source.shape, passage)

        def body(carrier: Carrier, _: Signatures | None) -> Steps[Any]:
            factor = self._factor(scale, carrier)
            sent = self._to_wire(source, wire, carrier, passage)
            # In place, or in a private copy, which can take the result as well; else apart.
            total = sent if result is source or sent is not source else self._total(result, sent, carrier, passage)
            rest = yield from carrier.all_reduce(flat(sent), flat(total), op, factor)
            return self._deliver(total, result, out, rest, carrier, passage)

        return self._run("all_reduce", source, passage, body, async_op, op.value, source.shape)

    def reduce(
        self, x: Any, op: ReduceOp | str, root: int, *, scale: Scale = None, out: Any = None, async_op: bool = False
    ) -> Any:
        source = self._array(x)
        op, wire = _agreed(source, op, scale)
        passage = self._passage(source)
        result = self._result(out, x, source, source.shape, passage) if self.rank == root else None

        def body(carrier: Carrier, _: Signatures | None) -> Steps[Any]:
            factor = self._factor(scale, carrier)
            sent = self._to_wire(source, wire, carrier, passage)
            total = None if result is None else self._total(result, sent, carrier, passage)
            rest = yield from carrier.reduce(flat(sent), None if total is None else flat(total), op, factor, root)
            return None if total is None else self._deliver(total, result, out, rest, carrier, passage)

        return self._run("reduce", source, passage, body, async_op, f"{op.value} root {root}", source.shape)

    def reduce_scatter(
        self,
        x: Any,
        op: ReduceOp | str,
        *,
        scale: Scale = None,
        lengths: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        source = self._array(x)
        op, wire = _agreed(source, op, scale)
        if source.ndim == 0:
            raise ArgumentError("reduce_scatter splits axis 0, and x is 0-d")
        parts = split_rows(len(source), lengths, self.size)
        passage = self._passage(source)
        result = self._result(out, None, source, (parts[self.rank], *source.shape[1:]), passage)
        width = source.size // max(len(source), 1)

        def body(carrier: Carrier, _: Signatures | None) -> Steps[Any]:
            factor = self._factor(scale, carrier)
            sent = self._to_wire(source, wire, carrier, passage)
            total = self._total(result, sent, carrier, passage)
            counts = [rows * width for rows in parts]
            rest = yield from carrier.reduce_scatter(flat(sent), flat(total), counts, op, factor)
            return self._deliver(total, result, out, rest, carrier, passage)

        more = op.value if lengths is None else f"{op.value} lengths {parts}"
        return self._run("reduce_scatter", source, passage, body, async_op, more, source.shape)

    def _result(self, out: Any, x: Any, source: Any, shape: tuple[int, ...], passage: Passage) -> Any:
        if out is None:
            return passage.room(shape, source.dtype)
        result = source if out is x else self._out(out, shape, source.dtype)
        passage.keep(result)
        return result

    def _factor(self, scale: Scale, carrier: Carrier) -> Any:
        """The scale, asked for when the sum is about to be launched: what it depends on stands before it by then."""
        if not callable(scale):
            return scale
        with self._cuda.on(carrier.stream):
            factor = scale()
        if not isinstance(factor, self._cuda.xp.ndarray):
            return factor
        if factor.ndim:
            raise ArgumentError(f"scale should be a number or a 0-d array, its shape is {factor.shape}")
        return factor

    def _to_wire(self, source: Any, wire: Any, carrier: Carrier, passage: Passage) -> Any:
        """source itself, or a contiguous copy of it in the wire's dtype, on the carrier's stream."""
        if wire == source.dtype and source.flags.c_contiguous:
            return source
        sent = self._scratch(source.shape, wire, carrier, passage)
        self._copy(sent, source, carrier)
        return sent

    def _total(self, result: Any, sent: Any, carrier: Carrier, passage: Passage) -> Any:
        """Where the wire's result arrives: in the answer itself if it can be there at once."""
        if result.dtype == sent.dtype and result.flags.c_contiguous and not overlap(result, sent):
            return result
        return self._scratch(result.shape, sent.dtype, carrier, passage)

    def _deliver(self, total: Any, result: Any, out: Any, rest: Rest, carrier: Carrier, passage: Passage) -> Any:
        passage.keep(*rest.made)
        with self._cuda.on(carrier.stream):
            if isinstance(rest.factor, self._cuda.xp.ndarray):
                finish(total, rest.op, self.size, None)
                self._cuda.xp.multiply(total, rest.factor.astype(total.dtype), out=total)
            else:
                finish(total, rest.op, self.size, rest.factor)
        if total is not result:
            self._copy(result, total, carrier)
        return result if out is None else out


def _agreed(source: Any, op: ReduceOp | str, scale: Scale) -> tuple[ReduceOp, Any]:
    parsed = ReduceOp.parse(op)
    check_scale(source.dtype, scale)
    return parsed, wire_dtype(source.dtype, parsed)
