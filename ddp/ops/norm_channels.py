"""Normalisation over channels: batch_norm, group_norm. Rows are the positions of one channel of one sample.

One pass takes the sums of every row, a few numbers a row become statistics, and a second pass draws a line over every
row. A layout says which rows are normalised together: that is all in which the two differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, single, widen
from ddp.ops.lines import LONG, lines, long_rows
from ddp.ops.norm_rows import NEEDED, dots, is_far, kind_of, largest, tiles

Tell = Callable[[Array, Array, int], None]


class Layout:
    """Which rows are normalised together.

    matrix: (N, C); positions: the length of a row; count: over how many elements a statistic is taken, at least 1
    """

    meets = False  # whether backward asks `collect` even where no gradient of x is wanted: others wait there
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

    def spread(self, xp: Any, statistic: Array) -> Array:
        """A statistic as what broadcasts against (N, C)."""
        raise NotImplementedError


class Batch(Layout):
    """A channel of all samples is normalised together: statistics are (C,)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.matrix = shape[:2]
        self.positions = math.prod(shape[2:])
        self.count = max(shape[0] * self.positions, 1)

    def moments(self, xp: Any, x: Array, shift: Array | None) -> tuple[Array, Array]:
        first, second = _sums(xp, x, None, None if shift is None else _per_row(xp, self, shift))
        return first.reshape(self.matrix).sum(axis=0), second.reshape(self.matrix).sum(axis=0)

    def collect(self, xp: Any, *sums: Array) -> Sequence[Array]:
        return [each.sum(axis=0) for each in sums]

    def spread(self, xp: Any, statistic: Array) -> Array:
        return statistic


class _Groups(Layout):
    """The channels of a group of one sample are normalised together: statistics are (N, groups)."""

    def __init__(self, shape: tuple[int, ...], groups: int) -> None:
        self.matrix = shape[:2]
        self.positions = math.prod(shape[2:])
        self.groups, self.members = int(groups), shape[1] // int(groups)  # CuPy repeats by no NumPy integer
        self.count = max(self.members * self.positions, 1)

    def moments(self, xp: Any, x: Array, shift: Array | None) -> tuple[Array, Array]:
        sets = x.reshape(self.matrix[0] * self.groups, self.members * self.positions)
        first, second = _sums(xp, sets, None, None if shift is None else shift.reshape(-1))
        return first.reshape(-1, self.groups), second.reshape(-1, self.groups)

    def collect(self, xp: Any, *sums: Array) -> Sequence[Array]:
        return [each.reshape(-1, self.groups, self.members).sum(axis=2) for each in sums]

    def spread(self, xp: Any, statistic: Array) -> Array:
        return xp.repeat(statistic, self.members, axis=1)


def _sums(xp: Any, x: Array, y: Array | None, shift: Array | None) -> tuple[Array, Array]:
    """Of every row: the sums of x and of x*y, or where y is None of x*x; with `shift`, of what is left of y.

    x, y: (rows, n); shift: (rows,). Returns two of (rows,).
    """
    return SUMS[xp.__name__](xp, x, y, shift)


def _sums_by_tiles(xp: Any, x: Array, y: Array | None, shift: Array | None) -> tuple[Array, Array]:
    rows, n = x.shape
    if n == 1:
        x, other = x[:, 0], x[:, 0] if y is None else y[:, 0]
        other = other if shift is None else other - shift
        return x, (other if y is None else x) * other
    first, second = xp.empty(rows, x.dtype), xp.empty(rows, x.dtype)
    ones = xp.ones(n, x.dtype)
    for tile in tiles(xp, rows, n * x.itemsize):
        t = x[tile]
        other = t if y is None else y[tile]
        if shift is not None:
            other = other - shift[tile, None]
        first[tile] = t @ ones
        second[tile] = dots(xp, other if y is None else t, other)
    return first, second


def _per_row(xp: Any, layout: Layout, values: Array) -> Array:
    """What broadcasts against (N, C), as one number a row."""
    return xp.broadcast_to(values, layout.matrix).reshape(-1)


