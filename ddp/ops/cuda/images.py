"""Ops on images as a GPU takes them: what lies with channels last is taken so, and what comes out of it lies so, too.

Each pair chooses by how its input lies. What has no kernel of its own for that goes the general way, and is laid out
anew behind it, so that the next layer finds the format that its input had.
"""

from __future__ import annotations

from typing import Any

from ddp.ops import averages, conv, frames, norm_channels, pool, resize
from ddp.ops._op import BFLOAT16, Array, Gradients, Needs, Op, Saved
from ddp.ops.cuda import convolving, pooling, windows
from ddp.ops.formats import laid, prefers_channels_last
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


def _in_format(xp: Any, out: Array, x: Array) -> Array:
    return laid(xp, out, True) if prefers_channels_last(x) else out


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


_NORMS = norm_channels.batch_norm, norm_channels.channel_affine, norm_channels.group_norm
for _op in (frames.pad, resize.interpolate, *_NORMS):
    _keeping(_op)
