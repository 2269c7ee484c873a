"""Movements of arrays on a GPU: rows between ranks, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives._gpu.carrier import Carrier
from collectives._gpu.door import Desk, overlap
from collectives._gpu.passage import Passage
from collectives.arrays import as_bytes, row_bytes, rows
from collectives.engine.call import Steps
from collectives.engine.verify import ROWS, Signatures
from collectives.errors import ArgumentError, MismatchError
from collectives.lengths import Lengths, exchanged_rows, in_words, joined_rows, rows_differ, split_rows
from collectives.ops import array_header as header


class DeviceMovements(Desk):
    """broadcast, gather, all_gather, scatter and all_to_all, with the arguments that `Communicator` documents."""

    def broadcast(self, x: Any, root: int, *, async_op: bool = False) -> Any:
        array = self._array(x)
        passage = self._passage(array)

        def body(carrier: Carrier, signatures: Signatures | None) -> Steps[Any]:
            moved = array
            if not array.flags.c_contiguous:
                moved = self._scratch(array.shape, array.dtype, carrier, passage)
                if self.rank == root:
                    self._copy(moved, array, carrier)
            yield from carrier.broadcast(as_bytes(moved), root)
            if moved is not array and self.rank != root:
                self._copy(array, moved, carrier)
            return array

        return self._run("broadcast", array, passage, body, async_op, f"root {root}", array.shape)

    def gather(self, x: Any, root: int, *, lengths: Lengths, out: Any = None, async_op: bool = False) -> Any:
        return self._gather("gather", x, root, lengths, out, async_op)

    def all_gather(self, x: Any, *, lengths: Lengths, out: Any = None, async_op: bool = False) -> Any:
        return self._gather("all_gather", x, None, lengths, out, async_op)

    def _gather(self, name: str, x: Any, root: int | None, lengths: Lengths, out: Any, async_op: bool) -> Any:
        part = rows(self._array(x))
        known = joined_rows(len(part), lengths, self.rank, self.size)
        passage = self._passage(part)
        mine = root is None or self.rank == root
        target = None if out is None or not mine else self._array(out, "out")
        more = ("" if root is None else f"root {root}") + in_words(lengths, known)
        early = None
        if mine and known is not None:
            early = self._room(target, (sum(known), *part.shape[1:]), part, passage)

        def body(carrier: Carrier, signatures: Signatures | None) -> Steps[Any]:
            counts = known if known is not None else (yield from self._lengths(part, signatures))
            whole: Any = early
            if mine and whole is None:
                whole = self._room(target, (sum(counts), *part.shape[1:]), part, passage)
            sent = as_bytes(self._dense(part, carrier, passage))
            width = row_bytes(part)
            each = [n * width for n in counts]
            if root is None:
                yield from carrier.all_gather(sent, as_bytes(whole), each)
            else:
                yield from carrier.gather(sent, None if whole is None else as_bytes(whole), each, root)
            return None if whole is None else self._hand_out(whole, target, out, carrier)

        return self._run(name, part, passage, body, async_op, more.strip(), part.shape[1:])

    def scatter(
        self, x: Any, root: int, *, lengths: Sequence[int] | None, out: Any = None, async_op: bool = False
    ) -> Any:
        whole = self._split(x, "scatter") if self.rank == root else None
        told = header.empty(self.size)
        if whole is not None:
            counts = split_rows(len(whole), lengths, self.size)
            told = header.encode(whole, counts)
        target = None if out is None else self._array(out, "out")
        passage = self._passage(whole)

        def body(carrier: Carrier, signatures: Signatures | None) -> Steps[Any]:
            yield self._transport.broadcast(told, root)
            dtype, row_shape, parts = header.decode(told)
            like = np.empty((0, *row_shape), dtype)
            room = self._room(target, (parts[self.rank], *row_shape), like, passage, whole)
            width = row_bytes(like)
            sent = None if whole is None else as_bytes(self._dense(whole, carrier, passage))
            yield from carrier.scatter(sent, as_bytes(room), [n * width for n in parts], root)
            return self._hand_out(room, target, out, carrier)

        return self._run("scatter", whole, passage, body, async_op, f"root {root}")

    def all_to_all(self, x: Any, *, lengths: Any, out: Any = None, async_op: bool = False) -> Any:
        whole = self._split(x, "all_to_all")
        sends, known = exchanged_rows(len(whole), lengths, self.rank, self.size)
        target = None if out is None else self._array(out, "out")
        passage = self._passage(whole)

        def body(carrier: Carrier, signatures: Signatures | None) -> Steps[Any]:
            table = known if known is not None else (yield from self._exchange_table(whole, sends))
            received = sum(row[self.rank] for row in table)
            room = self._room(target, (received, *whole.shape[1:]), whole, passage)
            sent = as_bytes(self._dense(whole, carrier, passage))
            width = row_bytes(whole)
            yield from carrier.all_to_all(sent, as_bytes(room), [[n * width for n in row] for row in table])
            return self._hand_out(room, target, out, carrier)

        more = "" if known is None else in_words(lengths, known).strip()
        return self._run("all_to_all", whole, passage, body, async_op, more, whole.shape[1:])

    # Lengths ---------------------------------------------------------------------------------------------------------

    def _lengths(self, part: Any, signatures: Signatures | None) -> Steps[list[int]]:
        """Every rank's number of rows: out of the headers, or exchanged where they were not."""
        if signatures is not None:
            return [each[ROWS] for each in signatures]
        table = yield from self._exchange_table(part, [len(part)])
        return [row[0] for row in table]

    def _exchange_table(self, part: Any, numbers: Sequence[int]) -> Steps[list[list[int]]]:
        """Every rank's numbers, which also have to come from arrays with the same rows."""
        mine = np.array([header.fingerprint(part), *numbers], np.int64)
        told = np.empty((self.size, len(mine)), np.int64)
        yield self._transport.all_gather(as_bytes(mine), as_bytes(told), [mine.nbytes] * self.size)
        if (told[:, 0] != told[0, 0]).any():
            raise MismatchError(rows_differ(told[:, 0].tolist(), self.rank, f"{part.dtype} {part.shape[1:]}"))
        return told[:, 1:].tolist()

    # Arrays ----------------------------------------------------------------------------------------------------------

    def _split(self, x: Any, what: str) -> Any:
        whole = self._array(x)
        if whole.ndim == 0:
            raise ArgumentError(f"{what} splits axis 0, and x is 0-d")
        return whole

    def _dense(self, array: Any, carrier: Carrier, passage: Passage) -> Any:
        if array.flags.c_contiguous:
            return array
        dense = self._scratch(array.shape, array.dtype, carrier, passage)
        self._copy(dense, array, carrier)
        return dense

    def _room(self, target: Any, shape: tuple[int, ...], like: Any, passage: Passage, source: Any = None) -> Any:
        """Where a result of this shape and of like's dtype arrives: in `target` if it can be there at once."""
        source = like if source is None else source
        if target is not None:
            passage.keep(target)
            fits = (target.shape, target.dtype) == (shape, like.dtype) and target.flags.c_contiguous
            if fits and (isinstance(source, np.ndarray) or not overlap(target, source)):
                return target
        return passage.room(shape, like.dtype)

    def _hand_out(self, whole: Any, target: Any, out: Any, carrier: Carrier) -> Any:
        if target is None:
            return whole
        if target is not whole:
            self._copy(self._out(target, whole.shape, whole.dtype), whole, carrier)
        return out
