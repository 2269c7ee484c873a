"""Pooling of images, interpolation between sizes, and padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ddp.ops.arrays import Array, ForwardResult, Ints, array_function, compute_dtype, total, upcast, where_or_zero
from ddp.ops.convolution import Pair, Window
from ddp.ops.op import Gradients, Needs, Op, Saved
from ddp.ops.shape import along, split_slices

# Pooling does not copy windows. Maxima are updated in one pass for each kernel element. Sums take one pass for each row
# and each column of the kernel, or one for each position, whichever are fewer.


def _places(xp: Any, window: Window) -> Array:
    h, w = window.image
    return xp.arange(h * w, dtype="int32").reshape(h, w)


@array_function
def maxima(xp: Any, x: Array, window: Window) -> tuple[Array, Array]:
    """The maximum of x in the window at each position, and its index (int32) in the flattened (H, W).

    Among equal maxima the first counts, among nans the last. A position that reads no element of x gets the lowest
    number and the index -1.
    """
    lowest = -xp.inf if x.dtype.kind == "f" else xp.iinfo(x.dtype).min
    top = xp.full((*x.shape[:2], *window.out), lowest, x.dtype)
    index = xp.full(top.shape, -1, "int32")
    places = _places(xp, window)
    for position, pixels in window.shifts():
        value = x[pixels]
        better = (value > top[position]) | (value != value) | (index[position] < 0)
        top[position] = xp.where(better, value, top[position])
        index[position] = xp.where(better, places[pixels], index[position])
    return top, index


@array_function
def add_at_maxima(xp: Any, g: Array, index: Array, window: Window) -> Array:
    """The gradient of `maxima`: adds each element of g at the index of its maximum. Returns (N, C, H, W)."""
    dx = xp.zeros((*g.shape[:2], *window.image), compute_dtype(g.dtype))
    places = _places(xp, window)
    for position, pixels in window.shifts():
        dx[pixels] += where_or_zero(xp, index[position] == places[pixels], g[position])
    return dx.astype(g.dtype, copy=False)


# z = max of x under the window;  dx = g at the maximum
def _max_pool2d(xp: Any, x: Array, window: Window) -> ForwardResult:
    top, index = maxima(xp, x, window)
    return top, (index, window)


def _max_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (add_at_maxima(xp, g, *residual),)


max_pool2d = Op("max_pool2d", _max_pool2d, _max_pool2d_backward, inputs=("x",))


# z = max of x under the window, and its index in the flattened (H, W);  dx = g at this index
def _max_pool2d_with_indices(xp: Any, x: Array, window: Window) -> tuple[tuple[Array, Array], Any]:
    top, index = maxima(xp, x, window)
    return (top, index.astype("int64")), (index, window)


def _max_pool2d_with_indices_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (add_at_maxima(xp, g[0], *residual),)


max_pool2d_with_indices = Op(
    "max_pool2d_with_indices", _max_pool2d_with_indices, _max_pool2d_with_indices_backward, inputs=("x",)
)


def _divisor(xp: Any, window: Window, count_include_pad: bool, override: int | None, dtype: Any) -> Any:
    """The divisor of the sum at each position: a number, or an array (OH, OW)."""
    if override is not None:
        return override
    counts = []
    for n, k, s, p, out in zip(window.image, window.kernel, window.stride, window.padding, window.out, strict=True):
        start = xp.arange(out) * s - p
        if count_include_pad:
            counts.append(xp.minimum(start + k, n + p) - start)
        else:
            counts.append(xp.minimum(start + k, n) - xp.maximum(start, 0))
    return (counts[0][:, None] * counts[1]).astype(dtype)


# z = sum of x under the window / divisor, first along H, then along W;  dx = g / divisor at every element of the window
def _avg_pool2d(
    xp: Any, x: Array, window: Window, count_include_pad: bool, divisor_override: int | None
) -> ForwardResult:
    out = xp.zeros((*x.shape[:2], *window.out), compute_dtype(x.dtype))
    if _few(window):
        for position, pixels in _patches(window):
            out[position] = x[pixels].sum((2, 3), out.dtype, keepdims=True)
    else:
        lines = xp.zeros((*out.shape[:3], x.shape[3]), out.dtype)
        for p, rows in window.along(0):
            lines[:, :, p] += x[:, :, rows]
        for q, columns in window.along(1):
            out[..., q] += lines[..., columns]
    divisor = _divisor(xp, window, count_include_pad, divisor_override, out.dtype)
    out /= divisor
    return out.astype(x.dtype, copy=False), (window, divisor)


def _avg_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    window, divisor = residual
    part = (g / divisor).astype(g.dtype, copy=False)
    dx = xp.zeros((*g.shape[:2], *window.image), compute_dtype(g.dtype))
    if _few(window):
        for position, pixels in _patches(window):
            dx[pixels] += part[position]
    else:
        lines = xp.zeros((*g.shape[:3], dx.shape[3]), dx.dtype)
        for q, columns in window.along(1):
            lines[..., columns] += part[..., q]
        for p, rows in window.along(0):
            dx[:, :, rows] += lines[:, :, p]
    return (dx.astype(g.dtype, copy=False),)


def _few(window: Window) -> bool:
    """Whether a loop over the positions is shorter than loops over the rows and the columns of the kernel."""
    return sum(window.kernel) > window.out[0] * window.out[1]


def _patches(window: Window) -> Iterator[tuple[Any, Any]]:
    """Yields for each position its index, and the index of the pixels in its window. For windows without dilation."""
    for p, q in np.ndindex(window.out):
        seen = []
        for position, n, k, s, pad in zip(
            (p, q), window.image, window.kernel, window.stride, window.padding, strict=True
        ):
            seen.append(slice(max(position * s - pad, 0), min(position * s - pad + k, n)))
        yield (..., slice(p, p + 1), slice(q, q + 1)), (..., *seen)


avg_pool2d = Op("avg_pool2d", _avg_pool2d, _avg_pool2d_backward, inputs=("x",))


def _bins(n: int, out: int) -> list[slice]:
    """The windows of an adaptive pooling along an axis: of nearly equal length. They overlap unless out divides n."""
    return [slice(i * n // out, -(-(i + 1) * n // out)) for i in range(out)]


# z[p,q] = mean of x[rows(p), columns(q)];  dx[rows(p), columns(q)] += g[p,q] / (number of these elements)
def _adaptive_avg_pool2d(xp: Any, x: Array, size: Pair) -> ForwardResult:
    rows = _bins(x.shape[2], size[0])
    columns = _bins(x.shape[3], size[1])
    lines = xp.empty((*x.shape[:2], size[0], x.shape[3]), compute_dtype(x.dtype))
    for p, row in enumerate(rows):
        xp.mean(x[:, :, row], axis=2, dtype=lines.dtype, out=lines[:, :, p])
    out = xp.empty((*x.shape[:2], *size), x.dtype)
    for q, column in enumerate(columns):
        out[..., q] = lines[..., column].mean(-1)
    return out, (x.shape, rows, columns)


def _adaptive_avg_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, rows, columns = residual
    lines = xp.zeros((*g.shape[:3], shape[3]), compute_dtype(g.dtype))
    for q, column in enumerate(columns):
        lines[..., column] += g[..., q : q + 1] / (column.stop - column.start)
    dx = xp.zeros(shape, lines.dtype)
    for p, row in enumerate(rows):
        dx[:, :, row] += lines[:, :, p : p + 1] / (row.stop - row.start)
    return (dx.astype(g.dtype, copy=False),)


adaptive_avg_pool2d = Op("adaptive_avg_pool2d", _adaptive_avg_pool2d, _adaptive_avg_pool2d_backward, inputs=("x",))


# Interpolation: along each axis, an output is a weighted mean of one or two inputs.
#
# One axis is resampled after the other, by gathers in forward and backward. The outputs that read the same input are
# neighbours, so that backward needs only a few gathers, and no scatter. A product with a matrix of mostly zeros would
# spread nan.


class Tap(NamedTuple):
    """One term of each output along an axis: weight[i] * x[read[i]] for output i. `read` is sorted."""

    read: np.ndarray[Any, Any]
    weight: np.ndarray[Any, Any] | None  # None: all weights are 1


def taps(n: int, out: int, scale: float | None, mode: str, align_corners: bool, dtype: Any) -> list[Tap]:
    """The taps of `out` outputs on `n` inputs. scale: the caller's scale factor; None if the caller gave a size."""
    if (mode != "nearest-exact" and out == n) or (mode == "nearest" and out == 2 * n):
        scale = None  # with these sizes the scale factor is ignored, as in PyTorch
    # In PyTorch's precision: close to the border between two inputs, rounding decides which one an output reads.
    float_type = np.float64 if dtype == np.float64 else np.float32
    i = np.arange(out, dtype=float_type)
    step = float_type(1 / scale if scale else n / out)
    if mode == "nearest":
        return [Tap(np.minimum(np.floor(i * step), n - 1).astype(np.intp), None)]
    if mode == "nearest-exact":
        return [Tap(np.minimum(np.floor((i + float_type(0.5)) * step), n - 1).astype(np.intp), None)]
    if align_corners:
        position = i * float_type((n - 1) / (out - 1) if out > 1 else 0)
    else:
        position = np.maximum((i + float_type(0.5)) * step - float_type(0.5), 0)
    below = np.minimum(position.astype(np.intp), n - 1)
    part = np.clip(position - below.astype(float_type), 0, 1).astype(float_type)
    return [Tap(below, 1 - part), Tap(np.minimum(below + 1, n - 1), part)]


