"""Ops on images as a GPU takes them: what lies with channels last is taken so, and what comes out of it lies so, too.

Each pair chooses by how its input lies. What has no kernel of its own for that goes the general way, and is laid out
anew behind it, so that the next layer finds the format that its input had.
"""

from __future__ import annotations

from typing import Any

from ddp.ops import averages, conv, frames, norm_channels, pool, resize
from ddp.ops._op import BFLOAT16, Array, Gradients, Needs, Op, Saved
from ddp.ops.cuda import channels, convolving, planes, planes_back, pooling, windows
from ddp.ops.cuda._source import wide
from ddp.ops.cuda.planes_walk import Planes
from ddp.ops.formats import laid, prefers_channels_last
from ddp.ops.norm_rows import kind_of
from ddp.ops.windows import Pair, Walk

conv.conv2d.launches(convolving.conv2d, convolving.conv2d_backward, native=True)
conv.conv_transpose2d.launches(convolving.conv_transpose2d, convolving.conv_transpose2d_backward, native=True)


def _general(op: Op, dtype: Any) -> Any:
    """The op that computes with the array module's functions."""
    return op.widened if dtype is BFLOAT16 else op


def _max_pool2d(xp: Any, x: Array, walk: Walk) -> tuple[Array, Any]:
    if not windows.SOURCE.takes(x.dtype):  # integers, of which there are few
        return pool._max_pool2d(xp, x, walk)
    last = prefers_channels_last(x)
    out, which, _ = (pooling if last else windows).max_pool(xp, x, walk, False)
    return out, (which, walk, last)


def _max_pool2d_with_indices(xp: Any, x: Array, walk: Walk) -> tuple[tuple[Array, Array], Any]:
    if not windows.SOURCE.takes(x.dtype):
        return pool._max_pool2d_with_indices(xp, x, walk)
    last = prefers_channels_last(x)
    out, which, where = (pooling if last else windows).max_pool(xp, x, walk, True)
    assert where is not None
    return (out, where), (which, walk, last)


def _max_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    which, walk, last = residual
    g = laid(xp, g, last)
    return ((pooling if last else windows).max_pool_backward(xp, g, which, walk),)


def _max_pool2d_with_indices_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return _max_pool2d_backward(xp, g[0], needs, saved, residual)


pool.max_pool2d.launches(_max_pool2d, _max_pool2d_backward, native=True, saves=())
pool.max_pool2d_with_indices.launches(_max_pool2d_with_indices, _max_pool2d_with_indices_backward, native=True)


def _avg_pool2d(
    xp: Any, x: Array, walk: Walk, count_include_pad: bool, divisor_override: int | None
) -> tuple[Array, Any]:
    if not prefers_channels_last(x) or not pooling.SOURCE.takes(x.dtype):
        op = _general(averages.avg_pool2d, x.dtype)
        how = {"count_include_pad": count_include_pad, "divisor_override": divisor_override}
        out, residual = op.forward(xp, x, walk=walk, **how)
        return out, (op, residual)
    out = pooling.avg_pool(xp, x, walk, count_include_pad, divisor_override)
    return out, (None, (walk, count_include_pad, divisor_override))


def _avg_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    op, inner = residual
    if op is not None:
        found: Gradients = op.backward(xp, g, needs, saved, inner)
        return found
    return (pooling.avg_pool_backward(xp, laid(xp, g, True), *inner),)


def _adaptive_avg_pool2d(xp: Any, x: Array, size: Pair) -> tuple[Array, Any]:
    if not prefers_channels_last(x) or not pooling.SOURCE.takes(x.dtype):
        op = _general(averages.adaptive_avg_pool2d, x.dtype)
        out, residual = op.forward(xp, x, size=size)
        return out, (op, residual)
    return pooling.adaptive_avg_pool(xp, x, size), (None, x.shape[2:])


def _adaptive_avg_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    op, inner = residual
    if op is not None:
        found: Gradients = op.backward(xp, g, needs, saved, inner)
        return found
    return (pooling.adaptive_avg_pool_backward(xp, laid(xp, g, True), inner),)


averages.avg_pool2d.launches(_avg_pool2d, _avg_pool2d_backward, native=True)
averages.adaptive_avg_pool2d.launches(_adaptive_avg_pool2d, _adaptive_avg_pool2d_backward, native=True)


def _rows(x: Array) -> Array | None:
    """x as an image with channels last, if it lies so; a matrix (N, C) does."""
    if x.ndim == 2 and x.flags.c_contiguous:
        return x[:, :, None, None]
    return x if prefers_channels_last(x) else None


def _in_format(xp: Any, out: Array, x: Array) -> Array:
    return laid(xp, out, True) if prefers_channels_last(x) else out


def _in_order(x: Array) -> bool:
    """Whether there are kernels for x as it lies in the order of its axes."""
    return bool(x.size) and planes.SOURCE.takes(x.dtype)


