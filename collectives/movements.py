"""Collectives that move rows between ranks and leave their values alone: broadcast, gather, scatter and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from collectives import header
from collectives.arrays import (
    as_array,
    as_bytes,
    check_lengths,
    check_out,
    contiguous,
    even_lengths,
    row_bytes,
    rows,
    writable,
)
from collectives.calls import Calls, Lengths
from collectives.errors import ArgumentError, MismatchError
from collectives.progress import Steps
from collectives.reduction import Array


class Movements(Calls):
    """The movements of a communicator."""

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """The root's x, on every rank: written into x elsewhere.

        x: (...), the same shape and dtype on every rank
        Returns: x as an array
        Raises: ArgumentError if there is no such root, or x is read-only off the root.
        """
        array = as_array(x)
        self._check_root(root)
        if self.rank != root:
            writable(array, "x")

        def steps() -> Steps[Array]:
            moved = contiguous(array)
            yield self._transport.broadcast(as_bytes(moved), root)
            if moved is not array and self.rank != root:
                np.copyto(array, moved)
            return array

        return self._run("broadcast", array, steps(), async_op, f"root {root}")

    def gather(self, x: Any, root: int = 0, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on the root alone.

        x: (n_r, ...); the n_r may differ, the rest and the dtype may not; 0-d arrays count as (1,)
        lengths: the n_r, if every rank knows them; "equal" if all are x's own; None: they are exchanged first
        out: (n_0 + n_1 + ..., ...), used on the root only
        Returns: (n_0 + n_1 + ..., ...) on the root, None elsewhere
        Raises: ArgumentError if there is no such root, or lengths or out do not fit.
        """
        self._check_root(root)
        part, known = self._part(x, lengths)
        target = None if out is None or self.rank != root else as_array(out, "out")

        def steps() -> Steps[Array | None]:
            counts = known if known is not None else (yield from self._exchange_lengths(part))
            whole = _room((sum(counts), *part.shape[1:]), part, target) if self.rank == root else None
            width = row_bytes(part)
            room = None if whole is None else as_bytes(whole)
            yield self._transport.gather(as_bytes(contiguous(part)), room, [n * width for n in counts], root)
            return None if whole is None else _hand_out(whole, target, out)

        return self._run("gather", part, steps(), async_op, f"root {root}")

    def all_gather(self, x: Any, *, lengths: Lengths = None, out: Any = None, async_op: bool = False) -> Any:
        """All ranks' x joined along axis 0 in rank order, on every rank.

        x, lengths: as in `gather`; out: (n_0 + n_1 + ..., ...)
        Returns: (n_0 + n_1 + ..., ...)
        Raises: ArgumentError if lengths or out do not fit.
        """
        part, known = self._part(x, lengths)
        target = None if out is None else as_array(out, "out")

        def steps() -> Steps[Array]:
            counts = known if known is not None else (yield from self._exchange_lengths(part))
            whole = _room((sum(counts), *part.shape[1:]), part, target)
            width = row_bytes(part)
            yield self._transport.all_gather(as_bytes(contiguous(part)), as_bytes(whole), [n * width for n in counts])
            return _hand_out(whole, target, out)

        return self._run("all_gather", part, steps(), async_op)

    def scatter(
        self, x: Any, root: int = 0, *, lengths: Sequence[int] | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """The root's x split along axis 0, one part for each rank.

        x: (n, ...) on the root, ignored elsewhere; lengths: the parts' lengths, read on the root only; None:
        `np.array_split`'s rule, as even as possible, longer parts first; out: (n_r, ...)
        Returns: (n_r, ...) of the root's dtype
        Raises: ArgumentError if there is no such root, or x, lengths or out do not fit.
        """
        self._check_root(root)
        whole = _splittable(x, "scatter") if self.rank == root else None
        told = header.empty(self.size)
        if whole is not None:
            counts = even_lengths(len(whole), self.size) if lengths is None else check_lengths(lengths, self.size)
            if sum(counts) != len(whole):
                raise ArgumentError(f"lengths {counts} add up to {sum(counts)}, x has {len(whole)} rows")
            told = header.encode(whole, counts)
        target = None if out is None else as_array(out, "out")

        def steps() -> Steps[Array]:
            # What the other ranks cannot know: dtype, shape and lengths.
            yield self._transport.broadcast(told, root)
            dtype, row_shape, parts = header.decode(told)
            room = _room((parts[self.rank], *row_shape), np.empty(0, dtype) if whole is None else whole, target)
            width = row_bytes(room)
            sent = None if whole is None else as_bytes(contiguous(whole))
            yield self._transport.scatter(sent, as_bytes(room), [n * width for n in parts], root)
            return _hand_out(room, target, out)

        return self._run("scatter", whole, steps(), async_op, f"root {root}")

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
        whole = _splittable(x, "all_to_all")
        sends, known = self._exchanges(whole, lengths)
        target = None if out is None else as_array(out, "out")

        def steps() -> Steps[Array]:
            receives = known if known is not None else (yield from self._tell_each(whole, sends))
            room = _room((sum(receives), *whole.shape[1:]), whole, target)
            width = row_bytes(whole)
            yield self._transport.all_to_all(
                as_bytes(contiguous(whole)), as_bytes(room), [n * width for n in sends], [n * width for n in receives]
            )
            return _hand_out(room, target, out)

        return self._run("all_to_all", whole, steps(), async_op)

    def _part(self, x: Any, lengths: Lengths) -> tuple[Array, list[int] | None]:
        part = rows(as_array(x))
        if lengths is None:
            return part, [len(part)] if self.size == 1 else None
        if isinstance(lengths, str):
            if lengths != "equal":
                raise ArgumentError(f'lengths should be a list, "equal" or None, is {lengths!r}')
            return part, [len(part)] * self.size
        known = check_lengths(lengths, self.size)
        if known[self.rank] != len(part):
            raise ArgumentError(f"lengths[{self.rank}] is {known[self.rank]}, but x has {len(part)} rows on this rank")
        return part, known

    def _exchange_lengths(self, part: Array) -> Steps[list[int]]:
        told = np.empty((self.size, 2), np.int64)
        mine = np.array([len(part), header.fingerprint(part)], np.int64)
        yield self._transport.all_gather(as_bytes(mine), as_bytes(told), [mine.nbytes] * self.size)
        self._check_rows(part, told[:, 1])
        return told[:, 0].tolist()

    def _exchanges(self, whole: Array, lengths: Any) -> tuple[list[int], list[int] | None]:
        """The rows that this rank sends to each rank; those that it receives, if they are known already."""
        n, size = len(whole), self.size
        if isinstance(lengths, str):
            if lengths != "equal":
                raise ArgumentError(f'lengths should be a list, a table, "equal" or None, is {lengths!r}')
            if n % size:
                raise ArgumentError(f'lengths="equal" needs a multiple of {size} rows, x has {n} on rank {self.rank}')
            return [n // size] * size, [n // size] * size
        if lengths is None:
            sends = even_lengths(n, size)
        elif np.ndim(lengths) == 2:
            table = [check_lengths(row, size) for row in lengths]
            if len(table) != size:
                raise ArgumentError(f"lengths should be a table of {size} rows, one a source, has {len(table)}")
            return self._sum_up(table[self.rank], whole), [row[self.rank] for row in table]
        else:
            sends = self._sum_up(check_lengths(lengths, size), whole)
        return sends, sends if size == 1 else None

    def _sum_up(self, sends: list[int], whole: Array) -> list[int]:
        if sum(sends) != len(whole):
            raise ArgumentError(f"lengths {sends} add up to {sum(sends)}, x has {len(whole)} rows on rank {self.rank}")
        return sends

    def _tell_each(self, whole: Array, sends: list[int]) -> Steps[list[int]]:
        mark = header.fingerprint(whole)
        mine = np.array([[n, mark] for n in sends], np.int64)
        told = np.empty((self.size, 2), np.int64)
        each = [mine.itemsize * 2] * self.size
        yield self._transport.all_to_all(as_bytes(mine), as_bytes(told), each, each)
        self._check_rows(whole, told[:, 1])
        return told[:, 0].tolist()

    def _check_rows(self, part: Array, marks: Array) -> None:
        if (marks != marks[0]).any():
            table = ", ".join(f"rank {rank}: {mark:08x}" for rank, mark in enumerate(marks))
            raise MismatchError(
                f"rank {self.rank} brings rows of {part.dtype} {part.shape[1:]}; only the length along axis 0 may "
                f"differ between ranks, and these fingerprints of dtype and row shape should be equal: {table}"
            )


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
