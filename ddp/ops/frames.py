"""Frames around the last dimensions: constant, or continued by what lies inside."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, total
from ddp.ops.shape import along, stretches

Widths = tuple[tuple[int, int], ...]  # (before, after) of every axis


# z = x in a frame of `value`, or cropped where a width is negative;  dx = g without the frame, 0 where cropped
def _pad(xp: Any, x: Array, widths: Widths, value: float) -> tuple[Array, Any]:
    out = xp.full([n + before + after for n, (before, after) in zip(x.shape, widths, strict=True)], value, x.dtype)
    kept, inside = _overlap(widths, x.shape)
    out[inside] = x[kept]
    return out, (x.shape, kept, inside)


def _pad_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, kept, inside = residual
    if g[inside].shape == shape:
        return (g[inside],)
    dx = xp.zeros(shape, g.dtype)
    dx[kept] = g[inside]
    return (dx,)


def _overlap(widths: Widths, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """What of x is kept, and where it lies in the result."""
    kept, inside = [], []
    for (before, after), n in zip(widths, shape, strict=True):
        first, last = max(-before, 0), n - max(-after, 0)
        kept.append(slice(first, last))
        inside.append(slice(first + before, last + before))
    return tuple(kept), tuple(inside)


pad = Op("pad", _pad, _pad_backward, inputs=("x",), native=True)


# z = x, continued at its ends along each axis as the mode says;  dx = g inside, plus what the frame repeats of it
def _continued(xp: Any, x: Array, widths: Widths, mode: str) -> tuple[Array, Any]:
    return xp.pad(x, widths, mode=NAMES[mode]), (widths, mode)


def _continued_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    widths, mode = residual
    for axis, (before, after) in enumerate(widths):
        if before or after:
            n = g.shape[axis] - before - after
            head, inner, tail = (g[stretch] for stretch in stretches(axis, (before, n, after)))
            inner = inner.copy()
            RETURNS[mode](inner, head, tail, axis)
            g = inner
    return (g,)


def _reflect(inner: Array, head: Array, tail: Array, axis: int) -> None:
    n, before, after = inner.shape[axis], head.shape[axis], tail.shape[axis]
    back = along(axis, slice(None, None, -1))
    inner[along(axis, slice(1, 1 + before))] += head[back]
    inner[along(axis, slice(n - 1 - after, n - 1))] += tail[back]


def _replicate(inner: Array, head: Array, tail: Array, axis: int) -> None:
    n = inner.shape[axis]
    inner[along(axis, slice(0, 1))] += total(head, axis, keepdims=True)
    inner[along(axis, slice(n - 1, n))] += total(tail, axis, keepdims=True)


def _circular(inner: Array, head: Array, tail: Array, axis: int) -> None:
    n = inner.shape[axis]
    inner[along(axis, slice(n - head.shape[axis], n))] += head
    inner[along(axis, slice(0, tail.shape[axis]))] += tail


NAMES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}  # of the array modules' pad()
RETURNS = {"reflect": _reflect, "replicate": _replicate, "circular": _circular}

continued = Op("continued", _continued, _continued_backward, inputs=("x",), native=True)
