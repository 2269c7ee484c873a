"""What every element must be: inputs that each rank can compute for all the others, and the results that follow.

Inputs repeat after a prime number of elements, so that blocks in the wrong place show, and are whole numbers so small
that every dtype holds them and every sum of up to 80 ranks exactly.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from launcher.bench.collective_table import ROOT, Kind, partner

Array = np.ndarray[Any, np.dtype[Any]]

_PERIOD = 1009
# What no input is: a result that was never written is seen.
POISON = 125
_MOVED = 120  # values of what is only moved: below POISON
_SUMMED = 4  # values of what is reduced


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name, bfloat16 among them."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def poison(dtype: np.dtype[Any]) -> Any:
    """The value that a buffer holds before a collective writes into it: none of its results, except for bool."""
    return dtype.type(POISON)


def source(kind: Kind, rank: int, start: int, count: int, dtype: np.dtype[Any], op: str) -> Array:
    """Elements start ... start+count of what `rank` brings: (count,) of dtype."""
    return _repeat(_values(kind, rank, dtype, op), start, count)


def result(kind: Kind, rank: int, ranks: int, count: int, dtype: np.dtype[Any], op: str) -> Array | None:
    """What `rank` must hold after the collective: (count,) or (ranks·count,); None where it gets nothing."""
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
    start = rank * count if kind.x == "whole" else 0  # all_to_all: the block of each that is meant for this rank
    return np.concatenate([source(kind, other, start, count, dtype, op) for other in range(ranks)])


def wrong(got: Array, must: Array, op: str) -> int:
    """How many elements are not what they must be. A mean may be off by the rounding of its division."""
    if op == "mean" and must.dtype.kind not in "iub":
        a, b = (each.astype(np.complex128 if each.dtype.kind == "c" else np.float64) for each in (got, must))
        return int(np.count_nonzero(~(np.abs(a - b) <= 4 * _eps(must.dtype) * np.abs(b))))
    return int(np.count_nonzero(~(got == must)))  # NaN equals nothing


def _values(kind: Kind, rank: int, dtype: np.dtype[Any], op: str) -> Array:
    index = np.arange(_PERIOD) + 37 * rank
    if kind.reduces and op == "prod":
        return np.where(index % 8 == 0, 2, 1).astype(dtype)
    limit = 2 if dtype.kind == "b" else _SUMMED if kind.reduces else _MOVED
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
