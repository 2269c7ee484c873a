"""Collectives that move rows between ranks and leave their values alone: broadcast, gather, scatter and their kin."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from collectives.arrays import (
    as_array,
    as_bytes,
    check_out,
    contiguous,
    is_device_array,
    row_bytes,
    rows,
    writable,
)
from collectives.engine import array_header as header
from collectives.engine.call import CollectiveOp
from collectives.engine.communicator_base import CommunicatorBase
from collectives.engine.verify import signature_hash
from collectives.errors import ArgumentError, MismatchError
from collectives.lengths import Lengths, exchanged_rows, in_words, joined_rows, rows_differ, split_rows
from collectives.reduction import Array
from collectives.transport import ROWS, Signature, Signatures, Steps


class DataMovement(CommunicatorBase):
    """The movements of a communicator."""

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """The root's x, on every rank: written into x elsewhere.

        x: (...), the same shape and dtype on every rank
        Returns: x
        Raises: ArgumentError if there is no such root, or x is read-only off the root.
        """
        root = self._check_root(root)
        if is_device_array(x):
            return self._device(x).broadcast(x, root, async_op=async_op)
        array = as_array(x)
        if self.rank != root:
            writable(array, "x")
        shown = Signature(signature_hash("broadcast", f"root {root}", array.dtype, array.shape))

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            moved = contiguous(array)
            sent = as_bytes(moved)
            yield from self.verify(call, shown, sent if self.rank == root else None)
            yield self.transport.broadcast(sent, root)
            if moved is not array and self.rank != root:
                np.copyto(array, moved)
            return x

        return self._run("broadcast", array, steps, async_op, f"root {root}")

    def gather(self, x: Any, root: int = 0, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on the root alone.

        x: (n_r, ...); the n_r may differ, the rest and the dtype may not; 0-d arrays count as (1,)
        lengths: the n_r, if every rank knows them; "equal" if all are x's own; None: they are exchanged first
        out: (n_0 + n_1 + ..., ...), used on the root only
        Returns: (n_0 + n_1 + ..., ...) on the root, None elsewhere
        Raises: ArgumentError if there is no such root, or lengths or out do not fit.
        """
        root = self._check_root(root)
        if is_device_array(x):
            return self._device(x).gather(x, root, lengths=lengths, out=out, async_op=async_op)
        part = rows(as_array(x))
        known = joined_rows(len(part), lengths, self.rank, self.size)
        target = None if out is None or self.rank != root else as_array(out, "out")
        more = f"root {root}{in_words(lengths, known)}"
        shown = Signature(signature_hash("gather", more, part.dtype, part.shape[1:]), len(part))

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent = as_bytes(contiguous(part))
            signatures = yield from self.verify(call, shown, sent)
            counts = yield from self._lengths(part, known, signatures)
            whole = _room((sum(counts), *part.shape[1:]), part, target) if self.rank == root else None
            width = row_bytes(part)
            room = None if whole is None else as_bytes(whole)
            yield self.transport.gather(sent, room, [n * width for n in counts], root)
            return None if whole is None else _hand_out(whole, target, out)

        return self._run("gather", part, steps, async_op, more)

    def all_gather(self, x: Any, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on every rank.

        x, lengths: as in `gather`; out: (n_0 + n_1 + ..., ...)
        Returns: (n_0 + n_1 + ..., ...)
        Raises: ArgumentError if lengths or out do not fit.
        """
        if is_device_array(x):
            return self._device(x).all_gather(x, lengths=lengths, out=out, async_op=async_op)
        part = rows(as_array(x))
        known = joined_rows(len(part), lengths, self.rank, self.size)
        target = None if out is None else as_array(out, "out")
        more = in_words(lengths, known).strip()
        shown = Signature(signature_hash("all_gather", more, part.dtype, part.shape[1:]), len(part))

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent = as_bytes(contiguous(part))
            signatures = yield from self.verify(call, shown, sent)
            counts = yield from self._lengths(part, known, signatures)
            whole = _room((sum(counts), *part.shape[1:]), part, target)
            width = row_bytes(part)
            yield self.transport.all_gather(sent, as_bytes(whole), [n * width for n in counts])
            return _hand_out(whole, target, out)

        return self._run("all_gather", part, steps, async_op, more)

    def scatter(
        self, x: Any, root: int = 0, *, lengths: Sequence[int] | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """The root's x split along axis 0, one part for each rank.

        x: (n, ...) on the root, ignored elsewhere; lengths: the parts' lengths, read on the root only; None:
        `np.array_split`'s rule, as even as possible, longer parts first; out: (n_r, ...)
        Returns: (n_r, ...) of the root's dtype
        Raises: ArgumentError if there is no such root, or x, lengths or out do not fit.
        """
        root = self._check_root(root)
        near = x if is_device_array(x) else out  # off the root, out alone tells that the root's x is on a GPU
        if is_device_array(near):
            return self._device(near).scatter(x, root, lengths=lengths, out=out, async_op=async_op)
        whole = _splittable(x, "scatter") if self.rank == root else None
        told = header.empty(self.size)
        if whole is not None:
            counts = split_rows(len(whole), lengths, self.size)
            told = header.encode(whole, counts)
        target = None if out is None else as_array(out, "out")
        # What the other ranks cannot know is dtype, shape and lengths: they stand at the head of what the root brings.
        prefix = told if whole is not None else None
        mark = 0 if prefix is None else zlib.crc32(prefix.tobytes())
        shown = Signature(signature_hash("scatter", f"root {root}", None, None), mark)

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent = None if whole is None else as_bytes(contiguous(whole))
            yield from self.verify(call, shown, sent, prefix=prefix)
            yield self.transport.root_prefix(told, root)
            dtype, row_shape, parts = header.decode(told)
            room = _room((parts[self.rank], *row_shape), np.empty(0, dtype) if whole is None else whole, target)
            width = row_bytes(room)
            yield self.transport.scatter(sent, as_bytes(room), [n * width for n in parts], root)
            return _hand_out(room, target, out)

        return self._run("scatter", whole, steps, async_op, f"root {root}")

    def all_to_all(
        self,
        x: Any,
        *,
        lengths: Sequence[int] | Sequence[Sequence[int]] | Literal["equal"] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Each rank's x split along axis 0, part d for rank d; each rank gets the parts meant for it.

        x: (n_r, ...); the n_r may differ, the rest and the dtype may not
        lengths: the rows that this rank sends to each rank; None: `np.array_split`'s rule. In both cases the ranks
        first tell each other the lengths. No exchange takes place with "equal" (every rank sends n / size rows to each)
        or with the whole table, `lengths[source][destination]`
        out: (rows received, ...)
        Returns: (rows received, ...), what came from each rank, joined in rank order
        Raises: ArgumentError if x is 0-d, or lengths or out do not fit; MismatchError on every rank if dtypes or
        row shapes differ and lengths are exchanged.
        """
        if is_device_array(x):
            return self._device(x).all_to_all(x, lengths=lengths, out=out, async_op=async_op)
        whole = _splittable(x, "all_to_all")
        sends, known = exchanged_rows(len(whole), lengths, self.rank, self.size)
        target = None if out is None else as_array(out, "out")
        more = "" if known is None else in_words(lengths, known).strip()
        row = np.array(sends, np.int64)
        tables: list[list[list[int]]] = []  # once the ranks have told each other
        shown = Signature(signature_hash("all_to_all", more, whole.dtype, whole.shape[1:]), zlib.crc32(row.tobytes()))

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent, told = as_bytes(contiguous(whole)), as_bytes(row)
            signatures = yield from self.verify(call, shown, sent, prefix=told)
            table = known
            if table is None:
                rows_sent = np.empty((self.size, self.size), np.int64)
                yield self.transport.all_prefixes(told, rows_sent.view(np.uint8))
                if signatures is None:
                    yield from self._check_rows(whole)
                table = rows_sent.tolist()
            tables.append(table)
            room = _room((sum(each[self.rank] for each in table), *whole.shape[1:]), whole, target)
            width = row_bytes(whole)
            yield self.transport.all_to_all(sent, as_bytes(room), [[n * width for n in each] for each in table])
            return _hand_out(room, target, out)

        return self._run("all_to_all", whole, steps, async_op, more)

    def _lengths(self, part: Array, known: list[int] | None, signatures: Signatures | None) -> Steps[list[int]]:
        if signatures is not None:
            shown = [each[ROWS] for each in signatures]
            if known is not None and known != shown:
                raise MismatchError(f"lengths are given as {known}, but the ranks bring {shown} rows")
            return shown
        if known is not None:
            return known
        told = np.empty(self.size, np.int64)
        mine = np.array([len(part)], np.int64)
        yield self.transport.all_gather(as_bytes(mine), as_bytes(told), [mine.nbytes] * self.size)
        yield from self._check_rows(part)
        return told.tolist()

    def _check_rows(self, part: Array) -> Steps[None]:
        """Raises: MismatchError on every rank if dtypes or row shapes differ."""
        mine = np.array([header.fingerprint(part)], np.int64)
        marks = np.empty(self.size, np.int64)
        yield self.transport.all_gather(as_bytes(mine), as_bytes(marks), [mine.nbytes] * self.size)
        if (marks != marks[0]).any():
            raise MismatchError(rows_differ(marks.tolist(), self.rank, f"{part.dtype} {part.shape[1:]}"))


def _room(shape: tuple[int, ...], part: Array, target: Array | None) -> Array:
    """Where a result of this shape and of part's dtype arrives: in `target` if it can be there at once."""
    if target is None or target.shape != shape or target.dtype != part.dtype:
        return np.empty(shape, part.dtype)
    at_once = target.flags.c_contiguous and target.flags.writeable and not np.may_share_memory(target, part)
    return target if at_once else np.empty(shape, part.dtype)


def _hand_out(whole: Array, target: Array | None, out: Any) -> Any:
    """The result: what arrived, or `out` as the caller gave it, whose array is `target`."""
    if target is None:
        return whole
    if target is not whole:
        np.copyto(check_out(target, whole.shape, whole.dtype), whole)
    return out


def _splittable(x: Any, name: str) -> Array:
    whole = as_array(x)
    if whole.ndim == 0:
        raise ArgumentError(f"{name} splits axis 0, and x is 0-d")
    return whole
