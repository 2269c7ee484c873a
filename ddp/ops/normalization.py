"""Normalization of rows (layer norm, RMS norm) and of channels (batch norm, group norm)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ddp.ops.op import Array, Gradients, Needs, Op, Saved, array_function, as_float32, as_rows, upcast

# Normalisation over rows: layer_norm, rms_norm, normalize. Backward reads the input and two numbers a row, not the
# normalised input: that would be one more array to keep.


FAR = 4.0  # mean^2 above this many variances: what is computed from plain sums loses digits there


def kind_of(x: Array, *parameters: Array | None) -> Any:
    """The dtype of the gradients of weight and bias: theirs, which may be float32 beside a float16 x."""
    return next((each.dtype for each in parameters if each is not None), x.dtype)


@array_function
def is_far(xp: Any, mean: Array, var: Array) -> bool:
    """Whether sums over x should be taken of x - mean; a device says True, since the host would wait for the answer."""
    return bool((mean * mean > FAR * var).any())


# z = (x - m)*r*w + b, m = mean x, r = 1/sqrt(var x + eps), over rows of the last `axes` axes, which hold n elements;
# with h = (x - m)*r:  dx = r*(g*w - mean(g*w) - h*mean(g*w*h)), dw = sum g*h, db = sum g over rows
def _layer_norm(xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    """w, b: of the last `axes` axes of x."""
    dtype, shape, kind = x.dtype, x.shape, kind_of(x, w, b)
    x, w, b = as_float32(x, w, b)
    rows = as_rows(x, axes)
    mean = row_mean(xp, rows)
    out = rows - mean
    rstd = 1 / xp.sqrt(row_mean(xp, out * out) + eps)
    out = (out * rstd).reshape(shape)
    if w is not None:
        out *= w
    if b is not None:
        out += b
    return out.astype(dtype, copy=False), (axes, mean[:, 0], rstd[:, 0], kind)


def row_mean(xp: Any, x: Array) -> Array:
    """The means of the rows of x, 0 of empty ones. x: (rows, n); returns (rows, 1)."""
    return x.sum(axis=1, keepdims=True) / max(x.shape[1], 1)


def _layer_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    axes, mean, rstd, kind = residual
    return _rows_backward(xp, g, x, w, axes, mean[:, None], rstd[:, None], kind, needs)


def _rows_backward(
    xp: Any,
    g: Array,
    x: Array | None,
    w: Array | None,
    axes: int,
    mean: Array | None,
    rstd: Array,
    kind: Any,
    needs: Needs,
) -> Gradients:
    """mean, rstd: (rows, 1); mean: None where none was taken off."""
    dtype, shape = g.dtype, g.shape
    inner = shape[len(shape) - axes :]
    g, x, w = as_float32(as_rows(g, axes), x, w)
    dx = dw = None
    if x is not None:
        x = as_rows(x, axes)
        h = (x if mean is None else x - mean) * rstd
        if needs[0]:
            slope = g if w is None else g * w.reshape(-1)
            dx = slope - h * row_mean(xp, slope * h)
            if mean is not None:
                dx -= row_mean(xp, slope)
            dx = (dx * rstd).reshape(shape).astype(dtype, copy=False)
        if needs[1]:
            dw = (g * h).sum(axis=0).reshape(inner).astype(kind, copy=False)
    db = g.sum(axis=0).reshape(inner).astype(kind, copy=False) if needs[2] else None
    return dx, dw, db


NEEDED = {"x": ("w", "x"), "w": ("x",), "b": ()}
layer_norm = Op("layer_norm", _layer_norm, _layer_norm_backward, inputs=("x", "w", "b"), saves=NEEDED)


# z = x*r*w, r = 1/sqrt(mean x^2 + eps), over rows of the last `axes` axes, which hold n elements;
# with h = x*r:  dx = r*(g*w - h*mean(g*w*h)), dw = sum g*h over rows
def _rms_norm(xp: Any, x: Array, w: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    """w: of the last `axes` axes of x."""
    dtype, shape, kind = x.dtype, x.shape, kind_of(x, w)
    x, w = as_float32(x, w)
    rows = as_rows(x, axes)
    rstd = 1 / xp.sqrt(row_mean(xp, rows * rows) + eps)
    out = (rows * rstd).reshape(shape)
    if w is not None:
        out *= w
    return out.astype(dtype, copy=False), (axes, rstd[:, 0], kind)


def _rms_norm_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    axes, rstd, kind = residual
    return _rows_backward(xp, g, x, w, axes, None, rstd[:, None], kind, (*needs, False))[:2]


rms_norm = Op("rms_norm", _rms_norm, _rms_norm_backward, inputs=("x", "w"), saves={"x": ("w", "x"), "w": ("x",)})


# z = x/d, d = max(|x|_p, eps) along dim;  dx = (g - [|x|_p > eps] * sum(g*z) * sign(x)*(|x|/|x|_p)^(p - 1)) / d
def _normalize(xp: Any, x: Array, p: float, dim: int, eps: float) -> tuple[Array, Any]:
    dtype = x.dtype
    (x,) = as_float32(x)
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
    g, x = as_float32(g, saved[0])
    over = xp.where(norm > eps, norm, 1)
    if p == 2:
        slope = x / over
    elif p == 1:
        slope = xp.sign(x)
    elif p == math.inf:
        slope = xp.sign(x) * (xp.abs(x) == norm)
        slope /= xp.maximum(xp.abs(slope).sum(axis=dim, keepdims=True), 1)  # maxima that are equal share
    else:
        slope = xp.sign(x) * (xp.abs(x) / over) ** (p - 1)
    slope *= (g * x).sum(axis=dim, keepdims=True) / over * (norm > eps)
    dx = (g - slope) / xp.maximum(norm, eps)
    return (dx.astype(dtype, copy=False),)


normalize = Op("normalize", _normalize, _normalize_backward, inputs=("x",), saves=("x",))


# Normalisation over channels: batch_norm, group_norm. Rows are the positions of one channel of one sample.
#
# One pass takes the sums of every row, a few numbers a row become statistics, and a second pass maps every row by a
# factor and a summand. A layout says which rows are normalised together: that is all in which the two differ.


Tell = Callable[[Array, Array, int], None]


class RowGroups:
    """Which rows are normalised together.

    matrix: (N, C); positions: the length of a row; count: over how many elements a statistic is taken, at least 1
    """

    collective = False  # whether backward asks `collect` even where no gradient of x is wanted: others wait there
    matrix: tuple[int, ...]
    positions: int
    count: int

    def statistics(self, xp: Any, x: Array) -> tuple[Array, Array]:
        """The means, and the biased variances. x: (N * C, positions)."""
        first, second = self.moments(xp, x, None)
        mean = first / self.count
        var = second / self.count - mean * mean
        if is_far(xp, mean, var):
            var = self.moments(xp, x, mean)[1] / self.count
        return mean, var

    def moments(self, xp: Any, x: Array, shift: Array | None) -> tuple[Array, Array]:
        """Statistics: the sums of x, and of the squares of x, or of x - shift. x: (N * C, positions)."""
        raise NotImplementedError

    def collect(self, xp: Any, *sums: Array) -> Sequence[Array]:
        """The statistics of sums of rows, (N, C) each."""
        raise NotImplementedError

    def broadcast(self, xp: Any, statistic: Array) -> Array:
        """A statistic as what broadcasts against (N, C)."""
        raise NotImplementedError


class BatchRows(RowGroups):
    """A channel of all samples is normalised together: statistics are (C,)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.matrix = shape[:2]
        self.positions = math.prod(shape[2:])
        self.count = max(shape[0] * self.positions, 1)

    def moments(self, xp: Any, x: Array, shift: Array | None) -> tuple[Array, Array]:
        first, second = channel_sums(xp, x, None, None if shift is None else _per_row(xp, self, shift))
        return first.reshape(self.matrix).sum(axis=0), second.reshape(self.matrix).sum(axis=0)

    def collect(self, xp: Any, *sums: Array) -> Sequence[Array]:
        return [each.sum(axis=0) for each in sums]

    def broadcast(self, xp: Any, statistic: Array) -> Array:
        return statistic


