"""Lengths along axis 0: who brings, gets or sends how many rows, as callers say it and as ranks must agree on it.

One place for arrays of either kind, on the host or on a GPU: what is not said the same way on all ranks is a mismatch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from collectives.errors import ArgumentError

#: Rows of each rank; "equal": of every rank as many as of this one; None: the ranks tell each other.
Lengths = Sequence[int] | Literal["equal"] | None


def check_lengths(lengths: Sequence[int], size: int) -> list[int]:
    """One length a rank, along axis 0.

    Raises: ArgumentError unless there are `size` whole numbers of at least 0.
    """
    try:
        read = [operator.index(length) for length in lengths]  # int() would cut 4.5 down to 4
    except (TypeError, ValueError):
        raise ArgumentError(f"lengths should be whole numbers, one a rank, are {lengths!r}") from None
    if len(read) != size or any(length < 0 for length in read):
        raise ArgumentError(f"lengths should be {size} numbers of at least 0, one a rank, are {read}")
    return read


def even_lengths(total: int, size: int) -> list[int]:
    """`np.array_split`'s rule: the first `total % size` ranks get one more. `even_lengths(7, 3) == [3, 2, 2]`"""
    return [total // size + (rank < total % size) for rank in range(size)]


def split_rows(rows: int, lengths: Sequence[int] | None, size: int) -> list[int]:
    """The rows of each rank when `rows` of them are split by lengths, or as evenly as possible.

    Raises: ArgumentError if lengths do not add up to them.
    """
    parts = even_lengths(rows, size) if lengths is None else check_lengths(lengths, size)
    if sum(parts) != rows:
        raise ArgumentError(f"lengths {parts} add up to {sum(parts)}, x has {rows} rows")
    return parts


def joined_rows(rows: int, lengths: Lengths, rank: int, size: int) -> list[int] | None:
    """The rows of each rank when each brings some, this one `rows`; None if the ranks have to tell each other.

    Raises: ArgumentError if lengths say another number for this rank.
    """
    if lengths is None:
        return [rows] if size == 1 else None
    if isinstance(lengths, str):
        if lengths != "equal":
            raise ArgumentError(f'lengths should be a list, "equal" or None, is {lengths!r}')
        return [rows] * size
    known = check_lengths(lengths, size)
    if known[rank] != rows:
        raise ArgumentError(f"lengths[{rank}] is {known[rank]}, but x has {rows} rows on this rank")
    return known


def exchanged_rows(rows: int, lengths: Any, rank: int, size: int) -> tuple[list[int], list[list[int]] | None]:
    """The rows that this rank, which has `rows`, sends to each; the whole table, if it is known already.

    Raises: ArgumentError if lengths are none, or do not add up.
    """
    table = None
    if isinstance(lengths, str):
        if lengths != "equal":
            raise ArgumentError(f'lengths should be a list, a table, "equal" or None, is {lengths!r}')
        if rows % size:
            raise ArgumentError(f'lengths="equal" needs a multiple of {size} rows, x has {rows} on rank {rank}')
        table = [[rows // size] * size] * size
    elif lengths is not None and np.ndim(lengths) == 2:
        table = [check_lengths(row, size) for row in lengths]
        if len(table) != size:
            raise ArgumentError(f"lengths should be a table of {size} rows, one a source, has {len(table)}")
    if table is not None:
        sends = table[rank]
    else:
        sends = even_lengths(rows, size) if lengths is None else check_lengths(lengths, size)
    if sum(sends) != rows:
        raise ArgumentError(f"lengths {sends} add up to {sum(sends)}, x has {rows} rows on rank {rank}")
    return sends, [sends] if size == 1 else table


def in_words(lengths: object, known: object) -> str:
    """Lengths in words that are the same whatever kind of sequence, and of numbers, they are given as."""
    if lengths is None:
        return ""
    return f" lengths {lengths if isinstance(lengths, str) else known}"
