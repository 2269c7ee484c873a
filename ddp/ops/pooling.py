"""Pooling of images, interpolation between sizes, and padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddp.ops.convolution import Pair, Window, pad_image, samples
from ddp.ops.op import (
    BITS,
    Array,
    Gradients,
    Needs,
    Op,
    Saved,
    array_function,
    as_float32,
    compute_dtype,
    total,
    where_or_zero,
)
from ddp.ops.shape import along, split_slices

# Max pooling as a running maximum over shifted views: one pass an element of the kernel, and no unfolded copy.


def _lowest(xp: Any, dtype: Any) -> Any:
    return -xp.inf if dtype.kind == "f" else xp.iinfo(dtype).min


# z = max of x under the window;  dx = g at the first element that equals it, at the last nan (as PyTorch has it)
def _max_pool2d(xp: Any, x: Array, window: Window) -> tuple[Array, Any]:
    padded = pad_image(xp, x, window, _lowest(xp, x.dtype))
    seen = [padded[..., rows, columns] for rows, columns in window.shifts()]
    top = xp.empty((*x.shape[:2], *window.out), x.dtype)
    xp.maximum(seen[0], seen[min(1, len(seen) - 1)], out=top)
    for each in seen[2:]:
        xp.maximum(top, each, out=top)
    return top, window


def _max_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, window: Any) -> Gradients:
    x, out = saved
    dx = xp.empty(x.shape, x.dtype)
    whole = window.padded == window.image
    scratch: tuple[Array, Array, Array] | None = None
    for tile in samples(xp, len(x), dx[:1].nbytes):
        n = tile.stop - tile.start
        if scratch is None:
            bits = BITS[g.dtype.itemsize]
            scratch = xp.empty(out[tile].shape, bits), xp.empty(out[tile].shape, bits), xp.empty(out[tile].shape, bool)
        rest, part, hit = scratch[0][:n], scratch[1][:n], scratch[2][:n]
        back = dx[tile] if whole else xp.empty((*dx[tile].shape[:2], *window.padded), x.dtype)
        if not window.covers_once:
            back[...] = 0
        _route_gradient(xp, g[tile], x[tile], out[tile], window, back, rest, part, hit)
        if not whole:
            dx[tile] = back[..., window.inside[0], window.inside[1]]
    return (dx,)


# A GPU is not asked, which would wait for it: there the second pass always runs.
@array_function
def may_be_any(xp: Any, mask: Array) -> bool:
    """Whether any of `mask` (bool) may be set; a device says True, since the host would have to wait for the answer."""
    return bool(mask.any())


def _route_gradient(
    xp: Any, g: Array, x: Array, top: Array, window: Window, back: Array, rest: Array, part: Array, hit: Array
) -> None:
    # By the bits of g as integers, as `select` does it: `rest` is what has not gone anywhere yet.
    rest.view(g.dtype)[...] = g
    padded = pad_image(xp, x, window, xp.nan)  # which equals nothing: a window of -inf must not find the frame
    for rows, columns in window.shifts():
        part[...] = xp.equal(padded[..., rows, columns], top, out=hit)  # not in the product: it would convert in pieces
        xp.multiply(part, rest, out=part)
        xp.bitwise_xor(rest, part, out=rest)
        if window.is_disjoint:
            back[..., rows, columns] = part.view(g.dtype)
        else:
            back[..., rows, columns] += part.view(g.dtype)
    if may_be_any(xp, rest):  # windows whose maximum is nan
        padded = pad_image(xp, x, window, 0)
        for rows, columns in reversed(list(window.shifts())):
            part[...] = xp.isnan(padded[..., rows, columns], out=hit)
            xp.multiply(part, rest, out=part)
            xp.bitwise_xor(rest, part, out=rest)
            back[..., rows, columns] += part.view(g.dtype)


max_pool2d = Op("max_pool2d", _max_pool2d, _max_pool2d_backward, inputs=("x",), saves=("x", "out"))


# z = max of x under the window, and where in (H, W) it lies, as one number;  dx = g there
def _max_pool2d_with_indices(xp: Any, x: Array, window: Window) -> tuple[tuple[Array, Array], Any]:
    padded = pad_image(xp, x, window, _lowest(xp, x.dtype))
    lines, across = (xp.arange(n) * s - p for n, s, p in zip(window.out, window.stride, window.padding, strict=True))
    top = xp.full((*x.shape[:2], *window.out), _lowest(xp, x.dtype), x.dtype)
    which = xp.full(top.shape, -1, "int32")  # the kernel's element; none yet
    index = xp.zeros(top.shape, "int64")
    for element, (rows, columns) in enumerate(window.shifts()):
        value = padded[..., rows, columns]
        i, j = (k * d for k, d in zip(divmod(element, window.kernel[1]), window.dilation, strict=True))
        better = (value > top) | (which < 0)
        if x.dtype.kind == "f":
            better |= xp.isnan(value)
        p, q = (lines + i)[:, None], across + j
        better &= (p >= 0) & (p < window.image[0]) & (q >= 0) & (q < window.image[1])  # the frame is not the image
        top = xp.where(better, value, top)
        which = xp.where(better, element, which).astype("int32", copy=False)
        index = xp.where(better, p * window.image[1] + q, index)
    return (top, index), (which, window)


def _max_pool2d_with_indices_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    (g, _), (which, window) = g, residual
    back = xp.zeros((*g.shape[:2], *window.padded), g.dtype)
    for element, (rows, columns) in enumerate(window.shifts()):
        back[..., rows, columns] += where_or_zero(xp, which == element, g)
    return (back[..., window.inside[0], window.inside[1]],)


max_pool2d_with_indices = Op(
    "max_pool2d_with_indices", _max_pool2d_with_indices, _max_pool2d_with_indices_backward, inputs=("x",)
)


# Average pooling: a running sum over shifted views, or over what each position sees where there are few positions.


def _divisor(xp: Any, window: Window, count_include_pad: bool, override: int | None, dtype: Any) -> Any:
    """What each position's sum is divided by: a number, or an array (OH, OW)."""
    if override is not None:
        return override
    if window.padded == window.image:
        return window.elements
    counts = []
    for n, k, s, p, out in zip(window.image, window.kernel, window.stride, window.padding, window.out, strict=True):
        start = xp.arange(out) * s - p
        if count_include_pad:
            counts.append(xp.minimum(start + k, n + p) - start)
        else:
            counts.append(xp.minimum(start + k, n) - xp.maximum(start, 0))
    return (counts[0][:, None] * counts[1]).astype(dtype)


