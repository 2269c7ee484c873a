"""Movements of arrays on a GPU: rows between ranks, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import as_bytes, row_bytes, rows
from collectives.backends.device.device_base import DeviceBase, overlap
from collectives.backends.device.device_transport import DeviceTransport
from collectives.backends.device.stream_handoff import StreamHandoff
from collectives.engine import array_header
from collectives.errors import ArgumentError, MismatchError
from collectives.lengths import Lengths, exchanged_rows, in_words, joined_rows, rows_differ, split_rows
from collectives.transport import ROWS, Signatures, Steps


class DeviceDataMovement(DeviceBase):
    """broadcast, gather, all_gather, scatter and all_to_all, with the arguments that `Communicator` documents."""

    def broadcast(self, x: Any, root: int, *, async_op: bool = False) -> Any:
        array = self._cuda.as_array(x)
        handoff = self._handoff(array)

        def body(transport: DeviceTransport, signatures: Signatures | None) -> Steps[Any]:
            moved = self._contiguous(array, array.dtype, transport, handoff)
            yield from transport.broadcast(as_bytes(moved), root)
            if moved is not array and self.rank != root:
                self._cuda.copy(array, moved, transport.stream)
            return array

        return self._run("broadcast", array, handoff, body, async_op, f"root {root}", array.shape)

    def gather(self, x: Any, root: int, *, lengths: Lengths, out: Any = None, async_op: bool = False) -> Any:
        return self._gather("gather", x, root, lengths, out, async_op)

    def all_gather(self, x: Any, *, lengths: Lengths, out: Any = None, async_op: bool = False) -> Any:
        return self._gather("all_gather", x, None, lengths, out, async_op)

    def _gather(self, name: str, x: Any, root: int | None, lengths: Lengths, out: Any, async_op: bool) -> Any:
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
            counts = known if known is not None else (yield from self._lengths(part, signatures))
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

    def scatter(
        self, x: Any, root: int, *, lengths: Sequence[int] | None, out: Any = None, async_op: bool = False
    ) -> Any:
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

    def all_to_all(self, x: Any, *, lengths: Any, out: Any = None, async_op: bool = False) -> Any:
        whole = self._rows_to_split(x, "all_to_all")
        sends, known = exchanged_rows(len(whole), lengths, self.rank, self.size)
        target = None if out is None else self._cuda.as_array(out, "out")
        handoff = self._handoff(whole)

        def body(transport: DeviceTransport, signatures: Signatures | None) -> Steps[Any]:
            table = known if known is not None else (yield from self._exchange_table(whole, sends))
            received = sum(row[self.rank] for row in table)
            result = self._result(target, (received, *whole.shape[1:]), whole, handoff)
            sent = as_bytes(self._contiguous(whole, whole.dtype, transport, handoff))
            width = row_bytes(whole)
            yield from transport.all_to_all(sent, as_bytes(result), [[n * width for n in row] for row in table])
            return self._deliver(result, target, out, transport)

        more = "" if known is None else in_words(lengths, known).strip()
        return self._run("all_to_all", whole, handoff, body, async_op, more, whole.shape[1:])

    # Lengths ---------------------------------------------------------------------------------------------------------

    def _lengths(self, part: Any, signatures: Signatures | None) -> Steps[list[int]]:
        """Every rank's number of rows: out of the signatures, or exchanged where they were not."""
        if signatures is not None:
            return [each[ROWS] for each in signatures]
        table = yield from self._exchange_table(part, [len(part)])
        return [row[0] for row in table]

    def _exchange_table(self, part: Any, numbers: Sequence[int]) -> Steps[list[list[int]]]:
        """Every rank's numbers, which also have to come from arrays with the same rows."""
        mine = np.array([array_header.fingerprint(part), *numbers], np.int64)
        everyones = np.empty((self.size, len(mine)), np.int64)
        yield self._transport.all_gather(as_bytes(mine), as_bytes(everyones), [mine.nbytes] * self.size)
        if (everyones[:, 0] != everyones[0, 0]).any():
            raise MismatchError(rows_differ(everyones[:, 0].tolist(), self.rank, f"{part.dtype} {part.shape[1:]}"))
        return everyones[:, 1:].tolist()

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
