"""Max pooling as a running maximum over shifted views: one pass an element of the kernel, and no unfolded copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, select
from ddp.ops.conv import Pair, output_size


def _shifts(out: Pair, kernel: Pair, stride: Pair, dilation: Pair) -> Iterator[tuple[Any, ...]]:
    """For each kernel element, in reading order, the index of what it sees in a framed (N, C, H, W)."""
    (oh, ow), (sh, sw), (dh, dw) = out, stride, dilation
    for i in range(kernel[0]):
        rows = slice(i * dh, i * dh + sh * (oh - 1) + 1, sh)
        for j in range(kernel[1]):
            yield ..., rows, slice(j * dw, j * dw + sw * (ow - 1) + 1, sw)


def _frame(xp: Any, x: Array, padding: Pair, value: float) -> Array:
    """x: (N, C, H, W) in a frame of `value`."""
    ph, pw = padding
    if not (ph or pw):
        return x
    n, c, h, w = x.shape
    framed = xp.full((n, c, h + 2 * ph, w + 2 * pw), value, x.dtype)
    framed[:, :, ph : ph + h, pw : pw + w] = x
    return framed


# z = max of x under the kernel;  dx = g at the first element that equals it, at the last nan (as PyTorch has it)
def _max_pool2d(xp: Any, x: Array, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> tuple[Array, Any]:
    out = (
        output_size(x.shape[2], kernel[0], stride[0], padding[0], dilation[0]),
        output_size(x.shape[3], kernel[1], stride[1], padding[1], dilation[1]),
    )
    framed = _frame(xp, x, padding, -xp.inf if x.dtype.kind == "f" else xp.iinfo(x.dtype).min)
    shifts = list(_shifts(out, kernel, stride, dilation))
    top = framed[shifts[0]].copy()
    for shift in shifts[1:]:
        xp.maximum(top, framed[shift], out=top)
    return top, (shifts, padding)


def _max_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    (x, out), (shifts, (ph, pw)) = saved, residual
    framed = _frame(xp, x, (ph, pw), xp.nan)  # which equals nothing: a window of -inf must not find the frame
    dx = xp.zeros(framed.shape, x.dtype)
    free = xp.ones(out.shape, bool)  # windows whose gradient has not gone anywhere yet
    for shift in shifts:
        hit = framed[shift] == out
        hit &= free
        free ^= hit
        dx[shift] += select(xp, hit, g)
    if free.any():  # windows whose maximum is nan
        framed = _frame(xp, x, (ph, pw), 0)
        for shift in reversed(shifts):
            hit = xp.isnan(framed[shift])
            hit &= free
            free ^= hit
            dx[shift] += select(xp, hit, g)
    return (dx[:, :, ph : ph + x.shape[2], pw : pw + x.shape[3]],)


max_pool2d = Op("max_pool2d", _max_pool2d, _max_pool2d_backward, inputs=("x",), saves=("x", "out"))
