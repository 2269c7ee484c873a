"""Collectives that move rows between ranks and leave their values alone: broadcast, gather, scatter and their kin."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from functools import partial
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
from collectives.backends.shm import call_cache
from collectives.backends.shm.call_cache import MISS, CallPlan
from collectives.backends.shm.control_block import ControlBlock
from collectives.engine import array_header as header
from collectives.engine.call import CollectiveOp
from collectives.engine.communicator_base import CommunicatorBase
from collectives.engine.verify import signature_hash
from collectives.errors import ArgumentError, MismatchError
from collectives.lengths import Lengths, exchanged_rows, in_words, joined_rows, rows_differ, split_rows
from collectives.reduction import Array
from collectives.transport import ROWS, Signature, Signatures, Steps, Test


class DataMovement(CommunicatorBase):
    """The movements of a communicator."""

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """The root's x, on every rank: written into x elsewhere.

        x: (...), the same shape and dtype on every rank
        Returns: x
        Raises: ArgumentError if there is no such root, or x is read-only off the root.
        """
        if self._call_cache is not None and not async_op and type(x) is np.ndarray:
            y = self._call_cache.run("broadcast", x, root, None, None)
            if y is not MISS:
                return y
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

        plan = None
        if array is x:
            brings, result = (
                self.rank == root,
                partial(call_cache.filled, root=root, dtype=array.dtype, shape=array.shape),
            )

            def start(x: Array, out: Any, scale: Any) -> tuple[Test, Array]:
                return self.transport.broadcast(as_bytes(x), root), x

            wire = array.dtype if brings else None
            plan = CallPlan(root, wire, lambda control, signatures: result(control), start, writes=not brings)
        return self._run("broadcast", array, steps, async_op, f"root {root}", plan)

    def gather(self, x: Any, root: int = 0, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on the root alone.

        x: (n_r, ...); the n_r may differ, the rest and the dtype may not; 0-d arrays count as (1,)
        lengths: the n_r, if every rank knows them; "equal" if all are x's own; None: they are exchanged first
        out: (n_0 + n_1 + ..., ...), used on the root only
        Returns: (n_0 + n_1 + ..., ...) on the root, None elsewhere
        Raises: ArgumentError if there is no such root, or lengths or out do not fit.
        """
        if self._call_cache is not None and not async_op and type(x) is np.ndarray and type(lengths) is not list:
            y = self._call_cache.run("gather", x, (root, lengths), out if self.rank == root else None, None)
            if y is not MISS:
                return y
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

        plan = self._joining((root, lengths), part, lengths, root) if part is x else None
        return self._run("gather", part, steps, async_op, more, plan)

    def all_gather(self, x: Any, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on every rank.

        x, lengths: as in `gather`; out: (n_0 + n_1 + ..., ...)
        Returns: (n_0 + n_1 + ..., ...)
        Raises: ArgumentError if lengths or out do not fit.
        """
        if self._call_cache is not None and not async_op and type(x) is np.ndarray and type(lengths) is not list:
            y = self._call_cache.run("all_gather", x, lengths, out, None)
            if y is not MISS:
                return y
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

        plan = self._joining(lengths, part, lengths, None) if part is x else None
        return self._run("all_gather", part, steps, async_op, more, plan)

    def scatter(
        self, x: Any, root: int = 0, *, lengths: Sequence[int] | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """The root's x split along axis 0, one part for each rank.

        x: (n, ...) on the root, ignored elsewhere; lengths: the parts' lengths, read on the root only; None:
        `np.array_split`'s rule, as even as possible, longer parts first; out: (n_r, ...)
        Returns: (n_r, ...) of the root's dtype
        Raises: ArgumentError if there is no such root, or x, lengths or out do not fit.
        """
        if self._call_cache is not None and not async_op and lengths is None:
            if self.rank != root:
                y = self._call_cache.run("scatter", None, root, out, None)
            else:
                y = self._call_cache.run("scatter", x, root, out, None) if type(x) is np.ndarray else MISS
            if y is not MISS:
                return y
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

        def result(control: ControlBlock, signatures: Signatures) -> call_cache.Result:
            dtype, row_shape, parts = header.decode(told)
            first = sum(parts[: self.rank])
            mine = call_cache.Rows(root, (sum(parts), *row_shape), first, first + parts[self.rank], len(told))
            return call_cache.concatenated(control, dtype, [mine])

        def start(x: Array | None, out: Array | None, scale: Any) -> tuple[Test, Array]:
            dtype, row_shape, parts = header.decode(told)
            room = np.empty((parts[self.rank], *row_shape), dtype) if out is None else out
            width = row_bytes(room)
            sent = None if x is None else as_bytes(x)
            return self.transport.scatter(sent, as_bytes(room), [n * width for n in parts], root), room

        plan = None
        if lengths is None and (whole is None or whole is x):
            plan = CallPlan(root, None if whole is None else whole.dtype, result, start, prefix)
        return self._run("scatter", whole, steps, async_op, f"root {root}", plan)

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
        if self._call_cache is not None and not async_op and type(x) is np.ndarray and lengths is None:
            y = self._call_cache.run("all_to_all", x, None, out, None)
            if y is not MISS:
                return y
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

        def result(control: ControlBlock, signatures: Signatures) -> call_cache.Result:
            # A slot holds the rows that its rank sends to each, then x.
            pieces = []
            for rank, theirs in enumerate(tables[0]):
                first = sum(theirs[: self.rank])
                shape = (sum(theirs), *whole.shape[1:])
                pieces.append(call_cache.Rows(rank, shape, first, first + theirs[self.rank], row.nbytes))
            return call_cache.concatenated(control, whole.dtype, pieces)

        def start(x: Array, out: Array | None, scale: Any) -> tuple[Test, Array]:
            room = out
            if room is None:
                room = np.empty((sum(theirs[self.rank] for theirs in tables[0]), *x.shape[1:]), x.dtype)
            width = row_bytes(x)
            bytes_sent = [[n * width for n in theirs] for theirs in tables[0]]
            return self.transport.all_to_all(as_bytes(x), as_bytes(room), bytes_sent), room

        plan = None
        if whole is x and lengths is None:
            plan = CallPlan(None, whole.dtype, result, start, as_bytes(row))
        return self._run("all_to_all", whole, steps, async_op, more, plan)

    def _joining(self, option: Hashable, part: Array, lengths: Lengths, root: int | None) -> CallPlan | None:
        """The plan of a gather. root: None if the result is wanted everywhere."""
        if not isinstance(lengths, str | None) or part.ndim == 0:
            return None
        here = root is None or root == self.rank
        counts: list[int] = []

        def result(control: ControlBlock, signatures: Signatures) -> call_cache.Result:
            rows_of = [each[ROWS] for each in signatures]
            counts[:] = [n * row_bytes(part) for n in rows_of]
            if not here:
                return call_cache.no_result()
            shapes = [(n, *part.shape[1:]) for n in rows_of]
            pieces = [call_cache.Rows(rank, shape, 0, shape[0]) for rank, shape in enumerate(shapes)]
            return call_cache.concatenated(control, part.dtype, pieces)

        def start(x: Array, out: Array | None, scale: Any) -> tuple[Test, Array | None]:
            whole = None
            if here:
                length = sum(counts) // row_bytes(x)
                whole = np.empty((length, *x.shape[1:]), x.dtype) if out is None else out
            room = None if whole is None else as_bytes(whole)
            if root is None:
                assert room is not None
                return self.transport.all_gather(as_bytes(x), room, counts), whole
            return self.transport.gather(as_bytes(x), room, counts, root), whole

        return CallPlan(option, part.dtype, result, start)

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
