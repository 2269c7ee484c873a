"""Losses whose forward and backward are worth fusing."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, total
from ddp.ops.reduce import peak


# z_n = log sum_c e^x_nc - x_n,target(n), reduced;  dx_nc = g_n*(softmax(x)_nc - [c = target(n)])
def _cross_entropy(xp: Any, x: Array, target: Array, reduction: str) -> tuple[Array, Any]:
    """x: (N, C, ...), target: (N, ...) of integers in [0, C)."""
    p = xp.subtract(x, peak(xp, x, 1))
    where = xp.expand_dims(target, 1)
    picked = xp.take_along_axis(p, where, axis=1)[:, 0]
    xp.exp(p, out=p)
    added = total(p, 1, wide=True)
    out = xp.log(added) - picked
    p /= xp.expand_dims(added, 1)
    count = out.size if reduction == "mean" else 1
    if reduction != "none":
        # The mean over no samples is nan, as in PyTorch, but without a warning.
        out = out.sum() / count if count else xp.full((), xp.nan)
    return out.astype(x.dtype, copy=False), (p, where, 1 / max(count, 1))


def _cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    p, where, scale = residual
    g = xp.broadcast_to(xp.expand_dims(g * scale, 1) if g.ndim else g * scale, where.shape)
    dx = p * g
    at_target = xp.take_along_axis(dx, where, axis=1)
    xp.put_along_axis(dx, where, at_target - g, axis=1)
    return (dx,)


cross_entropy = Op("cross_entropy", _cross_entropy, _cross_entropy_backward, inputs=("x",))
