"""Before data moves the ranks show each other what they are about to call: a wrong call is an error, never a hang.

A header is a line of int64 words. One of them is a hash of all that must be the same on every rank (the collective, its
op and root, dtype and shape; the length along axis 0 only where it may not differ), so comparing costs one look a rank.
Where they differ the ranks tell each other in words what they called, and each raises the same table.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Characters of each text of a call, in the table.
LONGEST = 200


@functools.lru_cache(maxsize=4096)
def signature_hash(name: str, more: str, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> int:
    """A hash, the same in every process, of what ranks must agree on; 63 bits."""
    text = repr((name, more, None if dtype is None else (dtype.str, dtype.name), shape))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def table(made: Sequence[Sequence[str]], ranks: Sequence[int], me: int, number: int) -> str:
    """The error that every rank raises: one line a call, with the ranks that made it.

    made: name, other arguments, array and site of each rank's call; ranks: their numbers
    """
    calls: dict[tuple[str, ...], list[int]] = {}
    for rank, words in zip(ranks, made, strict=True):
        calls.setdefault(tuple(words), []).append(rank)
    rows = [("rank", "call", "with", "array", "at")]
    for (name, more, array, site), who in calls.items():
        rows.append((spans(who), f"{name} #{number}", more or "-", array or "-", site))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["  " + "  ".join(row).rstrip() for row in padded]
    return (
        f"rank {me}: the ranks made different calls at the same place in the order, or brought arrays that do not fit "
        "each other:\n" + "\n".join(lines) + "\n  Every rank must make the same calls in the same order."
    )


def spans(ranks: Sequence[int]) -> str:
    """`spans([0, 1, 2, 5]) == "0-2, 5"`"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
