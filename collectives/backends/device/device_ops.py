"""Collectives on arrays of a GPU, with the arguments that `Communicator` documents.

Reductions are carried out in the dtype that `collectives.reduction` says, cast on the communication stream; rows move
as bytes. send and recv go through host memory, whatever moves the collectives: what two ranks send each other stands
apart from the order of collectives, and both may send first. An NCCL send occupies its communicator until the other
side receives, so two such sends would wait for each other for ever.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import as_bytes, flat, row_bytes, rows
from collectives.backends.device.device_base import DeviceBase, overlap
from collectives.backends.device.device_transport import DeviceTransport, Remainder
from collectives.backends.device.stream_handoff import StreamHandoff
from collectives.engine import array_header
from collectives.engine.call import Work
from collectives.engine.communicator_base import Scale
from collectives.engine.progress import PAUSE
from collectives.errors import ArgumentError, CollectiveTimeout
from collectives.lengths import Lengths, exchanged_rows, in_words, joined_rows, split_rows
from collectives.reduction import Array, ReduceOp, describe, finish
from collectives.time_limit import TimeLimit
from collectives.transport import Signatures, Steps


class DeviceOps(DeviceBase):
    """All collectives on device arrays, and the two ends of a message whose array is on a GPU."""

    # Reductions ------------------------------------------------------------------------------------------------------

    def reduce(
        self,
        name: str,
        x: Any,
        op: ReduceOp | str,
        scale: Scale,
        out: Any,
        async_op: bool,
        root: int,
        lengths: Sequence[int] | None,
    ) -> Any:
        """all_reduce, reduce or reduce_scatter, by name."""
        source = self._cuda.as_array(x)
        reduction = describe(name, source, op, scale, root, lengths, self.rank, self.size)
        handoff = self._handoff(source)
        result: Any = None
        if reduction.shape is not None and out is None:
            result = handoff.result(reduction.shape, source.dtype)
        elif reduction.shape is not None:
            result = source if out is x and name != "reduce_scatter" else self._out(out, reduction.shape, source.dtype)
            handoff.keep(result)

        def body(transport: DeviceTransport, _: Signatures | None) -> Steps[Any]:
            factor = self._factor(scale, transport)
            sent = self._contiguous(source, reduction.wire, transport, handoff)
            total = None if result is None else self._total(name, source, sent, result, transport, handoff)
            received = None if total is None else flat(total)
            rest = yield from reduction.start(transport, reduction.op, flat(sent), received, factor)
            if total is None:
                return None
            handoff.keep(*rest.buffers)
            self._finish(total, rest, transport)
            if total is not result:
                self._cuda.copy(result, total, transport.stream)
            return result if out is None else out

        return self._run(name, source, handoff, body, async_op, reduction.text, source.shape)

    def _total(
        self, name: str, source: Any, sent: Any, result: Any, transport: DeviceTransport, handoff: StreamHandoff
    ) -> Any:
        """Where the wire's result arrives: in the answer itself if it can be there at once."""
        if name == "all_reduce" and (result is source or sent is not source):
            return sent  # in place, or in a private copy, which can take the result as well
        if result.dtype == sent.dtype and result.flags.c_contiguous and not overlap(result, sent):
            return result
        return self._scratch(result.shape, sent.dtype, transport, handoff)

    def _factor(self, scale: Scale, transport: DeviceTransport) -> Any:
        """The scale, asked for when the sum is about to be launched: what it depends on stands before it by then."""
        if not callable(scale):
            return scale
        with self._cuda.on(transport.stream):
            factor = scale()
        if isinstance(factor, self._cuda.xp.ndarray) and factor.ndim:
            raise ArgumentError(f"scale should be a number or a 0-d array, its shape is {factor.shape}")
        return factor

    def _finish(self, total: Any, rest: Remainder, transport: DeviceTransport) -> None:
        """Makes the answer of a total, on the transport's stream."""
        with self._cuda.on(transport.stream):
            if isinstance(rest.factor, self._cuda.xp.ndarray):
                finish(total, rest.op, self.size, None)
                self._cuda.xp.multiply(total, rest.factor.astype(total.dtype), out=total)
            else:
                finish(total, rest.op, self.size, rest.factor)

    # Movements -------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Any, root: int, async_op: bool) -> Any:
        """The root's x, on every rank."""
        array = self._cuda.as_array(x)
        handoff = self._handoff(array)

        def body(transport: DeviceTransport, signatures: Signatures | None) -> Steps[Any]:
            moved = self._contiguous(array, array.dtype, transport, handoff)
            yield from transport.broadcast(as_bytes(moved), root)
            if moved is not array and self.rank != root:
                self._cuda.copy(array, moved, transport.stream)
            return array

        return self._run("broadcast", array, handoff, body, async_op, f"root {root}", array.shape)

    def gather(self, name: str, x: Any, root: int | None, lengths: Lengths, out: Any, async_op: bool) -> Any:
        """gather; all_gather, for which root is None."""
        part = rows(self._cuda.as_array(x))
        known = joined_rows(len(part), lengths, self.rank, self.size)
        handoff = self._handoff(part)
        receives = root is None or self.rank == root
        target = None if out is None or not receives else self._cuda.as_array(out, "out")
        more = ("" if root is None else f"root {root}") + in_words(lengths, known)
        early = None
        if receives and known is not None:
            early = self._result(target, (sum(known), *part.shape[1:]), part, handoff)

        def body(transport: DeviceTransport, signatures: Signatures | None) -> Steps[Any]:
            counts = yield from array_header.exchange_lengths(self._transport, part, known, signatures)
            whole: Any = early
            if receives and whole is None:
                whole = self._result(target, (sum(counts), *part.shape[1:]), part, handoff)
            sent = as_bytes(self._contiguous(part, part.dtype, transport, handoff))
            each = [n * row_bytes(part) for n in counts]
            if root is None:
                yield from transport.all_gather(sent, as_bytes(whole), each)
            else:
                yield from transport.gather(sent, None if whole is None else as_bytes(whole), each, root)
            return None if whole is None else self._deliver(whole, target, out, transport)

        return self._run(name, part, handoff, body, async_op, more.strip(), part.shape[1:])

    def scatter(self, x: Any, root: int, lengths: Sequence[int] | None, out: Any, async_op: bool) -> Any:
        """The root's x, a part for each rank."""
        whole = self._rows_to_split(x, "scatter") if self.rank == root else None
        message = array_header.empty(self.size)
        if whole is not None:
            counts = split_rows(len(whole), lengths, self.size)
            message = array_header.encode(whole, counts)
        target = None if out is None else self._cuda.as_array(out, "out")
        handoff = self._handoff(whole)

        def body(transport: DeviceTransport, signatures: Signatures | None) -> Steps[Any]:
            yield self._transport.broadcast(message, root)
            dtype, row_shape, parts = array_header.decode(message)
            like = np.empty((0, *row_shape), dtype)
            part = self._result(target, (parts[self.rank], *row_shape), like, handoff, whole)
            sent = None if whole is None else as_bytes(self._contiguous(whole, dtype, transport, handoff))
            yield from transport.scatter(sent, as_bytes(part), [n * row_bytes(like) for n in parts], root)
            return self._deliver(part, target, out, transport)

        return self._run("scatter", whole, handoff, body, async_op, f"root {root}")

    def all_to_all(self, x: Any, lengths: Any, out: Any, async_op: bool) -> Any:
        """Each rank's x, a part for each rank."""
        whole = self._rows_to_split(x, "all_to_all")
        sends, known = exchanged_rows(len(whole), lengths, self.rank, self.size)
        target = None if out is None else self._cuda.as_array(out, "out")
        handoff = self._handoff(whole)

        def body(transport: DeviceTransport, signatures: Signatures | None) -> Steps[Any]:
            table = known or (yield from array_header.exchange_rows(self._transport, whole, sends))
            received = sum(row[self.rank] for row in table)
            result = self._result(target, (received, *whole.shape[1:]), whole, handoff)
            sent = as_bytes(self._contiguous(whole, whole.dtype, transport, handoff))
            width = row_bytes(whole)
            yield from transport.all_to_all(sent, as_bytes(result), [[n * width for n in row] for row in table])
            return self._deliver(result, target, out, transport)

        more = "" if known is None else in_words(lengths, known).strip()
        return self._run("all_to_all", whole, handoff, body, async_op, more, whole.shape[1:])

    # Arrays ----------------------------------------------------------------------------------------------------------

    def _rows_to_split(self, x: Any, what: str) -> Any:
        whole = self._cuda.as_array(x)
        if whole.ndim == 0:
            raise ArgumentError(f"{what} splits axis 0, and x is 0-d")
        return whole

    def _result(
        self, target: Any, shape: tuple[int, ...], like: Any, handoff: StreamHandoff, source: Any = None
    ) -> Any:
        """Where a result of this shape and of like's dtype arrives: in `target` if it can be there at once."""
        source = like if source is None else source
        if target is not None:
            handoff.keep(target)
            fits = (target.shape, target.dtype) == (shape, like.dtype) and target.flags.c_contiguous
            if fits and (isinstance(source, np.ndarray) or not overlap(target, source)):
                return target
        return handoff.result(shape, like.dtype)

    def _deliver(self, whole: Any, target: Any, out: Any, transport: DeviceTransport) -> Any:
        if target is None:
            return whole
        if target is not whole:
            self._cuda.copy(self._out(target, whole.shape, whole.dtype), whole, transport.stream)
        return out

    # Point to point --------------------------------------------------------------------------------------------------

    def to_host(self, x: Any) -> Array:
        """x in host memory, to be sent. The host waits for what stands on the current stream, and for the copy.

        Raises: CollectiveTimeout if that takes longer than the communicator's limit.
        """
        source = self._cuda.as_array(x)
        stream = self._cuda.current_stream()
        dense = source if source.flags.c_contiguous else source.copy(order="C")
        host = self._cuda.pinned(dense.nbytes)
        self._cuda.copy_down(host, dense, stream)
        event, limit = self._cuda.mark(stream), TimeLimit(self._comm.timeout)
        while not self._cuda.passed(event):
            if limit.passed():
                self.watchdog.leak((host, dense))
                raise CollectiveTimeout(
                    f"rank {self.rank}: send waits for what stands before it on its stream, longer than "
                    f"{self._comm.timeout:g} s"
                )
            time.sleep(PAUSE)
        return host.view(source.dtype).reshape(source.shape)

    def to_device(self, received: Array | tuple[Array, int], out: Any) -> Any:
        """What has been received, in `out`, for what the current stream does next.

        received: what `recv` returned, for any source with the rank that sent it; so is the result
        Raises: ArgumentError if it does not fit.
        """
        if isinstance(received, tuple):
            return self.to_device(received[0], out), received[1]
        target = self._out(out, received.shape, received.dtype)
        stream = self._cuda.current_stream()
        staged = self._cuda.pinned(received.nbytes)
        staged[:] = received.reshape(-1).view(np.uint8)
        dense = target if target.flags.c_contiguous else self._cuda.empty(received.shape, received.dtype)
        self._cuda.copy_up(dense, staged, stream)
        if dense is not target:
            self._cuda.xp.copyto(target, dense)
        self.watchdog.watch(self._cuda.mark(stream), (staged, dense))
        return out

    def receive_work(self, work: Work[Array], out: Any) -> DeviceReceiveWork:
        """What `recv(async_op=True)` returns for an `out` on the GPU."""
        return DeviceReceiveWork(work, self, out)


class DeviceReceiveWork(Work[Any]):
    """A receive into an array on a GPU: it is copied there by the stream that first waits for it."""

    __slots__ = ("_device", "_out", "_result")

    def __init__(self, work: Work[Array], device: DeviceOps, out: Any) -> None:
        super().__init__(work._call)
        self._device = device
        self._out = out
        self._result: Any = None

    def wait(self, timeout: float | None = None) -> Any:
        """`out`, which the current stream may use; with the sender's rank if any could send."""
        received = super().wait(timeout)
        if self._result is None:
            self._result = self._device.to_device(received, self._out)
        return self._result
