"""Images at another size: along each axis, an element is a mean of one or two of the old ones.

An axis is done at a time, by gathers forward and backward: which outputs read an input is a run of neighbours, so its
gradient is a few gathers too, and neither a product by a matrix of mostly zeros (which would spread nan) nor a scatter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, single
from ddp.ops.windows import Pair


class Tap(NamedTuple):
    """Along an axis: output i reads input `read[i]`, `weight[i]` times; `read` does not decrease. On the host."""

    read: np.ndarray[Any, Any]
    weight: np.ndarray[Any, Any] | None  # None: once


def taps(n: int, out: int, scale: float | None, mode: str, align_corners: bool, dtype: Any) -> list[Tap]:
    """Which of `n` elements each of `out` reads. scale: out/n as the caller gave it, None if he gave the size."""
    if (mode != "nearest-exact" and out == n) or (mode == "nearest" and out == 2 * n):
        scale = None  # as PyTorch has it: such sizes are copied, whatever the factor was before it was rounded
    kind = np.float64 if dtype == np.float64 else np.float32  # an index at an edge depends on the rounding
    at = np.arange(out, dtype=kind)
    step = kind(1 / scale if scale else n / out)
    if mode == "nearest":
        return [Tap(np.minimum(np.floor(at * step), n - 1).astype(np.intp), None)]
    if mode == "nearest-exact":
        return [Tap(np.minimum(np.floor((at + kind(0.5)) * step), n - 1).astype(np.intp), None)]
    if align_corners:
        position = at * kind((n - 1) / (out - 1) if out > 1 else 0)
    else:
        position = np.maximum((at + kind(0.5)) * step - kind(0.5), 0)
    below = np.minimum(position.astype(np.intp), n - 1)
    part = np.clip(position - below.astype(kind), 0, 1).astype(kind)
    return [Tap(below, 1 - part), Tap(np.minimum(below + 1, n - 1), part)]


def _gather(xp: Any, x: Array, axis: int, found: list[Tap]) -> Array:
    """z[i] = sum over the taps of weight[i] * x[read[i]]."""
    out = None
    for tap in found:
        part = x.take(xp.asarray(tap.read), axis=axis)
        if tap.weight is not None:
            part = part * _along(xp, tap.weight, axis, x)
        out = part if out is None else out + part
    return out


def _gather_back(xp: Any, g: Array, axis: int, found: list[Tap], n: int) -> Array:
    """dx[j] = sum over the taps, and the outputs that read j through them, of weight * g."""
    dx = None
    for read, weight in found:
        start, stop = np.searchsorted(read, np.arange(n)), np.searchsorted(read, np.arange(n), side="right")
        for k in range(max(int((stop - start).max(initial=0)), 1)):
            reader = np.minimum(start + k, len(read) - 1)
            part = g.take(xp.asarray(reader), axis=axis)
            if weight is not None:
                part = part * _along(xp, weight[reader], axis, g)
            if not (there := start + k < stop).all():
                part = xp.where(_along(xp, there, axis), part, part.dtype.type(0))
            dx = part if dx is None else dx + part
    return dx


def _along(xp: Any, values: np.ndarray[Any, Any], axis: int, like: Array | None = None) -> Array:
    array = xp.asarray(values if like is None else values.astype(like.dtype))
    return array[:, None] if axis == 2 else array


# z[p,q] = sum_ij u[p,i] * v[q,j] * x[i,j], where at most two of u[p] and two of v[q] are not 0;
# dx[i,j] = sum_pq u[p,i] * v[q,j] * g[p,q]
def _interpolate(
    xp: Any, x: Array, size: Pair, scales: tuple[float | None, float | None], mode: str, align_corners: bool
) -> tuple[Array, Any]:
    axes = []
    for axis in (3, 2):  # lines last: they are copied whole
        n, out, scale = x.shape[axis], size[axis - 2], scales[axis - 2]
        if n != out or scale not in (None, 1):
            axes.append((axis, n, taps(n, out, scale, mode, align_corners, x.dtype)))
    (out,) = single(x)
    for axis, _, found in axes:
        out = _gather(xp, out, axis, found)
    return out.astype(x.dtype, copy=not axes), axes


def _interpolate_backward(xp: Any, g: Array, needs: Needs, saved: Saved, axes: Any) -> Gradients:
    (dx,) = single(g)
    for axis, n, found in reversed(axes):
        dx = _gather_back(xp, dx, axis, found, n)
    return (dx.astype(g.dtype, copy=False),)


interpolate = Op("interpolate", _interpolate, _interpolate_backward, inputs=("x",))
