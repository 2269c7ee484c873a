"""Reductions of arrays on a GPU: in the dtype that `collectives.reduction` says, cast on the communication stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives.arrays import flat
from collectives.backends.device.device_base import DeviceBase, overlap
from collectives.backends.device.device_transport import DeviceTransport, Remainder
from collectives.backends.device.stream_handoff import StreamHandoff
from collectives.engine.communicator_base import Scale
from collectives.errors import ArgumentError
from collectives.lengths import split_rows
from collectives.reduction import ReduceOp, check_scale, finish, wire_dtype
from collectives.transport import Signatures, Steps

#: Puts a reduction of (n,) on the transport's stream: transport, what is sent, where the total arrives, factor.
Start = Callable[[DeviceTransport, Any, Any, Any], Steps[Remainder]]


class DeviceReductions(DeviceBase):
    """all_reduce, reduce and reduce_scatter, with the arguments that `Communicator` documents."""

    def all_reduce(
        self, x: Any, op: ReduceOp | str, *, scale: Scale = None, out: Any = None, async_op: bool = False
    ) -> Any:
        source, op = self._cuda.as_array(x), ReduceOp.parse(op)

        def start(transport: DeviceTransport, sent: Any, total: Any, factor: Any) -> Steps[Remainder]:
            return transport.all_reduce(sent, total, op, factor)

        return self._reduce("all_reduce", x, source, source.shape, op, scale, out, async_op, op.value, start)

    def reduce(
        self, x: Any, op: ReduceOp | str, root: int, *, scale: Scale = None, out: Any = None, async_op: bool = False
    ) -> Any:
        source, op = self._cuda.as_array(x), ReduceOp.parse(op)

        def start(transport: DeviceTransport, sent: Any, total: Any, factor: Any) -> Steps[Remainder]:
            return transport.reduce(sent, total, op, factor, root)

        shape = source.shape if self.rank == root else None
        return self._reduce("reduce", x, source, shape, op, scale, out, async_op, f"{op.value} root {root}", start)

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
        source, op = self._cuda.as_array(x), ReduceOp.parse(op)
        if source.ndim == 0:
            raise ArgumentError("reduce_scatter splits axis 0, and x is 0-d")
        parts = split_rows(len(source), lengths, self.size)
        counts = [rows * (source.size // max(len(source), 1)) for rows in parts]

        def start(transport: DeviceTransport, sent: Any, total: Any, factor: Any) -> Steps[Remainder]:
            return transport.reduce_scatter(sent, total, counts, op, factor)

        shape = (parts[self.rank], *source.shape[1:])
        more = op.value if lengths is None else f"{op.value} lengths {parts}"
        return self._reduce("reduce_scatter", None, source, shape, op, scale, out, async_op, more, start)

    def _reduce(
        self,
        name: str,
        x: Any,
        source: Any,
        shape: tuple[int, ...] | None,
        op: ReduceOp,
        scale: Scale,
        out: Any,
        async_op: bool,
        more: str,
        start: Start,
    ) -> Any:
        """x: what may be `out` itself; shape: of this rank's result, None if it gets none."""
        check_scale(source.dtype, scale)
        wire = wire_dtype(source.dtype, op)
        handoff = self._handoff(source)
        result: Any = None
        if shape is not None and out is None:
            result = handoff.result(shape, source.dtype)
        elif shape is not None:
            result = source if out is x else self._out(out, shape, source.dtype)
            handoff.keep(result)

        def body(transport: DeviceTransport, _: Signatures | None) -> Steps[Any]:
            factor = self._factor(scale, transport)
            sent = self._contiguous(source, wire, transport, handoff)
            total = self._total(name, source, sent, result, transport, handoff)
            arrived = None if total is None else flat(total)
            rest = yield from start(transport, flat(sent), arrived, factor)
            if total is None:
                return None
            handoff.keep(*rest.buffers)
            self._finish(total, rest, transport)
            if total is not result:
                self._cuda.copy(result, total, transport.stream)
            return result if out is None else out

        return self._run(name, source, handoff, body, async_op, more, source.shape)

    def _factor(self, scale: Scale, transport: DeviceTransport) -> Any:
        """The scale, asked for when the sum is about to be launched: what it depends on stands before it by then."""
        if not callable(scale):
            return scale
        with self._cuda.on(transport.stream):
            factor = scale()
        if isinstance(factor, self._cuda.xp.ndarray) and factor.ndim:
            raise ArgumentError(f"scale should be a number or a 0-d array, its shape is {factor.shape}")
        return factor

    def _total(
        self, name: str, source: Any, sent: Any, result: Any, transport: DeviceTransport, handoff: StreamHandoff
    ) -> Any:
        """Where the wire's result arrives: in the answer itself if it can be there at once."""
        if result is None:
            return None
        if name == "all_reduce" and (result is source or sent is not source):
            return sent  # in place, or in a private copy, which can take the result as well
        if result.dtype == sent.dtype and result.flags.c_contiguous and not overlap(result, sent):
            return result
        return self._scratch(result.shape, sent.dtype, transport, handoff)

    def _finish(self, total: Any, rest: Remainder, transport: DeviceTransport) -> None:
        """Makes the answer of a total, on the transport's stream."""
        with self._cuda.on(transport.stream):
            if isinstance(rest.factor, self._cuda.xp.ndarray):
                finish(total, rest.op, self.size, None)
                self._cuda.xp.multiply(total, rest.factor.astype(total.dtype), out=total)
            else:
                finish(total, rest.op, self.size, rest.factor)
