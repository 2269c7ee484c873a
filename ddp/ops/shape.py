"""Shapes: views where the memory allows it, joins and padding."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, fold


# z = x in another shape;  dx = g in the shape of x
def _reshape(xp: Any, x: Array, shape: tuple[int, ...]) -> tuple[Array, Any]:
    return x.reshape(shape), x.shape


def _reshape_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    return (g.reshape(shape),)


reshape = Op("reshape", _reshape, _reshape_backward, inputs=("x",), view=True)


# z = x with its axes in the order `dims`;  dx = g with the axes back
def _permute(xp: Any, x: Array, dims: tuple[int, ...]) -> tuple[Array, Any]:
    return x.transpose(dims), dims


def _permute_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dims: Any) -> Gradients:
    back = [0] * len(dims)
    for to, source in enumerate(dims):
        back[source] = to
    return (g.transpose(back),)


permute = Op("permute", _permute, _permute_backward, inputs=("x",), view=True)


# z = x repeated along axes of size 1 and new leading ones;  dx = g summed over them
def _expand(xp: Any, x: Array, shape: tuple[int, ...]) -> tuple[Array, Any]:
    return xp.broadcast_to(x, shape), x.shape


def _expand_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    return (fold(g, shape),)


expand = Op("expand", _expand, _expand_backward, inputs=("x",), view=True)


# z = [x0 | x1 | ...] along axis `dim`;  dxi = its stretch of g
def _cat(xp: Any, *xs: Array, dim: int) -> tuple[Array, Any]:
    return xp.concatenate(xs, axis=dim), (dim, [x.shape[dim] for x in xs])


def _cat_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    dim, lengths = residual
    parts: list[Array | None] = []
    start = 0
    for need, length in zip(needs, lengths, strict=True):
        stretch = (slice(None),) * dim + (slice(start, start + length),)
        parts.append(g[stretch] if need else None)
        start += length
    return parts


cat = Op("cat", _cat, _cat_backward, inputs=("*xs",))


# z = x0, x1, ... side by side along a new axis `dim`;  dxi = the i-th of g
def _stack(xp: Any, *xs: Array, dim: int) -> tuple[Array, Any]:
    return xp.stack(xs, axis=dim), dim


def _stack_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    lead = (slice(None),) * dim
    return [g[lead + (i,)] if need else None for i, need in enumerate(needs)]


stack = Op("stack", _stack, _stack_backward, inputs=("*xs",))


# z = x in a frame of `value`;  dx = g without the frame
def _pad(xp: Any, x: Array, widths: tuple[tuple[int, int], ...], value: float) -> tuple[Array, Any]:
    inside = tuple(slice(before, before + n) for (before, _), n in zip(widths, x.shape, strict=True))
    out = xp.full([before + n + after for (before, after), n in zip(widths, x.shape, strict=True)], value, x.dtype)
    out[inside] = x
    return out, inside


def _pad_backward(xp: Any, g: Array, needs: Needs, saved: Saved, inside: Any) -> Gradients:
    return (g[inside],)


pad = Op("pad", _pad, _pad_backward, inputs=("x",))
