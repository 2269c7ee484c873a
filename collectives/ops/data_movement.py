"""Collectives that move rows between ranks and leave their values alone: broadcast, gather, scatter and their kin."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from collectives.arrays import as_array, as_bytes, check_out, contiguous, is_device_array, row_bytes, rows, writable
from collectives.backends.shm.call_cache import CallPlan, Result, Rows, concatenated, filled, no_result
from collectives.backends.shm.segment import ControlBlock
from collectives.engine import array_header as header
from collectives.engine.call import MISS, CollectiveOp
from collectives.engine.communicator_base import CommunicatorBase
from collectives.errors import ArgumentError
from collectives.lengths import Lengths, exchanged_rows, in_words, joined_rows, split_rows
from collectives.reduction import Array
from collectives.transport import ROWS, Signatures, Steps, Test


class DataMovement(CommunicatorBase):
    """The movements of a communicator.

    Functions that a `CallPlan` holds outlive the call that made them, so they keep none of its arrays alive.
    """

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """The root's x, on every rank: written into x elsewhere.

        x: (...), the same shape and dtype on every rank
        Returns: x
        Raises: ArgumentError if there is no such root, or x is read-only off the root.
        """
        if not async_op and (y := self._cached("broadcast", x, root, None, None)) is not MISS:
            return y
        root = self._check_root(root)
        if is_device_array(x):
            return self._device(x).broadcast(x, root, async_op)
        return self._run(self._broadcast(x, root), async_op)

    def _broadcast(self, x: Any, root: int) -> CollectiveOp[Any]:
        array = as_array(x)
        dtype, shape, is_root = array.dtype, array.shape, self.rank == root
        if not is_root:
            writable(array, "x")

        def start(x: Array, out: Any, scale: Any, signatures: Signatures | None) -> tuple[Test, Array]:
            return self.transport.broadcast(as_bytes(x), root), x

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            moved = contiguous(array)
            yield from self.verify(call, self._signature(call, shape), as_bytes(moved) if is_root else None)
            yield start(moved, None, None, None)[0]
            if moved is not array and not is_root:
                np.copyto(array, moved)
            return x

        def plan() -> CallPlan:
            return CallPlan(
                root,
                dtype if is_root else None,
                lambda control, _: filled(control, root, dtype, shape),
                start,
                lambda x, out, scale: self._broadcast(x, root),
                writes=not is_root,
            )

        return self._collective("broadcast", array, steps, f"root {root}", plan if array is x else None)

    def gather(self, x: Any, root: int = 0, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on the root alone.

        x: (n_r, ...); the n_r may differ, the rest and the dtype may not; 0-d arrays count as (1,)
        lengths: the n_r, if every rank knows them; "equal" if all are x's own; None: they are exchanged first
        out: (n_0 + n_1 + ..., ...), used on the root only
        Returns: (n_0 + n_1 + ..., ...) on the root, None elsewhere
        Raises: ArgumentError if there is no such root, or lengths or out do not fit.
        """
        out = out if self.rank == root else None
        if not async_op and (y := self._cached("gather", x, (root, lengths), out, None)) is not MISS:
            return y
        return self._gather_any("gather", x, out, self._check_root(root), lengths, async_op)

    def all_gather(self, x: Any, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on every rank.

        x, lengths: as in `gather`; out: (n_0 + n_1 + ..., ...)
        Returns: (n_0 + n_1 + ..., ...)
        Raises: ArgumentError if lengths or out do not fit.
        """
        if not async_op and (y := self._cached("all_gather", x, (None, lengths), out, None)) is not MISS:
            return y
        return self._gather_any("all_gather", x, out, None, lengths, async_op)

    def _gather_any(self, name: str, x: Any, out: Any, root: int | None, lengths: Lengths, async_op: bool) -> Any:
        if is_device_array(x):
            return self._device(x).gather(name, x, root, lengths, out, async_op)
        return self._run(self._gather(name, x, out, root, lengths), async_op)

    def _gather(self, name: str, x: Any, out: Any, root: int | None, lengths: Lengths) -> CollectiveOp[Any]:
        """root: None if every rank gets the result."""
        part = rows(as_array(x))
        known = joined_rows(len(part), lengths, self.rank, self.size)
        receives = root is None or self.rank == root
        target = None if out is None else as_array(out, "out")
        more = (("" if root is None else f"root {root}") + in_words(lengths, known)).strip()
        dtype, row = part.dtype, part.shape[1:]

        def move(x: Array, whole: Array | None, counts: list[int]) -> Test:
            width = row_bytes(x)
            nbytes = [n * width for n in counts]
            buffer = None if whole is None else as_bytes(whole)
            if root is not None:
                return self.transport.gather(as_bytes(x), buffer, nbytes, root)
            assert buffer is not None
            return self.transport.all_gather(as_bytes(x), buffer, nbytes)

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent = contiguous(part)
            signatures = yield from self.verify(call, self._signature(call, row, len(sent)), as_bytes(sent))
            counts = yield from header.exchange_lengths(self.transport, part, known, signatures)
            whole = result_array((sum(counts), *row), dtype, part, target) if receives else None
            yield move(sent, whole, counts)
            return None if whole is None else hand_out(whole, target, out)

        def start(x: Array, out: Array | None, scale: Any, signatures: Signatures | None) -> tuple[Test, Array | None]:
            assert signatures is not None
            counts = [each[ROWS] for each in signatures]
            if receives and out is None:
                out = np.empty((sum(counts), *row), dtype)
            return move(x, out, counts), out

        def result(control: ControlBlock, signatures: Signatures) -> Result:
            if not receives:
                return no_result()
            pieces = [Rows(rank, (each[ROWS], *row), 0, each[ROWS]) for rank, each in enumerate(signatures)]
            return concatenated(control, dtype, pieces)

        def plan() -> CallPlan:
            again = lambda x, out, scale: self._gather(name, x, out, root, lengths)  # noqa: E731
            return CallPlan((root, lengths), dtype, result, start, again)

        planned = part is x and isinstance(lengths, str | None)
        return self._collective(name, part, steps, more, plan if planned else None)

    def scatter(
        self, x: Any, root: int = 0, *, lengths: Sequence[int] | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """The root's x split along axis 0, one part for each rank.

        x: (n, ...) on the root, ignored elsewhere; lengths: the parts' lengths, read on the root only; None:
        `np.array_split`'s rule, as even as possible, longer parts first; out: (n_r, ...)
        Returns: (n_r, ...) of the root's dtype
        Raises: ArgumentError if there is no such root, or x, lengths or out do not fit.
        """
        if lengths is None and not async_op:
            y = self._cached("scatter", x if self.rank == root else None, root, out, None)
            if y is not MISS:
                return y
        root = self._check_root(root)
        near = x if is_device_array(x) else out  # off the root, out alone tells that the root's x is on a GPU
        if is_device_array(near):
            return self._device(near).scatter(x, root, lengths, out, async_op)
        return self._run(self._scatter(x, out, root, lengths), async_op)

    def _scatter(self, x: Any, out: Any, root: int, lengths: Sequence[int] | None = None) -> CollectiveOp[Any]:
        whole = _splittable(x, "scatter") if self.rank == root else None
        # What the other ranks cannot know is dtype, shape and lengths: they stand at the head of what the root sends.
        message, prefix = header.empty(self.size), None
        if whole is not None:
            message = prefix = header.encode(whole, split_rows(len(whole), lengths, self.size))
        target = None if out is None else as_array(out, "out")
        checksum = 0 if prefix is None else zlib.crc32(prefix.tobytes())

        def start(sent: Array | None, out: Array | None, *_: Any, source: Array | None = None) -> tuple[Test, Array]:
            dtype, row, parts = header.decode(message)
            buffer = result_array((parts[self.rank], *row), dtype, source, out)
            width = row_bytes(buffer)
            nbytes = [n * width for n in parts]
            data = None if sent is None else as_bytes(sent)
            return self.transport.scatter(data, as_bytes(buffer), nbytes, root), buffer

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent = None if whole is None else contiguous(whole)
            signature = self._signature(call, rows=checksum)
            yield from self.verify(call, signature, None if sent is None else as_bytes(sent), prefix=prefix)
            yield self.transport.root_prefix(message, root)
            test, buffer = start(sent, target, source=whole)
            yield test
            return hand_out(buffer, target, out)

        def result(control: ControlBlock, signatures: Signatures) -> Result:
            dtype, row, parts = header.decode(message)
            first = sum(parts[: self.rank])
            mine = Rows(root, (sum(parts), *row), first, first + parts[self.rank], len(message))
            return concatenated(control, dtype, [mine])

        def plan() -> CallPlan:
            again = lambda x, out, scale: self._scatter(x, out, root)  # noqa: E731
            return CallPlan(root, wire, result, start, again, prefix)

        wire = None if whole is None else whole.dtype
        planned = lengths is None and (whole is None or whole is x)
        return self._collective("scatter", whole, steps, f"root {root}", plan if planned else None)

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
        if lengths is None and not async_op and (y := self._cached("all_to_all", x, None, out, None)) is not MISS:
            return y
        if is_device_array(x):
            return self._device(x).all_to_all(x, lengths, out, async_op)
        return self._run(self._all_to_all(x, out, lengths), async_op)

    def _all_to_all(self, x: Any, out: Any, lengths: Any = None) -> CollectiveOp[Any]:
        whole = _splittable(x, "all_to_all")
        sends, known = exchanged_rows(len(whole), lengths, self.rank, self.size)
        target = None if out is None else as_array(out, "out")
        more = "" if known is None else in_words(lengths, known).strip()
        dtype, row = whole.dtype, whole.shape[1:]
        prefix = as_bytes(np.array(sends, np.int64))
        table: list[list[int]] = []  # [source][destination], once the ranks have exchanged it

        def start(sent: Array, out: Array | None, *_: Any, source: Array | None = None) -> tuple[Test, Array]:
            buffer = result_array((sum(sends[self.rank] for sends in table), *row), dtype, source, out)
            width = row_bytes(sent)
            nbytes = [[n * width for n in sends] for sends in table]
            return self.transport.all_to_all(as_bytes(sent), as_bytes(buffer), nbytes), buffer

        def steps(call: CollectiveOp[Any]) -> Steps[Any]:
            sent = contiguous(whole)
            signature = self._signature(call, row, zlib.crc32(prefix.tobytes()))
            signatures = yield from self.verify(call, signature, as_bytes(sent), prefix=prefix)
            if known is not None:
                table[:] = known
            elif signatures is None:
                table[:] = yield from header.exchange_rows(self.transport, whole, sends)
            else:
                received = np.empty((self.size, self.size), np.int64)
                yield self.transport.all_prefixes(prefix, received.view(np.uint8))
                table[:] = received.tolist()
            test, buffer = start(sent, target, source=whole)
            yield test
            return hand_out(buffer, target, out)

        def result(control: ControlBlock, signatures: Signatures) -> Result:
            # An inline buffer holds the rows that its rank sends to each, then x.
            pieces = []
            for rank, sends in enumerate(table):
                first = sum(sends[: self.rank])
                pieces.append(Rows(rank, (sum(sends), *row), first, first + sends[self.rank], len(prefix)))
            return concatenated(control, dtype, pieces)

        def plan() -> CallPlan:
            again = lambda x, out, scale: self._all_to_all(x, out)  # noqa: E731
            return CallPlan(None, dtype, result, start, again, prefix)

        return self._collective("all_to_all", whole, steps, more, plan if lengths is None and whole is x else None)


def result_array(shape: tuple[int, ...], dtype: np.dtype[Any], source: Array | None, target: Array | None) -> Array:
    """Where a result arrives: in `target` if it can be there at once, which must not be the memory of `source`."""
    if target is None or target.shape != shape or target.dtype != dtype:
        return np.empty(shape, dtype)
    overlaps = source is not None and np.may_share_memory(target, source)
    return target if target.flags.c_contiguous and target.flags.writeable and not overlaps else np.empty(shape, dtype)


def hand_out(whole: Array, target: Array | None, out: Any) -> Any:
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
