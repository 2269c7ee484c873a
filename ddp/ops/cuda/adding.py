"""Rows added up where an index says, by atomic additions: their order, and the last digits, vary by the run."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp.ops._op import Array
from ddp.ops.cuda._source import REAL, Source

SOURCE = Source(
    "adding",
    """
extern "C" __global__ void add_rows(const T* g, const Index* where, T* out, Index rows, Index width) {
    FOR_EACH(k, rows * width) atomicAdd(out + where[k / width] * width + k % width, g[k]);
}
""",
    (*REAL, "int64"),
)


def _held(dtype: Any) -> Any:
    """The dtype to add up in."""
    if dtype.kind in "biu":
        return np.dtype("int64")
    return dtype if SOURCE.takes(dtype) else np.dtype("float32")


def add_into(xp: Any, out: Array, where: Array, g: Array) -> None:
    """Adds each row of `g` (N, D) to out[where[i]]. out: (M, D) in one piece, of a dtype that can be added to."""
    n, width = g.shape
    arrays = xp.ascontiguousarray(g, out.dtype), xp.ascontiguousarray(where, "int64"), out
    SOURCE.over(xp, "add_rows", out.dtype, n * width, *arrays, n, width)


def add_rows(xp: Any, where: Array, g: Array, out: Array) -> None:
    """Adds each row of `g` (N, D) to out[where[i]]. out: (M, D) in one piece."""
    kind = _held(out.dtype)
    if out.dtype == kind:
        add_into(xp, out, where, g)
    else:
        sums = out.astype(kind)
        add_into(xp, sums, where, g)
        out[...] = sums


def add_flat(xp: Any, x: Array, where: Array, g: Array) -> Array:
    """`x`, a vector, with each of `g` added at where (of its shape): x itself if it could be added to in place."""
    kind = _held(x.dtype)
    sums = x if x.dtype == kind and x.flags.c_contiguous else xp.ascontiguousarray(x, kind)
    add_into(xp, sums.reshape(-1, 1), where.reshape(-1), g.reshape(-1, 1))
    return sums if sums is x else sums.astype(x.dtype, copy=False)
