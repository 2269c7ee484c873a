"""Ops on images as a GPU takes them: what comes out of images with channels last lies so, too.

Convolutions are cuDNN's. Everything else is computed by the array module's functions and copied into that format, so
that the next layer finds the format that its input had.
"""

from __future__ import annotations

from typing import Any

from ddp.ops import averages, conv, frames, norm_channels, pool, resize
from ddp.ops._op import BFLOAT16, Array, Gradients, Needs, Op, Saved
from ddp.ops.cuda import convolving
from ddp.ops.formats import laid, prefers_channels_last

conv.conv2d.launches(convolving.conv2d, convolving.conv2d_backward, native=True)
conv.conv_transpose2d.launches(convolving.conv_transpose2d, convolving.conv_transpose2d_backward, native=True)


def _general(op: Op, dtype: Any) -> Any:
    """The op that computes with the array module's functions."""
    return op.widened if dtype is BFLOAT16 else op


def _in_format(xp: Any, out: Any, x: Array) -> Any:
    if not prefers_channels_last(x):
        return out
    return tuple([laid(xp, each, True) for each in out]) if isinstance(out, tuple) else laid(xp, out, True)


def _keeping(op: Op) -> None:
    """The op by the array module's functions, with results and gradients laid out as the images are."""

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


_POOLS = pool.max_pool2d, pool.max_pool2d_with_indices, averages.avg_pool2d, averages.adaptive_avg_pool2d
_NORMS = norm_channels.batch_norm, norm_channels.channel_affine, norm_channels.group_norm
for _op in (frames.pad, resize.interpolate, *_POOLS, *_NORMS):
    _keeping(_op)
