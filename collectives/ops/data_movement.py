"""Collectives that move rows between ranks and leave their values alone: broadcast, gather, scatter and their kin."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from collectives.arrays import as_bytes, is_device_array, row_bytes, rows
from collectives.backends.shm.call_cache import CallPlan, Result, Rows, concatenated, filled, no_result
from collectives.backends.shm.segment import ControlBlock
from collectives.engine import array_header as header
from collectives.engine.call import MISS, CollectiveOp
from collectives.engine.communicator_base import CommunicatorBase, HostArrays
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
        arrays = self._arrays(x)
        return arrays.run(self._broadcast(arrays, x, self._check_root(root)), async_op)

    def _broadcast(self, arrays: Any, x: Any, root: int) -> CollectiveOp[Any]:
        is_root = self.rank == root
        array = arrays.read(x, written=not is_root)
        dtype, shape = array.dtype, array.shape

        def start(x: Array, out: Any, scale: Any, signatures: Signatures | None) -> tuple[Test, Array]:
            return self.transport.broadcast(as_bytes(x), root), x

        def body(transport: Any, moved: Any, signatures: Signatures | None) -> Steps[Any]:
            yield from arrays.complete(transport.broadcast(as_bytes(moved), root))
            if moved is not array and not is_root:
                arrays.copy(array, moved)
            return x

        def plan() -> CallPlan:
            return CallPlan(
                root,
                dtype if is_root else None,
                lambda control, _: filled(control, root, dtype, shape),
                start,
                lambda x, out, scale: self._broadcast(HostArrays(self), x, root),
                writes=not is_root,
            )

        planned = plan if array is x else None
        return arrays.call("broadcast", array, body, f"root {root}", shape=shape, shown=is_root, plan=planned)

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
        arrays = self._arrays(x)
        return arrays.run(self._gather(arrays, name, x, out, root, lengths), async_op)

    def _gather(
        self, arrays: Any, name: str, x: Any, out: Any, root: int | None, lengths: Lengths
    ) -> CollectiveOp[Any]:
        """root: None if every rank gets the result."""
        part = rows(arrays.read(x))
        known = joined_rows(len(part), lengths, self.rank, self.size)
        receives = root is None or self.rank == root
        target = None if out is None or not receives else arrays.read(out, "out")
        more = (("" if root is None else f"root {root}") + in_words(lengths, known)).strip()
        dtype, row = part.dtype, part.shape[1:]

        def move(transport: Any, sent: Any, whole: Any, counts: list[int]) -> Any:
            width = row_bytes(sent)
            nbytes = [n * width for n in counts]
            buffer = None if whole is None else as_bytes(whole)
            if root is not None:
                return transport.gather(as_bytes(sent), buffer, nbytes, root)
            return transport.all_gather(as_bytes(sent), buffer, nbytes)

        # Made here where its shape is known: another thread has no part in the order of the caller's CUDA stream.
        early = arrays.result((sum(known), *row), dtype, part, target) if receives and known is not None else None

        def body(transport: Any, sent: Any, signatures: Signatures | None) -> Steps[Any]:
            counts = yield from header.exchange_lengths(self.transport, part, known, signatures)
            whole = early
            if receives and whole is None:
                whole = arrays.result((sum(counts), *row), dtype, part, target)
            yield from arrays.complete(move(transport, sent, whole, counts))
            return None if whole is None else arrays.deliver(whole, target, out)

        def start(x: Array, out: Array | None, scale: Any, signatures: Signatures | None) -> tuple[Test, Array | None]:
            assert signatures is not None
            counts = [each[ROWS] for each in signatures]
            if receives and out is None:
                out = np.empty((sum(counts), *row), dtype)
            return move(self.transport, x, out, counts), out

        def result(control: ControlBlock, signatures: Signatures) -> Result:
            if not receives:
                return no_result()
            pieces = [Rows(rank, (each[ROWS], *row), 0, each[ROWS]) for rank, each in enumerate(signatures)]
            return concatenated(control, dtype, pieces)

        def plan() -> CallPlan:
            again = lambda x, out, scale: self._gather(HostArrays(self), name, x, out, root, lengths)  # noqa: E731
            return CallPlan((root, lengths), dtype, result, start, again)

        planned = plan if part is x and isinstance(lengths, str | None) else None
        return arrays.call(name, part, body, more, shape=row, rows=len(part), plan=planned)

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
        # Off the root, out alone tells that the root's x is on a GPU.
        arrays = self._arrays(x if is_device_array(x) else out)
        return arrays.run(self._scatter(arrays, x, out, self._check_root(root), lengths), async_op)

    def _scatter(
        self, arrays: Any, x: Any, out: Any, root: int, lengths: Sequence[int] | None = None
    ) -> CollectiveOp[Any]:
        whole = _splittable(arrays, x, "scatter") if self.rank == root else None
        # What the other ranks cannot know is dtype, shape and lengths: they stand at the head of what the root sends.
        message, prefix = header.empty(self.size), None
        if whole is not None:
            message = prefix = header.encode(whole, split_rows(len(whole), lengths, self.size))
        target = None if out is None else arrays.read(out, "out")
        checksum = 0 if prefix is None else zlib.crc32(prefix.tobytes())

        def move(arrays: Any, transport: Any, sent: Any, source: Any, target: Any) -> tuple[Any, Any]:
            dtype, row, parts = header.decode(message)
            buffer = arrays.result((parts[self.rank], *row), dtype, source, target)
            width = row_bytes(buffer)
            data = None if sent is None else as_bytes(sent)
            return transport.scatter(data, as_bytes(buffer), [n * width for n in parts], root), buffer

        def start(sent: Array | None, out: Array | None, *_: Any) -> tuple[Test, Array]:
            return move(HostArrays(self), self.transport, sent, None, out)

        def body(transport: Any, sent: Any, signatures: Signatures | None) -> Steps[Any]:
            yield self.transport.root_prefix(message, root)
            operation, buffer = move(arrays, transport, sent, whole, target)
            yield from arrays.complete(operation)
            return arrays.deliver(buffer, target, out)

        def result(control: ControlBlock, signatures: Signatures) -> Result:
            dtype, row, parts = header.decode(message)
            first = sum(parts[: self.rank])
            mine = Rows(root, (sum(parts), *row), first, first + parts[self.rank], len(message))
            return concatenated(control, dtype, [mine])

        def plan() -> CallPlan:
            again = lambda x, out, scale: self._scatter(HostArrays(self), x, out, root)  # noqa: E731
            return CallPlan(root, wire, result, start, again, prefix)

        wire = None if whole is None else whole.dtype
        planned = plan if lengths is None and (whole is None or whole is x) else None
        return arrays.call("scatter", whole, body, f"root {root}", rows=checksum, prefix=prefix, plan=planned)

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
        arrays = self._arrays(x)
        return arrays.run(self._all_to_all(arrays, x, out, lengths), async_op)

    def _all_to_all(self, arrays: Any, x: Any, out: Any, lengths: Any = None) -> CollectiveOp[Any]:
        whole = _splittable(arrays, x, "all_to_all")
        sends, known = exchanged_rows(len(whole), lengths, self.rank, self.size)
        target = None if out is None else arrays.read(out, "out")
        more = "" if known is None else in_words(lengths, known).strip()
        dtype, row = whole.dtype, whole.shape[1:]
        prefix = as_bytes(np.array(sends, np.int64))
        table: list[list[int]] = []  # [source][destination], once the ranks have exchanged it

        def move(arrays: Any, transport: Any, sent: Any, source: Any, target: Any) -> tuple[Any, Any]:
            buffer = arrays.result((sum(sends[self.rank] for sends in table), *row), dtype, source, target)
            width = row_bytes(sent)
            nbytes = [[n * width for n in sends] for sends in table]
            return transport.all_to_all(as_bytes(sent), as_bytes(buffer), nbytes), buffer

        def start(sent: Array, out: Array | None, *_: Any) -> tuple[Test, Array]:
            return move(HostArrays(self), self.transport, sent, None, out)

        def body(transport: Any, sent: Any, signatures: Signatures | None) -> Steps[Any]:
            if known is not None:
                table[:] = known
            elif signatures is None:
                table[:] = yield from header.exchange_rows(self.transport, whole, sends)
            else:
                received = np.empty((self.size, self.size), np.int64)
                yield self.transport.all_prefixes(prefix, received.view(np.uint8))
                table[:] = received.tolist()
            operation, buffer = move(arrays, transport, sent, whole, target)
            yield from arrays.complete(operation)
            return arrays.deliver(buffer, target, out)

        def result(control: ControlBlock, signatures: Signatures) -> Result:
            # An inline buffer holds the rows that its rank sends to each, then x.
            pieces = []
            for rank, sends in enumerate(table):
                first = sum(sends[: self.rank])
                pieces.append(Rows(rank, (sum(sends), *row), first, first + sends[self.rank], len(prefix)))
            return concatenated(control, dtype, pieces)

        def plan() -> CallPlan:
            again = lambda x, out, scale: self._all_to_all(HostArrays(self), x, out)  # noqa: E731
            return CallPlan(None, dtype, result, start, again, prefix)

        planned = plan if lengths is None and whole is x else None
        checksum = zlib.crc32(prefix.tobytes())
        return arrays.call("all_to_all", whole, body, more, shape=row, rows=checksum, prefix=prefix, plan=planned)


def _splittable(arrays: Any, x: Any, name: str) -> Any:
    whole = arrays.read(x)
    if whole.ndim == 0:
        raise ArgumentError(f"{name} splits axis 0, and x is 0-d")
    return whole
