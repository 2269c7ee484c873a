"""Norm, clipping and scaling of many gradients at once.

On a GPU, one kernel works on all gradients of a dtype, and the host does not wait. Norms of an order other than 2, and
`clamp_values`, launch kernels for each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddp.ops.arrays import Array, array_function


@array_function
def total_norm(xp: Any, gradients: Sequence[Array], order: float, root: bool = True) -> Array:
    """The norm of the vector of all gradients, as a 0-d array: float64 if a gradient is float64, else float32.

    root: False leaves out the root, so that the results of several ranks can be added up. An order of inf has no root:
    the maximum of the ranks' results is the norm.
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
    if not factor >= 1:  # true for nan, too
        for g in gradients:
            xp.multiply(g, factor, out=g, casting="same_kind")


@array_function
def clamp_values(xp: Any, gradients: Sequence[Array], bound: float) -> None:
    """Limits each number to [-bound, bound]."""
    for g in gradients:
        xp.clip(g, -bound, bound, out=g)


@array_function
def unscale(xp: Any, gradients: Sequence[Array], scale: Array, found_inf: Array) -> None:
    """Divides the gradients by `scale`. Sets `found_inf` to 1 if a number in them is not finite.

    scale, found_inf: arrays of one float32
    """
    for g in gradients:
        if not xp.isfinite(g).all():
            found_inf[...] = 1
        xp.multiply(g, 1 / scale.reshape(()), out=g, casting="same_kind")


@array_function
def update_scale(
    xp: Any, scale: Array, good: Array, found_inf: Array, growth: float, backoff: float, interval: int
) -> None:
    """Updates the loss scale after a step, and sets `found_inf` to 0.

    Multiplies `scale` by `backoff` if a number in `found_inf` is not 0, and by `growth` after `interval` good steps. If
    the product is not finite, `scale` stays.
    scale: one float32; good: one int32, the number of good steps since the scale last grew or a step was not good
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