def _resample(xp: Any, x: Array, axis: int, taps: list[Tap]) -> Array:
    """z[i] = sum over the taps of weight[i] * x[read[i]]."""
    out = None
    for tap in taps:
        part = x.take(xp.asarray(tap.read), axis=axis)
        if tap.weight is not None:
            part = part * _along(xp, tap.weight, axis, x)
        out = part if out is None else out + part
    return out


def _resample_backward(xp: Any, g: Array, axis: int, taps: list[Tap], n: int) -> Array:
    """dx[j] = sum of weight[i] * g[i] over all taps, and over the outputs i with read[i] = j."""
    dx = None
    for read, weight in taps:
        start = np.searchsorted(read, np.arange(n))
        stop = np.searchsorted(read, np.arange(n), side="right")
        for k in range(max(int((stop - start).max(initial=0)), 1)):
            reader = np.minimum(start + k, len(read) - 1)
            part = g.take(xp.asarray(reader), axis=axis)
            if weight is not None:
                part = part * _along(xp, weight[reader], axis, g)
            if not (valid := start + k < stop).all():
                part = xp.where(_along(xp, valid, axis), part, part.dtype.type(0))
            dx = part if dx is None else dx + part
    return dx


def _along(xp: Any, values: np.ndarray[Any, Any], axis: int, like: Array | None = None) -> Array:
    array = xp.asarray(values if like is None else values.astype(like.dtype))
    return array[:, None] if axis == 2 else array


