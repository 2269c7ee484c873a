"""The inputs of each rank, which every rank can compute, and the results that they must give.

Inputs repeat after a prime number of elements, so that a block in the wrong place is noticed. They are whole numbers,
small enough for every dtype to hold them, and their sums over up to 80 ranks, exactly.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from launcher.bench.collective_table import ROOT, Kind, partner

Array = np.ndarray[Any, np.dtype[Any]]

# Inputs repeat after so many elements.
_PERIOD = 1009
# Fills buffers before a call. No input has this value, so that a result that was never written is noticed.
POISON = 125
# How many values the inputs have: of collectives that only move them (all below POISON), and of those that reduce them.
_MOVED_VALUES = 120
_REDUCED_VALUES = 4


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of that name, which may be bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def poison(dtype: np.dtype[Any]) -> Any:
    """The value that fills a buffer before a collective writes to it. No result has it, except in bool."""
    return dtype.type(POISON)


def source(kind: Kind, rank: int, start: int, count: int, dtype: np.dtype[Any], op: str) -> Array:
    """The elements from `start` on of the input of `rank`: (count,) of dtype."""
    return _repeat(_values(kind, rank, dtype, op), start, count)


def result(kind: Kind, rank: int, ranks: int, count: int, dtype: np.dtype[Any], op: str) -> Array | None:
    """The result that `rank` must get: (count,) or (ranks·count,); None if it gets none."""
    if kind.empty or (kind.name in ("reduce", "gather") and rank != ROOT):
        return None
    if kind.reduces:
        start = rank * count if kind.x == "whole" else 0
        return _repeat(_reduction(kind, ranks, dtype, op), start, count)
    if kind.name == "send_recv":
        other = partner(rank, ranks)
        return None if other is None else source(kind, other, 0, count, dtype, op)
    if kind.name in ("broadcast", "scatter"):
        return source(kind, ROOT, rank * count if kind.x == "whole" else 0, count, dtype, op)
    start = rank * count if kind.x == "whole" else 0  # all_to_all: the block for this rank in each input
    return np.concatenate([source(kind, other, start, count, dtype, op) for other in range(ranks)])


def wrong(actual: Array, expected: Array, op: str) -> int:
    """How many elements are wrong. A mean may differ by the rounding of its division."""
    if op == "mean" and expected.dtype.kind not in "iub":
        wide = np.complex128 if expected.dtype.kind == "c" else np.float64
        a, b = actual.astype(wide), expected.astype(wide)
        return int(np.count_nonzero(~(np.abs(a - b) <= 4 * _eps(expected.dtype) * np.abs(b))))
    return int(np.count_nonzero(~(actual == expected)))  # counts NaN, too


def _values(kind: Kind, rank: int, dtype: np.dtype[Any], op: str) -> Array:
    index = np.arange(_PERIOD) + 37 * rank
    if kind.reduces and op == "prod":
        return np.where(index % 8 == 0, 2, 1).astype(dtype)
    limit = _REDUCED_VALUES if kind.reduces else _MOVED_VALUES
    if dtype.kind == "b":
        limit = 2
    return (index % _PERIOD % limit).astype(dtype)


def _reduction(kind: Kind, ranks: int, dtype: np.dtype[Any], op: str) -> Array:
    wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    combine = {"sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    total = _values(kind, 0, dtype, op).astype(wide)
    for rank in range(1, ranks):
        total = combine(total, _values(kind, rank, dtype, op).astype(wide))
    if op == "mean":
        total = total // ranks if wide.kind in "iu" else total / ranks
    return total.astype(dtype)


def _repeat(values: Array, start: int, count: int) -> Array:
    return np.resize(np.roll(values, -(start % _PERIOD)), count)


def _eps(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
