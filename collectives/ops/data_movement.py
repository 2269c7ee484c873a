"""Collectives that move rows between ranks without changing their values: broadcast, gather, scatter and others."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from collectives.arrays import (
    Lengths,
    as_bytes,
    as_tuples,
    check_lengths,
    describe_lengths,
    exchanged_rows,
    is_device_array,
    joined_rows,
    row_bytes,
    rows,
    split_rows,
)
from collectives.backends.shm.inline import Layout, Piece, PrefixOf, copy_piece, keep_input, make_join, no_result
from collectives.engine import array_header
from collectives.engine.call import CollectiveOp, Plan
from collectives.engine.communicator_base import CommunicatorBase
from collectives.errors import ArgumentError, MismatchError, name_ranks
from collectives.transport import ROWS, Signatures, Steps


class DataMovement(CommunicatorBase):
    """The data movements of a communicator.

    The `_plan_...` methods make plans. A plan outlives its calls, so it must not keep references to their arrays.
    """

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Copies the root's x into every other rank's x.

        x: (...), the same shape and dtype on every rank
        Returns: x
        Raises: ArgumentError if there is no such root, or x is read-only on another rank.
        """
        root = self._check_root(root)
        arrays = self._arrays(x)
        source = arrays.read(x)
        if self.rank != root:
            arrays.check_writable(source, "x")
        plan = self._plan(self._plan_broadcast, (arrays.device_text, "broadcast", root, source.dtype, source.shape))
        return arrays.start(plan, source, source, x, async_op)

    def _plan_broadcast(
        self, device_text: str, name: str, root: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Plan:
        is_root = self.rank == root

        def body(call: CollectiveOp[Any], transport: Any, sent: Any, _: Any) -> Steps[Any]:
            yield from call.arrays.complete(transport.broadcast(as_bytes(sent), root))
            if sent is not call.source and not is_root:
                call.arrays.copy(call.source, sent)
            return call.out

        def layout(signatures: Signatures, prefix_of: PrefixOf) -> Layout:
            if is_root:
                return Layout(dtype, [], keep_input)
            return Layout(dtype, [Piece(root, shape)], copy_piece)

        return Plan(name, f"root {root}", dtype, shape, agreed=shape, shown=is_root, body=body, layout=layout)

    def gather(self, x: Any, root: int = 0, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """Joins all ranks' x along axis 0 in rank order, on the root alone.

        x: (n_r, ...); the n_r may differ, the rest and the dtype may not; 0-d arrays count as (1,)
        lengths: all n_r, if every rank knows them; "equal" if all are equal; None: the ranks exchange them first
        out: (n_0 + n_1 + ..., ...), used on the root only
        Returns: (n_0 + n_1 + ..., ...) on the root, None elsewhere
        Raises: ArgumentError if there is no such root, or lengths or out do not fit; MismatchError on every rank if
        the ranks compare this call (see `check` of `init`), and lengths differ from the n_r.
        """
        return self._gather("gather", x, self._check_root(root), lengths, out, async_op)

    def all_gather(self, x: Any, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """Joins all ranks' x along axis 0 in rank order, on every rank.

        x, lengths: as in `gather`; out: (n_0 + n_1 + ..., ...)
        Returns: (n_0 + n_1 + ..., ...)
        Raises: ArgumentError if lengths or out do not fit; MismatchError as in `gather`.
        """
        return self._gather("all_gather", x, None, lengths, out, async_op)

    def _gather(self, name: str, x: Any, root: int | None, lengths: Lengths, out: Any, async_op: bool) -> Any:
        """Runs `gather` or `all_gather`. root: None if every rank gets the result"""
        arrays = self._arrays(x)
        part = rows(arrays.read(x))
        if lengths is not None and not isinstance(lengths, str):
            lengths = tuple(check_lengths(lengths, self.size))
        plan = self._plan(self._plan_gather, (arrays.device_text, name, root, lengths, part.dtype, part.shape))
        if root is not None and self.rank != root:
            return arrays.start(plan, part, None, None, async_op)
        target = None if out is None else arrays.read(out, "out")
        memory = None if plan.result is None else arrays.preallocate(plan.result, part.dtype, part, target)
        return arrays.start(plan, part, target, out, async_op, preallocated=memory)

    def _plan_gather(
        self,
        device_text: str,
        name: str,
        root: int | None,
        lengths: Lengths,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
    ) -> Plan:
        known_counts = joined_rows(shape[0], lengths, self.rank, self.size)
        receives = root is None or self.rank == root
        row = shape[1:]

        def body(call: CollectiveOp[Any], transport: Any, sent: Any, _: Any) -> Steps[Any]:
            counts = yield from array_header.exchange_lengths(self.transport, sent, known_counts, call.signatures)
            joined = call.preallocated
            if receives and joined is None:
                joined = call.arrays.result((sum(counts), *row), dtype, call.source, call.target)
            nbytes = [n * row_bytes(sent) for n in counts]
            buffer = None if joined is None else as_bytes(joined)
            if root is None:
                operation = transport.all_gather(as_bytes(sent), buffer, nbytes)
            else:
                operation = transport.gather(as_bytes(sent), buffer, nbytes, root)
            yield from call.arrays.complete(operation)
            return None if joined is None else call.arrays.deliver(joined, call.target, call.out)

        def layout(signatures: Signatures, prefix_of: PrefixOf) -> Layout | None:
            counts = [signature[ROWS] for signature in signatures]
            if known_counts is not None and counts != known_counts:
                return None
            if not receives:
                return Layout(dtype, [], no_result)
            pieces = [Piece(rank, (count, *row)) for rank, count in enumerate(counts)]
            return Layout(dtype, pieces, make_join(dtype), result=(sum(counts), *row))

        more = ("" if root is None else f"root {root}") + describe_lengths(lengths, known_counts)
        return Plan(
            name,
            more.strip(),
            dtype,
            shape,
            agreed=row,
            checksum=shape[0],
            body=body,
            layout=layout,
            result=(sum(known_counts), *row) if receives and known_counts is not None else None,
            depth=3,
        )

    def scatter(
        self, x: Any, root: int = 0, *, lengths: Sequence[int] | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """Splits the root's x along axis 0, one part for each rank.

        x: (n, ...) on the root. On another rank x is not sent, but an x on a GPU shows that the root's x is on a GPU
        lengths: the rows of each part, used on the root only; None: as `np.array_split` splits, as evenly as possible,
        longer parts first
        out: (n_r, ...). If the root's x is on a GPU, every other rank must pass an x or an out on a GPU
        Returns: (n_r, ...) of the root's dtype
        Raises: ArgumentError if there is no such root, or x, lengths or out do not fit.
        """
        # On the other ranks, x or out shows whether the root's x is on a GPU.
        arrays = self._arrays(x if is_device_array(x) else out)
        root = self._check_root(root)
        source = None
        key: tuple[Any, ...] = (None, None, None)
        if self.rank == root:
            source = _splittable(arrays, x, "scatter")
            parts = split_rows(len(source), lengths, self.size)
            key = (tuple(parts), source.dtype, source.shape)
        plan = self._plan(self._plan_scatter, (arrays.device_text, "scatter", root, *key))
        target = None if out is None else arrays.read(out, "out")
        return arrays.start(plan, source, target, out, async_op)

    def _plan_scatter(
        self,
        device_text: str,
        name: str,
        root: int,
        parts: Sequence[int] | None,
        dtype: np.dtype[Any] | None,
        shape: tuple[int, ...] | None,
    ) -> Plan:
        """Makes the plan of a scatter. parts, dtype, shape: None except on the root"""
        # Other ranks do not know dtype, shape and lengths: the root sends them first, in a header.
        prefix = None
        checksum = 0
        if parts is not None and shape is not None:
            prefix = array_header.encode(dtype, shape, parts)
            checksum = zlib.crc32(prefix.tobytes())

        def body(call: CollectiveOp[Any], transport: Any, sent: Any, _: Any) -> Steps[Any]:
            message = array_header.empty(self.size) if prefix is None else prefix
            yield self.transport.root_prefix(message, root)
            dtype, row, parts = array_header.decode(message)
            buffer = call.arrays.result((parts[self.rank], *row), dtype, call.source, call.target)
            data = None if sent is None else as_bytes(sent)
            nbytes = [n * row_bytes(buffer) for n in parts]
            yield from call.arrays.complete(transport.scatter(data, as_bytes(buffer), nbytes, root))
            return call.arrays.deliver(buffer, call.target, call.out)

        def layout(signatures: Signatures, prefix_of: PrefixOf) -> Layout:
            message = prefix_of(root)
            dtype, row, parts = array_header.decode(message)
            first = sum(parts[: self.rank])
            piece = Piece(root, (sum(parts), *row), first, first + parts[self.rank], len(message))
            return Layout(dtype, [piece], make_join(dtype), result=(parts[self.rank], *row))

        return Plan(
            name,
            f"root {root}",
            dtype,
            shape,
            checksum=checksum,
            prefix=prefix,
            body=body,
            layout=layout,
        )

    def all_to_all(
        self,
        x: Any,
        *,
        lengths: Sequence[int] | Sequence[Sequence[int]] | Literal["equal"] | None = None,
        out_lengths: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Splits each rank's x along axis 0 and sends part d to rank d; each rank gets the parts meant for it.

        x: (n_r, ...); the n_r may differ, the rest and the dtype may not
        lengths: the rows that this rank sends to each rank; None: as `np.array_split` splits. In both cases the ranks
        first exchange the lengths. They do not if `lengths` is "equal" (every rank sends n / size rows to each), or the
        whole table `lengths[source][destination]`
        out_lengths: the rows that this rank expects from each rank, which are checked; None: not checked
        out: (rows received, ...)
        Returns: (rows received, ...), the parts from all ranks joined in rank order
        Raises: ArgumentError if x is 0-d, or lengths, out_lengths or out do not fit; MismatchError on every rank if
        lengths are exchanged, and dtypes or row shapes differ, even if the ranks do not compare the call; or if the
        ranks compare the call, and a rank sends other numbers of rows than the table says.
        """
        arrays = self._arrays(x)
        source = _splittable(arrays, x, "all_to_all")
        if lengths is not None and not isinstance(lengths, str):
            lengths = as_tuples(lengths, self.size)
        if out_lengths is not None:
            out_lengths = tuple(check_lengths(out_lengths, self.size, "out_lengths"))
        key = (arrays.device_text, "all_to_all", lengths, out_lengths, source.dtype, source.shape)
        plan = self._plan(self._plan_all_to_all, key)
        target = None if out is None else arrays.read(out, "out")
        return arrays.start(plan, source, target, out, async_op)

    def _plan_all_to_all(
        self,
        device_text: str,
        name: str,
        lengths: Any,
        out_lengths: tuple[int, ...] | None,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
    ) -> Plan:
        sends, known_table = exchanged_rows(shape[0], lengths, self.rank, self.size)
        prefix = as_bytes(np.array(sends, np.int64))
        row = shape[1:]

        def body(call: CollectiveOp[Any], transport: Any, sent: Any, _: Any) -> Steps[Any]:
            table = known_table  # [source][destination]
            if table is None and call.signatures is None:
                table = yield from array_header.exchange_rows(self.transport, sent, sends)
            elif table is None:
                exchanged = np.empty((self.size, self.size), np.int64)
                yield self.transport.all_prefixes(prefix, exchanged.view(np.uint8))
                table = exchanged.tolist()
            if known_table is not None and call.signatures is not None:
                check_sends(table, call.signatures)
            received = [sends[self.rank] for sends in table]
            buffer = call.arrays.result((sum(received), *row), dtype, call.source, call.target)
            nbytes = [[n * row_bytes(sent) for n in sends] for sends in table]
            yield from call.arrays.complete(transport.all_to_all(as_bytes(sent), as_bytes(buffer), nbytes))
            if out_lengths is not None and list(out_lengths) != received:
                # Raised after the exchange, because the other ranks wait for the rows of this rank.
                raise ArgumentError(
                    f"rank {self.rank}: {name} expected rows {list(out_lengths)} from the ranks, and got {received}"
                )
            return call.arrays.deliver(buffer, call.target, call.out)

        def layout(signatures: Signatures, prefix_of: PrefixOf) -> Layout | None:
            # Each rank's inline buffer holds the prefix, which is the rank's `sends`, and then the rank's x.
            table = [prefix_of(rank).view(np.int64).tolist() for rank in range(self.size)]
            received = [sends[self.rank] for sends in table]
            if (known_table is not None and table != known_table) or (
                out_lengths is not None and received != list(out_lengths)
            ):
                return None
            pieces = []
            for rank, sends in enumerate(table):
                first = sum(sends[: self.rank])
                pieces.append(Piece(rank, (sum(sends), *row), first, first + sends[self.rank], len(prefix)))
            return Layout(dtype, pieces, make_join(dtype), result=(sum(received), *row))

        more = "" if known_table is None else describe_lengths(lengths, known_table).strip()
        return Plan(
            name,
            more,
            dtype,
            shape,
            agreed=row,
            checksum=checksum(sends),
            prefix=prefix,
            body=body,
            layout=layout,
        )


def checksum(sends: Sequence[int]) -> int:
    """The CRC-32 of `sends`, the numbers of rows that a rank sends to each rank."""
    return zlib.crc32(np.array(sends, np.int64).tobytes())


def check_sends(table: Sequence[Sequence[int]], signatures: Signatures) -> None:
    """Compares the caller's `table` with the checksums in `signatures`.

    Raises: MismatchError if a rank sends other numbers of rows than the table says.
    """
    wrong = [rank for rank, sends in enumerate(table) if signatures[rank][ROWS] != checksum(sends)]
    if wrong:
        raise MismatchError(f"lengths say that all send rows as in {table}, which is not so for {name_ranks(wrong)}")


def _splittable(arrays: Any, x: Any, name: str) -> Any:
    source = arrays.read(x)
    if source.ndim == 0:
        raise ArgumentError(f"{name} splits axis 0, and x is 0-d")
    return source