# z[p,q] = sum_ij u[p,i] * v[q,j] * x[i,j], where at most two of u[p] and two of v[q] are not 0;
# dx[i,j] = sum_pq u[p,i] * v[q,j] * g[p,q]
def _interpolate(
    xp: Any, x: Array, size: Pair, scales: tuple[float | None, float | None], mode: str, align_corners: bool
) -> ForwardResult:
    axes = []
    for axis in (3, 2):  # axis 2 comes last: gathers along it copy whole rows
        n = x.shape[axis]
        out = size[axis - 2]
        scale = scales[axis - 2]
        if n != out or scale not in (None, 1):
            axes.append((axis, n, taps(n, out, scale, mode, align_corners, x.dtype)))
    out = upcast(x)
    for axis, _, axis_taps in axes:
        out = _resample(xp, out, axis, axis_taps)
    return out.astype(x.dtype, copy=not axes), axes


def _interpolate_backward(xp: Any, g: Array, needs: Needs, saved: Saved, axes: Any) -> Gradients:
    dx = upcast(g)
    for axis, n, axis_taps in reversed(axes):
        dx = _resample_backward(xp, dx, axis, axis_taps, n)
    return (dx.astype(g.dtype, copy=False),)


interpolate = Op("interpolate", _interpolate, _interpolate_backward, inputs=("x",))


# Padding around the last dimensions: with a constant, or with elements of the input.

Widths = tuple[tuple[int, int], ...]  # (before, after) of every axis


# z = x in a frame of `value`, or cropped where a width is negative;  dx = g without the frame, 0 where cropped
def _pad(xp: Any, x: Array, widths: Widths, value: float) -> ForwardResult:
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


def _overlap(widths: Widths, shape: Ints) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The slices of x that are kept, and their places in the result."""
    kept = []
    inside = []
    for (before, after), n in zip(widths, shape, strict=True):
        first = max(-before, 0)
        last = n - max(-after, 0)
        kept.append(slice(first, last))
        inside.append(slice(first + before, last + before))
    return tuple(kept), tuple(inside)


pad = Op("pad", _pad, _pad_backward, inputs=("x",), supports_bfloat16=True)


# z = x, padded with its own values as the mode says;  dx = g inside, plus g of the padding at the repeated elements
def _continued(xp: Any, x: Array, widths: Widths, mode: str) -> ForwardResult:
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
    n = inner.shape[axis]
    before = head.shape[axis]
    after = tail.shape[axis]
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


NAMES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}  # modes of np.pad() and cupy.pad()
RETURNS = {"reflect": _reflect, "replicate": _replicate, "circular": _circular}

continued = Op("continued", _continued, _continued_backward, inputs=("x",), supports_bfloat16=True)
