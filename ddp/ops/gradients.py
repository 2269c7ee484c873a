"""Norm, clipping and scaling of many gradients at once. A device does each in one launch, without a wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddp.ops.arrays import Array, array_function


@array_function
def total_norm(xp: Any, gradients: Sequence[Array], order: float, root: bool = True) -> Array:
    """The norm of all gradients as one vector: 0-d, float32, or float64 if one of them is.

    root: False leaves out the root, so that the results of several ranks can be added up (of order inf: the maximum)
    """
    dtype = "float64" if any(g.dtype == "float64" for g in gradients) else "float32"
    flat = [g.astype(dtype, copy=False).reshape(-1) for g in gradients]
    if order == math.inf:
        return xp.stack([xp.abs(x).max(initial=0) for x in flat]).max()
    total = xp.stack([xp.dot(x, x) if order == 2 else (xp.abs(x) ** order).sum() for x in flat]).sum()
    return total ** (1 / order) if root else total


@array_function
def scale_to_norm(xp: Any, gradients: Sequence[Array], total: Array, largest: float) -> None:
    """Scales the gradients so that their norm, which is `total`, is at most `largest`."""
    factor = float(largest) / (total + 1e-6)
    if not factor >= 1:  # nan as well
        for g in gradients:
            xp.multiply(g, factor, out=g, casting="same_kind")


@array_function
def clamp_values(xp: Any, gradients: Sequence[Array], bound: float) -> None:
    """Limits each number to [-bound, bound]."""
    for g in gradients:
        xp.clip(g, -bound, bound, out=g)


@array_function
def unscale(xp: Any, gradients: Sequence[Array], scale: Array, found_inf: Array) -> None:
    """Divides the gradients by `scale`; `found_inf` becomes 1 if one was not finite. Both: one float32 in an array."""
    for g in gradients:
        if not xp.isfinite(g).all():
            found_inf[...] = 1
        xp.multiply(g, 1 / scale.reshape(()), out=g, casting="same_kind")


@array_function
def update_scale(
    xp: Any, scale: Array, good: Array, found_inf: Array, growth: float, backoff: float, interval: int
) -> None:
    """The loss scale after a step: it shrinks if one of `found_inf` is not 0, and grows after `interval` good steps.

    `found_inf` is zero afterwards. scale: one float32; good: one int32, the steps since the last change
    """
    overflowed = bool(found_inf.any())
    found_inf[...] = 0
    good[...] = 0 if overflowed else good + 1
    factor = 1.0
    if overflowed:
        factor = backoff
    elif int(good.reshape(())) == interval:
        factor = growth
    if math.isfinite(after := float(scale.reshape(())) * factor):
        scale[...] = after
    good[...] = good % interval