class _ChannelGroups(RowGroups):
    """The channels of a group of one sample are normalised together: statistics are (N, groups)."""

    def __init__(self, shape: tuple[int, ...], groups: int) -> None:
        self.matrix = shape[:2]
        self.positions = math.prod(shape[2:])
        self.groups, self.members = int(groups), shape[1] // int(groups)  # CuPy repeats by no NumPy integer
        self.count = max(self.members * self.positions, 1)

    def moments(self, xp: Any, x: Array, shift: Array | None) -> tuple[Array, Array]:
        sets = x.reshape(self.matrix[0] * self.groups, self.members * self.positions)
        first, second = channel_sums(xp, sets, None, None if shift is None else shift.reshape(-1))
        return first.reshape(-1, self.groups), second.reshape(-1, self.groups)

    def collect(self, xp: Any, *sums: Array) -> Sequence[Array]:
        return [each.reshape(-1, self.groups, self.members).sum(axis=2) for each in sums]

    def broadcast(self, xp: Any, statistic: Array) -> Array:
        return xp.repeat(statistic, self.members, axis=1)


@array_function
def channel_sums(xp: Any, x: Array, y: Array | None, shift: Array | None) -> tuple[Array, Array]:
    """Of every row: the sums of x and of x*y, or where y is None of x*x; with `shift`, of what is left of y.

    x, y: (rows, n); shift: (rows,). Returns two of (rows,).
    """
    other = x if y is None else y
    if shift is not None:
        other = other - shift[:, None]
    return x.sum(axis=1), ((other if y is None else x) * other).sum(axis=1)


