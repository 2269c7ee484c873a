"""Collectives that move rows between ranks and leave their values alone: broadcast, gather, scatter and their kin."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from collectives.arrays import (
    Lengths,
    as_bytes,
    exchanged_rows,
    in_words,
    is_device_array,
    joined_rows,
    row_bytes,
    rows,
    split_rows,
)
from collectives.backends.shm.call_cache import CallPlan, Piece, filled, joined, nothing, unchanged
from collectives.engine import array_header as header
from collectives.engine.call import CollectiveOp
from collectives.engine.communicator_base import CommunicatorBase
from collectives.errors import ArgumentError, MismatchError
from collectives.transport import ROWS, Signatures, Steps, name_ranks


class DataMovement(CommunicatorBase):
    """The movements of a communicator. What a `CallPlan` holds outlives the call: none of its arrays may be there."""

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """The root's x, on every rank: written into x elsewhere.

        x: (...), the same shape and dtype on every rank
        Returns: x
        Raises: ArgumentError if there is no such root, or x is read-only off the root.
        """
        return self._call(self._broadcast, x, ("broadcast", root), async_op=async_op)

    def _broadcast(self, arrays: Any, x: Any, out: Any, scale: Any, name: str, root: int) -> CollectiveOp[Any]:
        root = self._check_root(root)
        is_root = self.rank == root
        array = arrays.read(x, written=not is_root)
        dtype, shape = array.dtype, array.shape

        def body(transport: Any, moved: Any, signatures: Signatures | None) -> Steps[Any]:
            yield from arrays.complete(transport.broadcast(as_bytes(moved), root))
            if moved is not array and not is_root:
                arrays.copy(array, moved)
            return x

        def plan(signatures: Signatures) -> CallPlan:
            if is_root:
                return CallPlan(dtype, [], unchanged)
            return CallPlan(dtype, [Piece(root, shape)], filled, brings=False, writes=True)

        planned = plan if array is x else None
        return arrays.call(name, array, body, f"root {root}", shape=shape, shown=is_root, plan=planned)

    def gather(self, x: Any, root: int = 0, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on the root alone.

        x: (n_r, ...); the n_r may differ, the rest and the dtype may not; 0-d arrays count as (1,)
        lengths: the n_r, if every rank knows them; "equal" if all are x's own; None: they are exchanged first
        out: (n_0 + n_1 + ..., ...), used on the root only
        Returns: (n_0 + n_1 + ..., ...) on the root, None elsewhere
        Raises: ArgumentError if there is no such root, or lengths or out do not fit.
        """
        out = out if self.rank == root else None
        return self._call(self._gather, x, ("gather", root, lengths), out, None, async_op)

    def all_gather(self, x: Any, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on every rank.

        x, lengths: as in `gather`; out: (n_0 + n_1 + ..., ...)
        Returns: (n_0 + n_1 + ..., ...)
        Raises: ArgumentError if lengths or out do not fit.
        """
        return self._call(self._gather, x, ("all_gather", None, lengths), out, None, async_op)

    def _gather(
        self, arrays: Any, x: Any, out: Any, scale: Any, name: str, root: int | None, lengths: Lengths
    ) -> CollectiveOp[Any]:
        """root: None if every rank gets the result."""
        root = None if name == "all_gather" else self._check_root(root)
        part = rows(arrays.read(x))
        known = joined_rows(len(part), lengths, self.rank, self.size)
        receives = root is None or self.rank == root
        target = None if out is None or not receives else arrays.read(out, "out")
        more = (("" if root is None else f"root {root}") + in_words(lengths, known)).strip()
        dtype, row = part.dtype, part.shape[1:]

        # Made here where its shape is known: another thread has no part in the order of the caller's CUDA stream.
        early = arrays.result((sum(known), *row), dtype, part, target) if receives and known is not None else None

        def body(transport: Any, sent: Any, signatures: Signatures | None) -> Steps[Any]:
            counts = yield from header.exchange_lengths(self.transport, part, known, signatures)
            whole = early
            if receives and whole is None:
                whole = arrays.result((sum(counts), *row), dtype, part, target)
            nbytes = [n * row_bytes(sent) for n in counts]
            buffer = None if whole is None else as_bytes(whole)
            if root is None:
                operation = transport.all_gather(as_bytes(sent), buffer, nbytes)
            else:
                operation = transport.gather(as_bytes(sent), buffer, nbytes, root)
            yield from arrays.complete(operation)
            return None if whole is None else arrays.deliver(whole, target, out)

        def plan(signatures: Signatures) -> CallPlan:
            if not receives:
                return CallPlan(dtype, [], nothing)
            pieces = [Piece(rank, (each[ROWS], *row)) for rank, each in enumerate(signatures)]
            return CallPlan(dtype, pieces, joined(dtype))

        planned = plan if part is x else None
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
        # Off the root, out alone tells that the root's x is on a GPU.
        like = x if is_device_array(x) else out
        x, lengths = (x, lengths) if self.rank == root else (None, None)
        return self._call(self._scatter, x, ("scatter", root, lengths), out, None, async_op, like)

    def _scatter(
        self, arrays: Any, x: Any, out: Any, scale: Any, name: str, root: int, lengths: Sequence[int] | None
    ) -> CollectiveOp[Any]:
        root = self._check_root(root)
        whole = _splittable(arrays, x, name) if self.rank == root else None
        # What the other ranks cannot know is dtype, shape and lengths: they stand at the head of what the root sends.
        message, prefix = header.empty(self.size), None
        if whole is not None:
            message = prefix = header.encode(whole, split_rows(len(whole), lengths, self.size))
        target = None if out is None else arrays.read(out, "out")
        checksum = 0 if prefix is None else zlib.crc32(prefix.tobytes())

        def body(transport: Any, sent: Any, signatures: Signatures | None) -> Steps[Any]:
            yield self.transport.root_prefix(message, root)
            dtype, row, parts = header.decode(message)
            buffer = arrays.result((parts[self.rank], *row), dtype, whole, target)
            data = None if sent is None else as_bytes(sent)
            nbytes = [n * row_bytes(buffer) for n in parts]
            yield from arrays.complete(transport.scatter(data, as_bytes(buffer), nbytes, root))
            return arrays.deliver(buffer, target, out)

        is_array = whole is None or whole is x

        def plan(signatures: Signatures) -> CallPlan:
            dtype, row, parts = header.decode(message)
            first = sum(parts[: self.rank])
            mine = Piece(root, (sum(parts), *row), first, first + parts[self.rank], len(message))
            return CallPlan(dtype, [mine], joined(dtype), prefix=prefix)

        planned = plan if is_array else None
        return arrays.call(name, whole, body, f"root {root}", rows=checksum, prefix=prefix, plan=planned)

    def all_to_all(
        self,
        x: Any,
        *,
        lengths: Sequence[int] | Sequence[Sequence[int]] | Literal["equal"] | None = None,
        out_lengths: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Each rank's x split along axis 0, part d for rank d; each rank gets the parts meant for it.

        x: (n_r, ...); the n_r may differ, the rest and the dtype may not
        lengths: the rows that this rank sends to each rank; None: `np.array_split`'s rule. In both cases the ranks
        first tell each other the lengths. No exchange takes place with "equal" (every rank sends n / size rows to each)
        or with the whole table, `lengths[source][destination]`
        out_lengths: the rows that this rank expects from each rank, to be checked; None: any
        out: (rows received, ...)
        Returns: (rows received, ...), what came from each rank, joined in rank order
        Raises: ArgumentError if x is 0-d, or lengths, out_lengths or out do not fit; MismatchError on every rank if
        dtypes or row shapes differ and lengths are exchanged.
        """
        return self._call(self._all_to_all, x, ("all_to_all", lengths, out_lengths), out, None, async_op)

    def _all_to_all(
        self, arrays: Any, x: Any, out: Any, scale: Any, name: str, lengths: Any, out_lengths: Sequence[int] | None
    ) -> CollectiveOp[Any]:
        whole = _splittable(arrays, x, name)
        sends, known = exchanged_rows(len(whole), lengths, self.rank, self.size)
        target = None if out is None else arrays.read(out, "out")
        more = "" if known is None else in_words(lengths, known).strip()
        dtype, row = whole.dtype, whole.shape[1:]
        prefix = as_bytes(np.array(sends, np.int64))
        table: list[list[int]] = [] if known is None else known  # [source][destination]

        def body(transport: Any, sent: Any, signatures: Signatures | None) -> Steps[Any]:
            if not table and signatures is None:
                table[:] = yield from header.exchange_rows(self.transport, whole, sends)
            elif not table:
                received = np.empty((self.size, self.size), np.int64)
                yield self.transport.all_prefixes(prefix, received.view(np.uint8))
                table[:] = received.tolist()
            elif signatures is not None:
                check_sends(table, signatures)
            received_lengths = [sends[self.rank] for sends in table]
            buffer = arrays.result((sum(received_lengths), *row), dtype, whole, target)
            nbytes = [[n * row_bytes(sent) for n in sends] for sends in table]
            yield from arrays.complete(transport.all_to_all(as_bytes(sent), as_bytes(buffer), nbytes))
            if out_lengths is not None and list(out_lengths) != received_lengths:
                # Only now: the other ranks wait for this one's rows.
                raise ArgumentError(
                    f"rank {self.rank}: {name} expected rows {out_lengths} from the ranks, and got {received_lengths}"
                )
            return arrays.deliver(buffer, target, out)

        def plan(signatures: Signatures) -> CallPlan:
            # An inline buffer holds the rows that its rank sends to each, then x.
            pieces = []
            for rank, sends in enumerate(table):
                first = sum(sends[: self.rank])
                pieces.append(Piece(rank, (sum(sends), *row), first, first + sends[self.rank], len(prefix)))
            return CallPlan(dtype, pieces, joined(dtype), prefix=prefix)

        planned = plan if whole is x else None
        return arrays.call(name, whole, body, more, shape=row, rows=checksum(sends), prefix=prefix, plan=planned)


def checksum(sends: Sequence[int]) -> int:
    """The CRC-32 of the numbers of rows that a rank sends to each rank."""
    return zlib.crc32(np.array(sends, np.int64).tobytes())


def check_sends(table: Sequence[Sequence[int]], signatures: Signatures) -> None:
    """Compares a given table of rows with what the ranks show of their own. Raises: MismatchError if they differ."""
    wrong = [rank for rank, sends in enumerate(table) if signatures[rank][ROWS] != checksum(sends)]
    if wrong:
        raise MismatchError(f"lengths say that rows are sent as in {table}; not so by {name_ranks(wrong)}")


def _splittable(arrays: Any, x: Any, name: str) -> Any:
    whole = arrays.read(x)
    if whole.ndim == 0:
        raise ArgumentError(f"{name} splits axis 0, and x is 0-d")
    return whole