def _matrix(xp: Any, layout: Layout, x: Array, *values: Array) -> Iterator[tuple[slice, list[Array]]] | None:
    """Tiles of samples with the values of each element, where rows are short: all samples are a matrix of long rows.

    None where rows are long, or where values differ from sample to sample. x: (N * C, positions); values broadcast
    against (N, C).
    """
    n = x.shape[1]
    if n >= LONG or (values[0].ndim > 1 and n != 1):
        return None
    samples, channels = layout.matrix
    values = tuple(xp.repeat(each, n) if each.ndim == 1 and n != 1 else each for each in values)
    return (
        (tile, [each if each.ndim == 1 else each[tile] for each in values])
        for tile in tiles(xp, samples, channels * n * x.itemsize)
    )


def _draw(xp: Any, layout: Layout, x: Array, scale: Array, shift: Array) -> Array:
    """x*scale + shift. x: (N * C, positions); scale, shift broadcast against (N, C)."""
    rows, n = x.shape
    out = xp.empty(x.shape, x.dtype)
    short = _matrix(xp, layout, x, scale, shift)
    if short is not None:
        samples, channels = layout.matrix
        x, z = x.reshape(samples, channels * n), out.reshape(samples, channels * n)
        with long_rows(xp, channels * n):
            for tile, (a, c) in short:
                t = xp.multiply(x[tile], a, out=z[tile])
                t += c
        return out
    scale, shift = _per_row(xp, layout, scale), _per_row(xp, layout, shift)
    with long_rows(xp, n):
        draw = lines(xp, largest(xp, rows, n * x.itemsize), n, x.dtype)
        for tile in tiles(xp, rows, n * x.itemsize):
            draw.line(x[tile], scale[tile], shift[tile], out[tile])
    return out


def _draw_plane(xp: Any, layout: Layout, x: Array, a: Array, y: Array, s: Array, c: Array) -> Array:
    """x*a + y*s + c. x, y: (N * C, positions); a, s, c broadcast against (N, C)."""
    rows, n = x.shape
    out = xp.empty(x.shape, x.dtype)
    short = _matrix(xp, layout, x, a, s, c)
    if short is not None:
        samples, channels = layout.matrix
        x, y, z = (each.reshape(samples, channels * n) for each in (x, y, out))
        with long_rows(xp, channels * n):
            for tile, (a, s, c) in short:
                t = xp.multiply(y[tile], s, out=z[tile])
                t += c
                t += x[tile] * a
        return out
    a, s, c = (_per_row(xp, layout, values) for values in (a, s, c))
    with long_rows(xp, n):
        draw = lines(xp, largest(xp, rows, n * x.itemsize), n, x.dtype)
        for tile in tiles(xp, rows, n * x.itemsize):
            draw.plane(x[tile], a[tile], y[tile], s[tile], c[tile], out[tile])
    return out


def _sums_by_reductions(xp: Any, x: Array, y: Array | None, shift: Array | None) -> tuple[Array, Array]:
    # CuPy's products cannot be captured in a CUDA graph, its sums can.
    other = x if y is None else y
    if shift is not None:
        other = other - shift[:, None]
    return x.sum(axis=1), ((other if y is None else x) * other).sum(axis=1)


SUMS = {"numpy": _sums_by_tiles, "cupy": _sums_by_reductions}


# z = (x - m)*r*w + b, m = mean x, r = 1/sqrt(var x + eps), over the rows that the layout takes together;
# with h = (x - m)*r:  dx = r*(g*w - mean(g*w) - h*mean(g*w*h)), dw = sum g*h, db = sum g over samples and positions;
# where m and r are given, fixed:  dx = r*g*w
def _forward(
    xp: Any, x: Array, w: Array | None, b: Array | None, layout: Layout, eps: float, tell: Tell | None
) -> tuple[Array, Any]:
    dtype, shape, kind = x.dtype, x.shape, kind_of(x, w, b)
    x, w, b = single(x, w, b)
    x = x.reshape(math.prod(layout.matrix), layout.positions)
    mean, var = layout.statistics(xp, x)
    if tell is not None:
        tell(mean, var, layout.count)
    rstd = 1 / xp.sqrt(var + float(eps))
    out = _draw(xp, layout, x, *_line(xp, layout, mean, rstd, w, b))
    return out.reshape(shape).astype(dtype, copy=False), (layout, mean, rstd, kind, False)