@array_function
def channel_lines(xp: Any, x: Array, a: Array, c: Array, y: Array | None = None, s: Array | None = None) -> Array:
    """x*a + c, or x*a + y*s + c. x, y: (rows, n); a, c, s: (rows,)."""
    out = x * a[:, None] + c[:, None]
    if y is not None and s is not None:
        out += y * s[:, None]
    return out


def _per_row(xp: Any, layout: RowGroups, values: Array) -> Array:
    """What broadcasts against (N, C), as one number a row."""
    return xp.ascontiguousarray(xp.broadcast_to(values, layout.matrix)).reshape(-1)


def _map_rows(xp: Any, layout: RowGroups, x: Array, a: Array, c: Array, y: Array | None = None, s: Any = None) -> Array:
    """`channel_lines` of factors and summands that broadcast against (N, C)."""
    a, c = _per_row(xp, layout, a), _per_row(xp, layout, c)
    return channel_lines(xp, x, a, c, y, None if s is None else _per_row(xp, layout, s))


# z = (x - m)*r*w + b, m = mean x, r = 1/sqrt(var x + eps), over the rows that the layout takes together;
# with h = (x - m)*r:  dx = r*(g*w - mean(g*w) - h*mean(g*w*h)), dw = sum g*h, db = sum g over samples and positions;
# where m and r are given, fixed:  dx = r*g*w
def _forward(
    xp: Any, x: Array, w: Array | None, b: Array | None, layout: RowGroups, eps: float, tell: Tell | None
) -> tuple[Array, Any]:
    dtype, shape, kind = x.dtype, x.shape, kind_of(x, w, b)
    x, w, b = as_float32(x, w, b)
    x = x.reshape(math.prod(layout.matrix), layout.positions)
    mean, var = layout.statistics(xp, x)
    if tell is not None:
        tell(mean, var, layout.count)
    rstd = 1 / xp.sqrt(var + float(eps))
    out = _map_rows(xp, layout, x, *_line(xp, layout, mean, rstd, w, b))
    return out.reshape(shape).astype(dtype, copy=False), (layout, mean, rstd, kind, False)