def _batch_norm(
    xp: Any, x: Array, w: Array | None, b: Array | None, eps: float, tell: Any, layout: Any = None
) -> tuple[Array, Any]:
    if layout is not None or not _in_order(x):
        op = _general(norm_channels.batch_norm, x.dtype)
        out, residual = op.forward(xp, x, w, b, eps=eps, tell=tell, layout=layout)
        return _in_format(xp, out, x), (op, residual, prefers_channels_last(x))
    kind, rows = wide(x.dtype), _rows(x)
    moved = getattr(tell, "arrays", lambda kind: None)(kind)
    moves = () if moved is None else moved
    if rows is None:
        x = xp.ascontiguousarray(x)
        at = Planes(x)
        mean, var, rstd = planes.statistics(xp, x, at, eps, *moves)
        out = planes.normalized(xp, x, at, mean, rstd, w, b)
    else:
        mean, var, rstd = channels.statistics(xp, rows, eps, *moves)
        out = channels.normalized(xp, rows, mean, rstd, w, b).reshape(x.shape)
    if moved is not None:
        tell.written()
    elif tell is not None:
        tell(mean, var, x.size // x.shape[1])
    return out, (None, (mean, rstd, kind_of(x, w, b), False), 0 if rows is None else None)


def _channel_affine(
    xp: Any, x: Array, w: Array | None, b: Array | None, mean: Array, var: Array, eps: float
) -> tuple[Array, Any]:
    if not _in_order(x):
        op = _general(norm_channels.channel_affine, x.dtype)
        if op is not norm_channels.channel_affine:
            mean, var = mean.astype("float32", copy=False), var.astype("float32", copy=False)
        out, residual = op.forward(xp, x, w, b, mean=mean, var=var, eps=eps)
        return _in_format(xp, out, x), (op, residual, prefers_channels_last(x))
    mean, rstd = planes.given(xp, x.dtype, mean, var, eps)
    rows = _rows(x)
    if rows is None:
        x = xp.ascontiguousarray(x)
        out = planes.normalized(xp, x, Planes(x), mean, rstd, w, b)
    else:
        out = channels.normalized(xp, rows, mean, rstd, w, b).reshape(x.shape)
    return out, (None, (mean, rstd, kind_of(x, w, b), True), 0 if rows is None else None)


def _group_norm(
    xp: Any, x: Array, w: Array | None, b: Array | None, groups: int, eps: float, tell: Any = None
) -> tuple[Array, Any]:
    last = prefers_channels_last(x)
    if not _in_order(x):
        op = _general(norm_channels.group_norm, x.dtype)
        out, residual = op.forward(xp, x, w, b, groups=groups, eps=eps, tell=tell)
        return _in_format(xp, out, x), (op, residual, last)
    x = xp.ascontiguousarray(x)
    at = Planes(x, groups)
    mean, var, rstd = planes.statistics(xp, x, at, eps)
    if tell is not None:
        tell(mean.reshape(-1, groups), var.reshape(-1, groups), at.count)
    out = planes.normalized(xp, x, at, mean, rstd, w, b)
    return laid(xp, out, True) if last else out, (None, (mean, rstd, kind_of(x, w, b), False), groups)


def _norm_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Saved = (None, None, None)
) -> Gradients:
    # groups: None where channels lie last, 0 where all samples have one statistic
    op, inner, groups = residual
    if op is not None:
        dx, dw, db = op.backward(xp, g, needs, saved, inner)
        return laid(xp, dx, True) if groups and dx is not None else dx, dw, db
    w, x = saved
    mean, rstd, kind, fixed = inner
    shape = g.shape
    if groups is not None:
        last = x is not None and prefers_channels_last(x)
        g, x = xp.ascontiguousarray(g), None if x is None else xp.ascontiguousarray(x)
        at = Planes(g, groups)
        dx, dw, db = planes_back.gradients(xp, g, x, at, mean, rstd, w, needs, fixed, kind, outs)
        return laid(xp, dx, True) if last and dx is not None else dx, dw, db
    g = laid(xp, g if g.ndim == 4 else g[:, :, None, None], True)
    images = None if x is None else laid(xp, x if x.ndim == 4 else x[:, :, None, None], True)
    dx, dw, db = channels.gradients(xp, g, images, mean, rstd, w, needs, fixed)
    found = [None if d is None else d.astype(kind, copy=False) for d in (dw, db)]
    return None if dx is None else dx.reshape(shape), *found


def _keeping(op: Op) -> None:
    """Has an op, which goes the general way, give what lies as its images do."""

    def forward(xp: Any, x: Array, *others: Any, **how: Any) -> tuple[Array, Any]:
        run = op if op.native else _general(op, x.dtype)
        out, residual = run.forward(xp, x, *others, **how)
        return _in_format(xp, out, x), (_general(op, x.dtype), residual, run is op, prefers_channels_last(x))

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        run, inner, plain, last = residual
        if plain and run is not op:  # the forward did not come by `Widened`
            inner = inner, None
        dx, *others = run.backward(xp, g, needs, saved, inner)
        return laid(xp, dx, True) if last and dx is not None else dx, *others

    op.launches(forward, backward, native=True)


for _op in (frames.pad, resize.interpolate):
    _keeping(_op)

norm_channels.batch_norm.launches(_batch_norm, _norm_backward, native=True, into="adding")
norm_channels.channel_affine.launches(_channel_affine, _norm_backward, native=True, into="adding")
norm_channels.group_norm.launches(_group_norm, _norm_backward, native=True, into="adding")