# z = sum of x under the window / divisor;  dx = g / divisor at every element of it
def _avg_pool2d(
    xp: Any, x: Array, window: Window, count_include_pad: bool, divisor_override: int | None
) -> tuple[Array, Any]:
    padded, wide = pad_image(xp, x, window, 0), compute_dtype(x)
    if _few(window):
        total = window.view(xp, padded, 2).sum((-2, -1), dtype=wide)
    else:
        total = xp.zeros((*x.shape[:2], *window.out), wide)
        for rows, columns in window.shifts():
            total += padded[..., rows, columns]
    divisor = _divisor(xp, window, count_include_pad, divisor_override, total.dtype)
    total /= divisor
    return total.astype(x.dtype, copy=False), (window, divisor)


def _avg_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    window, divisor = residual
    part = (g / divisor).astype(g.dtype, copy=False)
    if _few(window):
        back = xp.zeros((*g.shape[:2], *window.padded), compute_dtype(g))
        for p in range(window.out[0]):
            rows = slice(p * window.stride[0], p * window.stride[0] + window.kernel[0])
            for q in range(window.out[1]):
                columns = slice(q * window.stride[1], q * window.stride[1] + window.kernel[1])
                back[..., rows, columns] += part[..., p : p + 1, q : q + 1]
    elif window.covers_once:
        back = xp.empty((*g.shape[:2], *window.padded), g.dtype)
        for rows, columns in window.shifts():
            back[..., rows, columns] = part
    else:
        back = xp.zeros((*g.shape[:2], *window.padded), compute_dtype(g))
        for rows, columns in window.shifts():
            back[..., rows, columns] += part
    return (back[..., window.inside[0], window.inside[1]].astype(g.dtype, copy=False),)


