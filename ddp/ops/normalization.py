"""Normalization of rows (layer norm, RMS norm) and of channels (batch norm, group norm)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ddp.ops.arrays import Array, ForwardResult, Ints, array_function, as_rows, upcast
from ddp.ops.op import Gradients, Needs, Op, Saved
from ddp.ops.reduction import moments, standardize

# Normalization over rows: layer_norm, rms_norm, normalize. Backward reads the input and one or two numbers per row
# instead of the normalized input, which would be one more array to keep.


def weight_dtype_of(x: Array, *parameters: Array | None) -> Any:
    """The dtype of the gradients of weight and bias: that of the parameters (float32 is possible for a 16-bit x)."""
    return next((parameter.dtype for parameter in parameters if parameter is not None), x.dtype)


# z = (x - m)*r*w + b, m = mean x, r = 1/sqrt(var x + eps), over rows of the last `axes` axes;
# with h = (x - m)*r:  dx = r*(g*w - mean(g*w) - h*mean(g*w*h)), dw = sum g*h, db = sum g over rows
def _layer_norm(xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float) -> ForwardResult:
    """w, b: of the shape of the last `axes` axes of x."""
    dtype = x.dtype
    shape = x.shape
    weight_dtype = weight_dtype_of(x, w, b)
    x, w, b = map(upcast, (x, w, b))
    rows = as_rows(x, axes)
    mean, var = moments(xp, rows[None])
    rstd = 1 / xp.sqrt(var + eps)
    out = standardize(xp, rows, mean[:, None], rstd[:, None]).reshape(shape)
    if w is not None:
        out *= w
    if b is not None:
        out += b
    return out.astype(dtype, copy=False), (axes, mean, rstd, weight_dtype)


def row_mean(xp: Any, x: Array) -> Array:
    """The means of the rows of x; 0 if rows are empty. x: (rows, n); returns (rows, 1)."""
    return x.sum(axis=1, keepdims=True) / max(x.shape[1], 1)


def _layer_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    axes, mean, rstd, weight_dtype = residual
    return _rows_backward(xp, g, x, w, axes, mean[:, None], rstd[:, None], weight_dtype, needs)


def _rows_backward(
    xp: Any,
    g: Array,
    x: Array | None,
    w: Array | None,
    axes: int,
    mean: Array | None,
    rstd: Array,
    weight_dtype: Any,
    needs: Needs,
) -> Gradients:
    """Computes dx, dw and db of layer_norm or, if mean is None, of rms_norm. mean, rstd: (rows, 1)."""
    dtype = g.dtype
    shape = g.shape
    inner = shape[len(shape) - axes :]
    g, x, w = map(upcast, (as_rows(g, axes), x, w))
    dx = dw = None
    if x is not None:
        x = as_rows(x, axes)
        scale = rstd.astype(x.dtype)
        h = x * scale if mean is None else standardize(xp, x, mean, rstd)
        if needs[0]:
            dh = g if w is None else g * w.reshape(-1)
            dx = dh - h * row_mean(xp, dh * h)
            if mean is not None:
                dx -= row_mean(xp, dh)
            dx = (dx * scale).reshape(shape).astype(dtype, copy=False)
        if needs[1]:
            dw = (g * h).sum(axis=0).reshape(inner).astype(weight_dtype, copy=False)
    db = g.sum(axis=0).reshape(inner).astype(weight_dtype, copy=False) if needs[2] else None
    return dx, dw, db


NEEDED = {"x": ("w", "x"), "w": ("x",), "b": ()}
layer_norm = Op("layer_norm", _layer_norm, _layer_norm_backward, inputs=("x", "w", "b"), saves=NEEDED, derived=True)


# z = x*r*w, r = 1/sqrt(mean x^2 + eps), over rows of the last `axes` axes;
# with h = x*r:  dx = r*(g*w - h*mean(g*w*h)), dw = sum g*h over rows
def _rms_norm(xp: Any, x: Array, w: Array | None, axes: int, eps: float) -> ForwardResult:
    """w: of the shape of the last `axes` axes of x."""
    dtype = x.dtype
    shape = x.shape
    weight_dtype = weight_dtype_of(x, w)
    x, w = map(upcast, (x, w))
    rows = as_rows(x, axes)
    rstd = 1 / xp.sqrt(row_mean(xp, xp.square(rows, dtype="float64")) + eps)
    out = (rows * rstd.astype(rows.dtype)).reshape(shape)
    if w is not None:
        out *= w
    return out.astype(dtype, copy=False), (axes, rstd[:, 0], weight_dtype)


def _rms_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    axes, rstd, weight_dtype = residual
    return _rows_backward(xp, g, x, w, axes, None, rstd[:, None], weight_dtype, (*needs, False))[:2]


rms_norm = Op(
    "rms_norm", _rms_norm, _rms_norm_backward, inputs=("x", "w"), saves={"x": ("w", "x"), "w": ("x",)}, derived=True
)


# z = x/d, d = max(|x|_p, eps) along dim;  dx = (g - [|x|_p > eps] * sum(g*z) * sign(x)*(|x|/|x|_p)^(p - 1)) / d
def _normalize(xp: Any, x: Array, p: float, dim: int, eps: float) -> ForwardResult:
    dtype = x.dtype
    x = upcast(x)
    if p == 2:
        norm = xp.sqrt((x * x).sum(axis=dim, keepdims=True))
    elif p == 1:
        norm = xp.abs(x).sum(axis=dim, keepdims=True)
    elif p == math.inf:
        size = xp.abs(x)
        norm = size.max(axis=dim, keepdims=True) if size.size else size.sum(axis=dim, keepdims=True)
    else:
        norm = (xp.abs(x) ** p).sum(axis=dim, keepdims=True) ** (1 / p)
    return (x / xp.maximum(norm, eps)).astype(dtype, copy=False), (norm, p, dim, eps)


def _normalize_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    norm, p, dim, eps = residual
    dtype = g.dtype
    g, x = map(upcast, (g, saved[0]))
    over = xp.where(norm > eps, norm, 1)
    unit = x / over
    if p == 2:
        dnorm = unit
    elif p == 1:
        dnorm = xp.sign(x)
    elif p == math.inf:
        dnorm = xp.sign(x) * (xp.abs(x) == norm)
        dnorm /= xp.maximum(xp.abs(dnorm).sum(axis=dim, keepdims=True), 1)  # equal maxima share the gradient
    else:
        dnorm = xp.sign(x) * xp.abs(unit) ** (p - 1)
    dnorm = dnorm * (g * unit).sum(axis=dim, keepdims=True) * (norm > eps)
    dx = (g - dnorm) / xp.maximum(norm, eps)
    return (dx.astype(dtype, copy=False),)


normalize = Op("normalize", _normalize, _normalize_backward, inputs=("x",), saves=("x",), derived=True)


# Normalization over channels: batch_norm, group_norm. A layout says which channels of which samples are normalized
# together; this is the only difference between the two. Statistics are float64.


Tell = Callable[[Array, Array, int], None]


class ChannelGroups:
    """Which elements share a statistic: one channel of all samples; with `groups`, a group of channels of one sample.

    shape: (N, C, positions), of the input; count: the number of elements that share a statistic, at least 1
    members: the number of channels of a sample that share a statistic. Channel c of sample n has the statistic with
        index (n*C + c) // members, modulo the number of statistics
    """

    collective = False  # True: `collect` is a collective, and backward always calls it, since other ranks wait

    def __init__(self, shape: Ints, groups: int | None = None) -> None:
        self.shape = (*shape[:2], math.prod(shape[2:]))
        samples, channels, positions = self.shape
        self.members = 1
        self._view = self.shape  # the first and last axis run over elements that share a statistic
        if groups is not None:
            self.members = channels // int(groups)  # CuPy's repeat takes no NumPy integer
            self._view = (1, samples * int(groups), self.members * positions)
        self.count = max(self._view[0] * self._view[2], 1)

    def statistics(self, xp: Any, x: Array) -> tuple[Array, Array]:
        """The means, and the biased variances. x: of `shape`."""
        return moments(xp, x.reshape(self._view))

    def collect(self, xp: Any, *sums: Array) -> Sequence[Array]:
        """Adds up arrays (N, C), which are sums over positions, for each statistic."""
        return [array.reshape(self._view[0], self._view[1], self.members).sum(axis=(0, 2)) for array in sums]

    def broadcast(self, xp: Any, statistic: Array) -> Array:
        """Reshapes a statistic so that it broadcasts against `shape`."""
        return xp.repeat(statistic, self.members).reshape(-1, self.shape[1], 1)


@array_function
def channel_norm(
    xp: Any, x: Array, layout: ChannelGroups, mean: Array, rstd: Array, w: Array | None, b: Array | None
) -> Array:
    """(x - mean)*rstd*w + b. x: of layout.shape; mean, rstd: statistics; w, b: (C,)."""
    out = standardize(xp, x, layout.broadcast(xp, mean), layout.broadcast(xp, rstd))
    if w is not None:
        out *= w[:, None]
    if b is not None:
        out += b[:, None]
    return out


@array_function
def channel_sums(xp: Any, g: Array, x: Array, layout: ChannelGroups, mean: Array, rstd: Array) -> tuple[Array, Array]:
    """The sums of g and of g*h over positions, h = (x - mean)*rstd. g, x: of layout.shape; returns (N, C) twice."""
    h = standardize(xp, x, layout.broadcast(xp, mean), layout.broadcast(xp, rstd))
    h *= g
    return g.sum(axis=2, dtype="float64"), h.sum(axis=2, dtype="float64")


@array_function
def channel_gradient(
    xp: Any,
    g: Array,
    x: Array,
    layout: ChannelGroups,
    mean: Array,
    rstd: Array,
    w: Array | None,
    along: Array,
    across: Array,
) -> Array:
    """rstd*(g*w - along - h*across), h = (x - mean)*rstd. along, across: the means of g*w and g*w*h."""
    scale = layout.broadcast(xp, rstd)
    dx = standardize(xp, x, layout.broadcast(xp, mean), scale)
    dx *= layout.broadcast(xp, -rstd * across).astype(x.dtype)
    dx -= layout.broadcast(xp, rstd * along).astype(x.dtype)
    dx += g * (scale if w is None else scale * w[:, None]).astype(x.dtype)
    return dx


# z = (x - m)*r*w + b, m = mean x, r = 1/sqrt(var x + eps), over the elements that share a statistic;
# with h = (x - m)*r:  dx = r*(g*w - mean(g*w) - h*mean(g*w*h)), dw = sum g*h, db = sum g over samples and positions;
# for channel_affine, m and r are constants:  dx = r*g*w
def _forward(
    xp: Any, x: Array, w: Array | None, b: Array | None, layout: ChannelGroups, eps: float, tell: Tell | None
) -> ForwardResult:
    dtype = x.dtype
    shape = x.shape
    weight_dtype = weight_dtype_of(x, w, b)
    x, w, b = map(upcast, (x, w, b))
    x = x.reshape(layout.shape)
    mean, var = layout.statistics(xp, x)
    if tell is not None:
        tell(mean, var, layout.count)
    rstd = 1 / xp.sqrt(var + float(eps))
    out = channel_norm(xp, x, layout, mean, rstd, w, b)
    return out.reshape(shape).astype(dtype, copy=False), (layout, mean, rstd, weight_dtype, False)


def _backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    layout, mean, rstd, weight_dtype, fixed = residual
    dtype = g.dtype
    shape = g.shape
    g, x, w = map(upcast, (g, x, w))
    g = g.reshape(layout.shape)
    if x is None:
        return None, None, g.sum(axis=(0, 2)).astype(weight_dtype, copy=False)
    x = x.reshape(layout.shape)
    along, across = channel_sums(xp, g, x, layout, mean, rstd)
    dw = across.sum(axis=0).astype(weight_dtype) if needs[1] else None
    db = along.sum(axis=0).astype(weight_dtype) if needs[2] else None
    if not (needs[0] or layout.collective):
        return None, dw, db
    if fixed:
        scale = rstd if w is None else rstd * w
        dx = g * scale[:, None].astype(g.dtype)
    else:
        if w is not None:
            along = along * w
            across = across * w
        means = [total / layout.count for total in layout.collect(xp, along, across)]
        if not needs[0]:
            return None, dw, db
        dx = channel_gradient(xp, g, x, layout, mean, rstd, w, *means)
    return dx.reshape(shape).astype(dtype, copy=False), dw, db


def _batch_norm(
    xp: Any,
    x: Array,
    w: Array | None,
    b: Array | None,
    eps: float,
    tell: Tell | None,
    layout: ChannelGroups | None = None,
) -> ForwardResult:
    """x: (N, C, ...); w, b: (C,).

    tell: called with the means and the biased variances, (C,), and the number of elements of each.
    layout: None: the samples of x are the whole batch
    """
    return _forward(xp, x, w, b, ChannelGroups(x.shape) if layout is None else layout, eps, tell)


batch_norm = Op("batch_norm", _batch_norm, _backward, inputs=("x", "w", "b"), saves=NEEDED, derived=True)


def _group_norm(
    xp: Any, x: Array, w: Array | None, b: Array | None, groups: int, eps: float, tell: Tell | None = None
) -> ForwardResult:
    """x: (N, C, ...); w, b: (C,).

    tell: called with the means and the biased variances, (N * groups,), and the number of elements of each.
    """
    return _forward(xp, x, w, b, ChannelGroups(x.shape, groups), eps, tell)


group_norm = Op("group_norm", _group_norm, _backward, inputs=("x", "w", "b"), saves=NEEDED, derived=True)


def _channel_affine(
    xp: Any, x: Array, w: Array | None, b: Array | None, mean: Array, var: Array, eps: float
) -> ForwardResult:
    """Normalizes with given statistics. x: (N, C, ...); w, b, mean, var: (C,)."""
    dtype = x.dtype
    shape = x.shape
    weight_dtype = weight_dtype_of(x, w, b)
    x, w, b = map(upcast, (x, w, b))
    mean = mean.astype("float64")
    rstd = 1 / xp.sqrt(var.astype("float64") + float(eps))
    layout = ChannelGroups(shape)
    out = channel_norm(xp, x.reshape(layout.shape), layout, mean, rstd, w, b)
    return out.reshape(shape).astype(dtype, copy=False), (layout, mean, rstd, weight_dtype, True)


channel_affine = Op("channel_affine", _channel_affine, _backward, inputs=("x", "w", "b"), saves=NEEDED)