def _line(
    xp: Any, layout: RowGroups, mean: Array, rstd: Array, w: Array | None, b: Array | None
) -> tuple[Array, Array]:
    """The factor and the summand of (x - mean)*rstd*w + b."""
    scale = layout.broadcast(xp, rstd) if w is None else layout.broadcast(xp, rstd) * w
    shift = layout.broadcast(xp, mean) * scale
    return scale, -shift if b is None else b - shift


def _backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    layout, mean, rstd, kind, fixed = residual
    dtype, shape = g.dtype, g.shape
    g, x, w = as_float32(g, x, w)
    g = g.reshape(math.prod(layout.matrix), layout.positions)
    if x is None:
        return None, None, g.sum(axis=1).reshape(layout.matrix).sum(axis=0).astype(kind, copy=False)
    x = x.reshape(g.shape)
    m, r = layout.broadcast(xp, mean), layout.broadcast(xp, rstd)
    far = is_far(xp, mean, 1 / (rstd * rstd))
    sums = channel_sums(xp, g, x, _per_row(xp, layout, m) if far else None)
    along, across = (each.reshape(layout.matrix) for each in sums)
    if not far:
        across -= m * along  # sum g*(x - m)
    dw = (across * r).sum(axis=0).astype(kind, copy=False) if needs[1] else None
    db = along.sum(axis=0).astype(kind, copy=False) if needs[2] else None
    if not (needs[0] or layout.collective):
        return None, dw, db
    scale = r if w is None else r * w
    if fixed:
        dx = _map_rows(xp, layout, g, scale, xp.zeros_like(scale))
    else:
        if w is not None:
            along, across = along * w, across * w
        along, across = layout.collect(xp, along, across)
        if not needs[0]:
            return None, dw, db
        slope = across * (rstd * rstd * rstd / -layout.count)
        shift = along * (rstd / -layout.count) - mean * slope
        dx = _map_rows(xp, layout, g, scale, layout.broadcast(xp, shift), x, layout.broadcast(xp, slope))
    return dx.reshape(shape).astype(dtype, copy=False), dw, db


def _batch_norm(
    xp: Any,
    x: Array,
    w: Array | None,
    b: Array | None,
    eps: float,
    tell: Tell | None,
    layout: BatchRows | None = None,
) -> tuple[Array, Any]:
    """x: (N, C, ...); w, b: (C,).

    tell: called with the means and the biased variances, (C,), and the number of elements each was taken over.
    layout: None: the samples of x are the whole batch
    """
    return _forward(xp, x, w, b, BatchRows(x.shape) if layout is None else layout, eps, tell)


batch_norm = Op("batch_norm", _batch_norm, _backward, inputs=("x", "w", "b"), saves=NEEDED)


def _group_norm(
    xp: Any, x: Array, w: Array | None, b: Array | None, groups: int, eps: float, tell: Tell | None = None
) -> tuple[Array, Any]:
    """x: (N, C, ...); w, b: (C,).

    tell: called with the means and the biased variances, (N, groups), and the number of elements of each.
    """
    return _forward(xp, x, w, b, _ChannelGroups(x.shape, groups), eps, tell)


group_norm = Op("group_norm", _group_norm, _backward, inputs=("x", "w", "b"), saves=NEEDED)


def _channel_affine(
    xp: Any, x: Array, w: Array | None, b: Array | None, mean: Array, var: Array, eps: float
) -> tuple[Array, Any]:
    """By given statistics. x: (N, C, ...); w, b, mean, var: (C,)."""
    dtype, shape, kind = x.dtype, x.shape, kind_of(x, w, b)
    x, w, b, mean, var = as_float32(x, w, b, upcast(mean), upcast(var))
    layout = BatchRows(shape)
    x = x.reshape(math.prod(layout.matrix), layout.positions)
    mean, rstd = mean.astype(x.dtype), (1 / xp.sqrt(var + float(eps))).astype(x.dtype)
    out = _map_rows(xp, layout, x, *_line(xp, layout, mean, rstd, w, b))
    return out.reshape(shape).astype(dtype, copy=False), (layout, mean, rstd, kind, True)


channel_affine = Op("channel_affine", _channel_affine, _backward, inputs=("x", "w", "b"), saves=NEEDED)