def _few(window: Window) -> bool:
    return window.elements > window.out[0] * window.out[1]


avg_pool2d = Op("avg_pool2d", _avg_pool2d, _avg_pool2d_backward, inputs=("x",))


def _bins(n: int, out: int) -> list[slice]:
    """The windows of an adaptive pooling along an axis: of nearly one length, overlapping unless out divides n."""
    return [slice(i * n // out, -(-(i + 1) * n // out)) for i in range(out)]


# z[p,q] = mean of x[rows(p), columns(q)];  dx[rows(p), columns(q)] += g[p,q] / (their number)
def _adaptive_avg_pool2d(xp: Any, x: Array, size: Pair) -> tuple[Array, Any]:
    rows, columns = _bins(x.shape[2], size[0]), _bins(x.shape[3], size[1])
    lines = xp.empty((*x.shape[:2], size[0], x.shape[3]), compute_dtype(x))
    for p, row in enumerate(rows):
        xp.mean(x[:, :, row], axis=2, dtype=lines.dtype, out=lines[:, :, p])
    out = xp.empty((*x.shape[:2], *size), x.dtype)
    for q, column in enumerate(columns):
        out[..., q] = lines[..., column].mean(-1)
    return out, (x.shape, rows, columns)


def _adaptive_avg_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, rows, columns = residual
    lines = xp.zeros((*g.shape[:3], shape[3]), compute_dtype(g))
    for q, column in enumerate(columns):
        lines[..., column] += g[..., q : q + 1] / (column.stop - column.start)
    dx = xp.zeros(shape, lines.dtype)
    for p, row in enumerate(rows):
        dx[:, :, row] += lines[:, :, p : p + 1] / (row.stop - row.start)
    return (dx.astype(g.dtype, copy=False),)


adaptive_avg_pool2d = Op("adaptive_avg_pool2d", _adaptive_avg_pool2d, _adaptive_avg_pool2d_backward, inputs=("x",))


# Images at another size: along each axis, an element is a mean of one or two of the old ones.
#
# An axis is done at a time, by gathers forward and backward: which outputs read an input is a run of neighbours, so its
# gradient is a few gathers too, and neither a product by a matrix of mostly zeros (which would spread nan) nor a
# scatter.


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


def _resample(xp: Any, x: Array, axis: int, found: list[Tap]) -> Array:
    """z[i] = sum over the taps of weight[i] * x[read[i]]."""
    out = None
    for tap in found:
        part = x.take(xp.asarray(tap.read), axis=axis)
        if tap.weight is not None:
            part = part * _along(xp, tap.weight, axis, x)
        out = part if out is None else out + part
    return out


def _resample_backward(xp: Any, g: Array, axis: int, found: list[Tap], n: int) -> Array:
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
    (out,) = as_float32(x)
    for axis, _, found in axes:
        out = _resample(xp, out, axis, found)
    return out.astype(x.dtype, copy=not axes), axes


def _interpolate_backward(xp: Any, g: Array, needs: Needs, saved: Saved, axes: Any) -> Gradients:
    (dx,) = as_float32(g)
    for axis, n, found in reversed(axes):
        dx = _resample_backward(xp, dx, axis, found, n)
    return (dx.astype(g.dtype, copy=False),)


interpolate = Op("interpolate", _interpolate, _interpolate_backward, inputs=("x",))


# Frames around the last dimensions: constant, or continued by what lies inside.

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


pad = Op("pad", _pad, _pad_backward, inputs=("x",), supports_bfloat16=True)


# z = x, continued at its ends along each axis as the mode says;  dx = g inside, plus what the frame repeats of it
def _continued(xp: Any, x: Array, widths: Widths, mode: str) -> tuple[Array, Any]:
    return xp.pad(x, widths, mode=NAMES[mode]), (widths, mode)


def _continued_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    widths, mode = residual
    for axis, (before, after) in enumerate(widths):
        if before or after:
            n = g.shape[axis] - before - after
            head, inner, tail = (g[stretch] for stretch in split_slices(axis, (before, n, after)))
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

continued = Op("continued", _continued, _continued_backward, inputs=("x",), supports_bfloat16=True)
