"""The inputs of each rank, which every rank can compute, and the results that they must give.

Inputs repeat after a prime number of elements, so that a block in the wrong place is noticed. They are small whole
numbers: every dtype represents them exactly, and their sums over up to 80 ranks.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from launcher.bench.collective_table import ROOT, Collective, partner

Array = np.ndarray[Any, np.dtype[Any]]

# Inputs repeat after so many elements.
_PERIOD = 1009
# Fills buffers before a call. No input except bool has this value, so that a result that was never written is noticed.
POISON = 125
# Number of different input values: of collectives that only move data (all values are below POISON), and of those that
# reduce. Inputs of bool, and of the op prod, have two values.
_MOVED_VALUES = 120
_REDUCED_VALUES = 4


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of that name, which may be bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def poison(dtype: np.dtype[Any]) -> Any:
    """The value that fills a buffer before a collective writes to it. Sums over many ranks, and bools, may equal it."""
    return dtype.type(POISON)


def source(collective: Collective, rank: int, start: int, count: int, dtype: np.dtype[Any], op: str) -> Array:
    """The input of `rank`, from element `start` on: (count,) of dtype."""
    return _repeat(_values(collective, rank, dtype, op), start, count)


def result(collective: Collective, rank: int, ranks: int, count: int, dtype: np.dtype[Any], op: str) -> Array | None:
    """The result that `rank` must get: (count,) or (ranks·count,); None if it gets none."""
    if collective.empty or (collective.name in ("reduce", "gather") and rank != ROOT):
        return None
    if collective.reduces:
        start = rank * count if collective.x == "whole" else 0
        return _repeat(_reduction(collective, ranks, dtype, op), start, count)
    if collective.name == "send_recv":
        other = partner(rank, ranks)
        return None if other is None else source(collective, other, 0, count, dtype, op)
    if collective.name in ("broadcast", "scatter"):
        return source(collective, ROOT, rank * count if collective.x == "whole" else 0, count, dtype, op)
    start = rank * count if collective.x == "whole" else 0  # all_to_all: the block for this rank in each input
    return np.concatenate([source(collective, other, start, count, dtype, op) for other in range(ranks)])


def wrong(actual: Array, expected: Array, op: str) -> int:
    """How many elements are wrong. A floating-point or complex mean may have a relative error of 4 machine epsilons."""
    if op == "mean" and expected.dtype.kind not in "iub":
        dtype = np.complex128 if expected.dtype.kind == "c" else np.float64
        wide = expected.astype(dtype)
        tolerance = 4 * _eps(expected.dtype) * np.abs(wide)
        return int(np.count_nonzero(~(np.abs(actual.astype(dtype) - wide) <= tolerance)))
    return int(np.count_nonzero(~(actual == expected)))  # counts NaN, too


def _values(collective: Collective, rank: int, dtype: np.dtype[Any], op: str) -> Array:
    index = np.arange(_PERIOD) + 37 * rank
    if collective.reduces and op == "prod":
        return np.where(index % 8 == 0, 2, 1).astype(dtype)
    value_count = _REDUCED_VALUES if collective.reduces else _MOVED_VALUES
    if dtype.kind == "b":
        value_count = 2
    return (index % _PERIOD % value_count).astype(dtype)


def _reduction(collective: Collective, ranks: int, dtype: np.dtype[Any], op: str) -> Array:
    sum_dtype = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    combine = {"sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    total = _values(collective, 0, dtype, op).astype(sum_dtype)
    for rank in range(1, ranks):
        total = combine(total, _values(collective, rank, dtype, op).astype(sum_dtype))
    if op == "mean":
        total = total // ranks if sum_dtype.kind in "iu" else total / ranks
    return total.astype(dtype)


def _repeat(values: Array, start: int, count: int) -> Array:
    return np.resize(np.roll(values, -(start % _PERIOD)), count)


def _eps(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
