"""Gradients that ranks hold in parts, looked at and scaled as a whole: each rank its part, and one small collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import Communicator
from ddp.ops import gradients

Array = Any


def total_norm(parts: Sequence[Array], p: float, comm: Communicator, xp: Any) -> Array:
    """The p-norm of all ranks' parts together, as one vector: 0-d float64, the same on every rank. Collective."""
    if xp is np:
        mine = xp.zeros(1, np.float64)
        for part in parts:
            found = _power_sum(xp, part, p)
            mine[0] = xp.maximum(mine[0], found) if p == math.inf else mine[0] + found
    else:
        mine = gradients.total_norm(xp, parts, p, root=False).astype(np.float64).reshape(1)
    # Gathered, and combined by each rank for itself: MPI's maximum may lose a nan.
    everyones = comm.all_gather(mine, lengths="equal")
    return everyones.max() if p == math.inf else everyones.sum() ** (1 / p)


def scale_parts(parts: Sequence[Array], factor: Any, xp: Any) -> None:
    """Multiplies them in place. factor: a number, or a 0-d array"""
    for part in parts:
        part *= xp.asarray(factor, part.dtype)


def any_infinite(parts: Sequence[Array], comm: Communicator, xp: Any) -> bool:
    """Whether an element is infinite or nan on any rank. Collective."""
    # The extremes are nan or infinite if anything is, and take no second array.
    mine = any(not bool(xp.isfinite(part.max()) and xp.isfinite(part.min())) for part in parts)
    return bool(comm.all_gather(np.array([mine]), lengths="equal").any())


def norm_dtype(dtypes: Sequence[Any]) -> Any:
    """The dtype of the norm of gradients of these: as wide as the widest, and float32 at least."""
    wide = [np.dtype(np.float32) if dtype.itemsize == 2 else dtype for dtype in dtypes]
    return np.result_type(*wide) if wide else np.dtype(np.float32)


def _power_sum(xp: Any, x: Array, p: float) -> Any:
    """The sum of |x|^p, or for inf the largest |x|; float64 of what was added up in float32 or wider."""
    if x.dtype.itemsize == 2:
        x = x.astype(np.float32)
    if p == 2:
        found = xp.dot(x, x)
    elif p == math.inf:
        found = xp.abs(x).max()
    else:
        found = (xp.abs(x) ** p).sum()
    return found.astype(np.float64)
