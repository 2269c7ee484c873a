"""Average pooling: a running sum over shifted views, or over what each position sees where there are few positions."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, working
from ddp.ops.windows import Pair, Walk, frame


def _divisor(xp: Any, walk: Walk, count_include_pad: bool, override: int | None, dtype: Any) -> Any:
    """What each position's sum is divided by: a number, or an array (OH, OW)."""
    if override is not None:
        return override
    if walk.framed == walk.image:
        return walk.elements
    counts = []
    for n, k, s, p, out in zip(walk.image, walk.kernel, walk.stride, walk.padding, walk.out, strict=True):
        start = xp.arange(out) * s - p
        if count_include_pad:
            counts.append(xp.minimum(start + k, n + p) - start)
        else:
            counts.append(xp.minimum(start + k, n) - xp.maximum(start, 0))
    return (counts[0][:, None] * counts[1]).astype(dtype)


# z = sum of x under the window / divisor;  dx = g / divisor at every element of it
def _avg_pool2d(
    xp: Any, x: Array, walk: Walk, count_include_pad: bool, divisor_override: int | None
) -> tuple[Array, Any]:
    framed, wide = frame(xp, x, walk, 0), working(x)
    if _few(walk):
        total = walk.view(xp, framed, 2).sum((-2, -1), dtype=wide)
    else:
        total = xp.zeros((*x.shape[:2], *walk.out), wide)
        for rows, columns in walk.shifts():
            total += framed[..., rows, columns]
    divisor = _divisor(xp, walk, count_include_pad, divisor_override, total.dtype)
    total /= divisor
    return total.astype(x.dtype, copy=False), (walk, divisor)


def _avg_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    walk, divisor = residual
    part = (g / divisor).astype(g.dtype, copy=False)
    if _few(walk):
        back = xp.zeros((*g.shape[:2], *walk.framed), working(g))
        for p in range(walk.out[0]):
            rows = slice(p * walk.stride[0], p * walk.stride[0] + walk.kernel[0])
            for q in range(walk.out[1]):
                columns = slice(q * walk.stride[1], q * walk.stride[1] + walk.kernel[1])
                back[..., rows, columns] += part[..., p : p + 1, q : q + 1]
    elif walk.even:
        back = xp.empty((*g.shape[:2], *walk.framed), g.dtype)
        for rows, columns in walk.shifts():
            back[..., rows, columns] = part
    else:
        back = xp.zeros((*g.shape[:2], *walk.framed), working(g))
        for rows, columns in walk.shifts():
            back[..., rows, columns] += part
    return (back[..., walk.inside[0], walk.inside[1]].astype(g.dtype, copy=False),)


def _few(walk: Walk) -> bool:
    return walk.elements > walk.out[0] * walk.out[1]


avg_pool2d = Op("avg_pool2d", _avg_pool2d, _avg_pool2d_backward, inputs=("x",))


def _bins(n: int, out: int) -> list[slice]:
    """The windows of an adaptive pooling along an axis: of nearly one length, overlapping unless out divides n."""
    return [slice(i * n // out, -(-(i + 1) * n // out)) for i in range(out)]


# z[p,q] = mean of x[rows(p), columns(q)];  dx[rows(p), columns(q)] += g[p,q] / (their number)
def _adaptive_avg_pool2d(xp: Any, x: Array, size: Pair) -> tuple[Array, Any]:
    rows, columns = _bins(x.shape[2], size[0]), _bins(x.shape[3], size[1])
    lines = xp.empty((*x.shape[:2], size[0], x.shape[3]), working(x))
    for p, row in enumerate(rows):
        xp.mean(x[:, :, row], axis=2, dtype=lines.dtype, out=lines[:, :, p])
    out = xp.empty((*x.shape[:2], *size), x.dtype)
    for q, column in enumerate(columns):
        out[..., q] = lines[..., column].mean(-1)
    return out, (x.shape, rows, columns)


def _adaptive_avg_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, rows, columns = residual
    lines = xp.zeros((*g.shape[:3], shape[3]), working(g))
    for q, column in enumerate(columns):
        lines[..., column] += g[..., q : q + 1] / (column.stop - column.start)
    dx = xp.zeros(shape, lines.dtype)
    for p, row in enumerate(rows):
        dx[:, :, row] += lines[:, :, p : p + 1] / (row.stop - row.start)
    return (dx.astype(g.dtype, copy=False),)


adaptive_avg_pool2d = Op("adaptive_avg_pool2d", _adaptive_avg_pool2d, _adaptive_avg_pool2d_backward, inputs=("x",))