def _line(xp: Any, layout: Layout, mean: Array, rstd: Array, w: Array | None, b: Array | None) -> tuple[Array, Array]:
    """The factor and the summand of (x - mean)*rstd*w + b."""
    scale = layout.spread(xp, rstd) if w is None else layout.spread(xp, rstd) * w
    shift = layout.spread(xp, mean) * scale
    return scale, -shift if b is None else b - shift


def _backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    layout, mean, rstd, kind, fixed = residual
    dtype, shape = g.dtype, g.shape
    g, x, w = single(g, x, w)
    g = g.reshape(math.prod(layout.matrix), layout.positions)
    if x is None:
        return None, None, g.sum(axis=1).reshape(layout.matrix).sum(axis=0).astype(kind, copy=False)
    x = x.reshape(g.shape)
    m, r = layout.spread(xp, mean), layout.spread(xp, rstd)
    far = is_far(xp, mean, 1 / (rstd * rstd))
    sums = _sums(xp, g, x, _per_row(xp, layout, m) if far else None)
    along, across = (each.reshape(layout.matrix) for each in sums)
    if not far:
        across -= m * along  # sum g*(x - m)
    dw = (across * r).sum(axis=0).astype(kind, copy=False) if needs[1] else None
    db = along.sum(axis=0).astype(kind, copy=False) if needs[2] else None
    if not (needs[0] or layout.meets):
        return None, dw, db
    scale = r if w is None else r * w
    if fixed:
        dx = _draw(xp, layout, g, scale, xp.zeros_like(scale))
    else:
        if w is not None:
            along, across = along * w, across * w
        along, across = layout.collect(xp, along, across)
        if not needs[0]:
            return None, dw, db
        slope = across * (rstd * rstd * rstd / -layout.count)
        shift = along * (rstd / -layout.count) - mean * slope
        dx = _draw_plane(xp, layout, g, scale, x, layout.spread(xp, slope), layout.spread(xp, shift))
    return dx.reshape(shape).astype(dtype, copy=False), dw, db


def _batch_norm(
    xp: Any,
    x: Array,
    w: Array | None,
    b: Array | None,
    eps: float,
    tell: Tell | None,
    layout: Batch | None = None,
) -> tuple[Array, Any]:
    """x: (N, C, ...); w, b: (C,).

    tell: called with the means and the biased variances, (C,), and the number of elements each was taken over.
    layout: None: the samples of x are the whole batch
    """
    return _forward(xp, x, w, b, Batch(x.shape) if layout is None else layout, eps, tell)


batch_norm = Op("batch_norm", _batch_norm, _backward, inputs=("x", "w", "b"), saves=NEEDED)


def _group_norm(
    xp: Any, x: Array, w: Array | None, b: Array | None, groups: int, eps: float, tell: Tell | None = None
) -> tuple[Array, Any]:
    """x: (N, C, ...); w, b: (C,).

    tell: called with the means and the biased variances, (N, groups), and the number of elements of each.
    """
    return _forward(xp, x, w, b, _Groups(x.shape, groups), eps, tell)


group_norm = Op("group_norm", _group_norm, _backward, inputs=("x", "w", "b"), saves=NEEDED)


def _channel_affine(
    xp: Any, x: Array, w: Array | None, b: Array | None, mean: Array, var: Array, eps: float
) -> tuple[Array, Any]:
    """By given statistics. x: (N, C, ...); w, b, mean, var: (C,)."""
    dtype, shape, kind = x.dtype, x.shape, kind_of(x, w, b)
    x, w, b, mean, var = single(x, w, b, widen(mean), widen(var))
    layout = Batch(shape)
    x = x.reshape(math.prod(layout.matrix), layout.positions)
    mean, rstd = mean.astype(x.dtype), (1 / xp.sqrt(var + float(eps))).astype(x.dtype)
    out = _draw(xp, layout, x, *_line(xp, layout, mean, rstd, w, b))
    return out.reshape(shape).astype(dtype, copy=False), (layout, mean, rstd, kind, True)


channel_affine = Op("channel_affine", _channel_affine, _backward, inputs=("x", "w", "b"), saves=NEEDED)
