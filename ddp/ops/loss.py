"""Losses of classification. Cross entropy keeps no probabilities: backward makes them again from the logits, block by
block, which is faster than writing them to memory and reading them back, and halves what a large vocabulary takes.
"""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, working
from ddp.ops.probability import added, blocks, columns, exponentials, scratch, shaped


def classes(xp: Any, x: Array, target: Array, keep: Array | None, weight: Array | None) -> tuple[Array, Any]:
    """Where the targets are in x.ravel(), and the weight of each sample: an array, or None if all weigh 1.

    x: (N, C) or (N, C, M); target: (N, M'), M' = 1 or M; keep: bool like target, None for all.
    """
    n, count = x.shape[:2]
    inner = x.shape[2] if x.ndim > 2 else 1
    if keep is not None:
        target = target * keep  # class 0 stands in for what is ignored
    where = target * inner if inner > 1 else target
    where = where + xp.arange(0, n * count * inner, count * inner).reshape(n, 1)
    if inner > 1:
        where += xp.arange(inner)
    weights = None if weight is None else weight.take(target).astype(working(x), copy=False)
    if keep is not None:
        weights = keep.astype(working(x)) if weights is None else weights * keep
    return where, weights


def spread(
    xp: Any, g: Array, scale: Any, weights: Array | None, keep: Array | None, where: Array, reduction: str
) -> Array:
    """The gradient of each sample's unreduced loss, without its weight where it has none: (N, M') or ()."""
    if reduction == "none":
        g = g.reshape(where.shape)
    elif reduction == "mean":
        g = g * scale
    if weights is not None:
        g = g * weights
    # Where nothing is kept the mean is nan, and its scale infinite; what was ignored gets 0 all the same.
    return g if keep is None else xp.where(keep.reshape(where.shape), g, g.dtype.type(0))


def reduced(xp: Any, losses: Array, weights: Array | None, reduction: str) -> tuple[Array, Any]:
    """The sum or the weighted mean of the losses, and 1 / the sum of the weights."""
    added_up = losses.sum()
    if reduction == "sum":
        return added_up, 1.0
    if weights is None:
        # The mean over no samples is nan, as in PyTorch.
        return (added_up / losses.size, 1 / losses.size) if losses.size else (xp.full((), xp.nan), 0.0)
    weight = weights.sum()
    return added_up / weight, 1 / weight


KEPT = 1 << 20  # elements up to which e^x is kept for backward: it is in the cache still, and fast to get


# z_n = w_n*((1-s)*(l_n - x_n,t(n)) + s/C*sum_c w_c*(l_n - x_nc)), l_n = log sum_c e^x_nc, t(n) the target, reduced;
# dx_nc = g_n*(w_n*(1-s)*(p_nc - [c = t(n)]) + s/C*(p_nc*sum_c w_c - w_c)), p_nc = e^(x_nc - l_n)
def _cross_entropy(
    xp: Any,
    x: Array,
    target: Array,
    keep: Array | None,
    weight: Array | None,
    smoothing: float,
    reduction: str,
    single: bool = False,
) -> tuple[Array, Any]:
    """x: (N, C, ...); target: (N, ...) of integers in [0, C), or anything where `keep` is False; weight: (C,).

    single: the loss is float32, whatever x is
    """
    rows, shape = columns(x, 1), target.shape
    target = target.reshape(len(rows), rows.shape[2] if rows.ndim > 2 else 1)
    keep = None if keep is None else keep.reshape(target.shape)
    where, weights = classes(xp, rows, target, keep, weight)
    wide = working(x)
    if weight is not None:
        weight = weight.astype(wide, copy=False)
    kept, top, sums = _exponentials(xp, rows, wide)
    # In float64, of which there are few: a loss near 0 is the difference of large numbers.
    losses = xp.log(sums, dtype="float64").reshape(where.shape)
    if not isinstance(top, float):
        losses += top.reshape(where.shape)
    logs = losses
    losses = losses - rows.reshape(-1).take(where)
    if weights is not None:
        losses *= weights
    if keep is not None:
        losses = xp.where(keep, losses, 0)  # whatever the logits there are
    if smoothing:
        mass = rows.shape[1] if weight is None else weight.sum()
        even = logs * mass - added(xp, rows.astype(wide, copy=False), weight).reshape(where.shape)
        if keep is not None:
            even = xp.where(keep, even, 0)
        losses = losses * (1 - smoothing) + even * (smoothing / rows.shape[1])
    scale: Any = 1.0
    if reduction == "none":
        out = losses.reshape(shape)
    else:
        out, scale = reduced(xp, losses, weights, reduction)
    kind = "float32" if single else x.dtype
    return out.astype(kind), (kept, top, sums, where, keep, weight, weights, smoothing, scale, reduction)


def _exponentials(xp: Any, rows: Array, wide: Any) -> tuple[Array | None, Array | float, Array]:
    """e^(rows - top) if it is worth keeping, top, and the sums along axis 1. rows: (N, C) or (N, C, M)."""
    if 0 < rows.size <= KEPT:
        e = xp.empty(rows.shape, wide)
        return e, *exponentials(xp, rows, e)
    shape = (rows.shape[0], 1, *rows.shape[2:])
    top, sums = xp.zeros(shape, wide), xp.empty(shape, wide)
    if rows.size:
        buffer = scratch(xp, rows, wide)
        for at in blocks(xp, rows.shape):
            part = rows[at]
            top[at], sums[at] = exponentials(xp, part, shaped(buffer, part))
    return None, top, sums


def _cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x = saved[0]
    kept, top, sums, where, keep, weight, weights, smoothing, scale, reduction = residual
    rows = columns(x, 1)
    dx = xp.empty(x.shape, x.dtype)
    wide = sums.dtype
    at_target = of_all = spread(xp, g.astype(wide, copy=False), scale, weights, keep, where, reduction)
    even = None
    if smoothing:
        part = spread(xp, g.astype(wide, copy=False), scale, None, keep, where, reduction) * (smoothing / rows.shape[1])
        mass = rows.shape[1] if weight is None else weight.sum()
        at_target = at_target * (1 - smoothing)
        of_all = at_target + part * mass
        even = xp.broadcast_to(part, where.shape).reshape(sums.shape).astype(wide, copy=False)
    factor = xp.divide(of_all.reshape(sums.shape) if of_all.ndim else of_all, sums, dtype=wide)
    results = columns(dx, 1)
    same = wide == x.dtype
    for at in (...,) if kept is not None else blocks(xp, rows.shape):
        d = results[at] if same else xp.empty(rows[at].shape, wide)
        if kept is not None:
            xp.multiply(kept, factor, out=d)
        else:
            xp.subtract(rows[at], top[at], out=d, dtype=wide)
            xp.exp(d, out=d)
            xp.multiply(d, factor[at], out=d)
        if even is not None:
            each = even[at]
            d -= each if weight is None else each * weight.reshape(-1, *[1] * (d.ndim - 2))
        if not same:
            results[at] = d
    flat = results.reshape(-1)
    flat[where] -= at_target.astype(dx.dtype, copy=False)
    return (dx,)


cross_entropy = Op("cross_entropy", _cross_entropy, _cross_entropy_backward, inputs=("x",), saves=("x",))


# z_n = sum_c t_nc*(l_n - x_nc), l_n = log sum_c e^x_nc, reduced;  dx_nc = g_n*(p_nc*sum_c t_nc - t_nc),
# dt_nc = g_n*(l_n - x_nc)
def _soft_cross_entropy(xp: Any, x: Array, t: Array, reduction: str) -> tuple[Array, Any]:
    """x, t: (N, C, ...); t holds the (weighted) probability of each class."""
    rows, targets, wide = columns(x, 1), columns(t, 1), working(x)
    shape = (len(rows), 1, *rows.shape[2:])
    top, sums, mass, mean = (xp.zeros(shape, wide) for _ in range(4))
    if x.size:
        buffer = scratch(xp, rows, wide)
        for at in blocks(xp, rows.shape):
            part, wanted = rows[at], targets[at].astype(wide, copy=False)
            e = shaped(buffer, part)
            top[at], sums[at] = exponentials(xp, part, e)
            mass[at] = added(xp, wanted)
            xp.subtract(part, top[at], out=e, dtype=wide)
            mean[at] = added(xp, xp.multiply(e, wanted, out=e))
        losses = xp.log(sums, dtype="float64") * mass - mean
    else:
        losses = mass
    scale: Any = 1.0
    if reduction == "none":
        out = losses.reshape(x.shape[0], *x.shape[2:])
    else:
        out, scale = reduced(xp, losses, None, reduction)
    return out.astype(x.dtype), (top, sums, mass, scale, reduction)


def _soft_cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, t = saved
    top, sums, mass, scale, reduction = residual
    rows, wide = columns(x, 1), sums.dtype
    g = spread(xp, g.astype(wide, copy=False), scale, None, None, sums, reduction)
    dx = dt = None
    if needs[0]:
        dx = xp.empty(x.shape, x.dtype)
        targets, results = columns(t, 1), columns(dx, 1)
        g = xp.broadcast_to(g, sums.shape)
        factor = g * mass / sums
        same = wide == x.dtype
        for at in blocks(xp, rows.shape) if x.size else ():
            part = rows[at]
            d = results[at] if same else xp.empty(part.shape, wide)
            xp.subtract(part, top[at], out=d, dtype=wide)
            xp.exp(d, out=d)
            xp.multiply(d, factor[at], out=d)
            d -= targets[at] * g[at]
            if not same:
                results[at] = d
    if needs[1]:
        dt = ((top + xp.log(sums) - rows) * g).astype(x.dtype, copy=False).reshape(x.shape)
    return dx, dt


soft_cross_entropy = Op(
    "soft_cross_entropy",
    _soft_cross_entropy,
    _soft_cross_entropy_backward,
    inputs=("x", "t"),
    saves={"x": ("x", "t"), "t": ("x",)},
)


# z_n = -w_n*x_n,t(n), t(n) the target, reduced;  dx_nc = -g_n*w_n*[c = t(n)]
def _nll_loss(
    xp: Any, x: Array, target: Array, keep: Array | None, weight: Array | None, reduction: str
) -> tuple[Array, Any]:
    """x: (N, C, ...); target: (N, ...) of integers in [0, C), or anything where `keep` is False; weight: (C,)."""
    rows, shape = columns(x, 1), target.shape
    target = target.reshape(len(rows), rows.shape[2] if rows.ndim > 2 else 1)
    where, weights = classes(xp, rows, target, None if keep is None else keep.reshape(target.shape), weight)
    losses = -rows.reshape(-1).take(where).astype(working(x), copy=False)
    if weights is not None:
        losses *= weights
    if keep is not None:
        losses = xp.where(keep.reshape(where.shape), losses, 0)
    scale: Any = 1.0
    if reduction == "none":
        out = losses.reshape(shape)
    else:
        out, scale = reduced(xp, losses, weights, reduction)
    return out.astype(x.dtype, copy=False), (x.shape, where, keep, weights, scale, reduction)


def _nll_loss_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, where, keep, weights, scale, reduction = residual
    dx = xp.zeros(shape, g.dtype)
    dx.reshape(-1)[where] = -spread(xp, g, scale, weights, keep, where, reduction)
    return (dx,)


nll_loss = Op("nll_loss", _nll_loss, _nll_loss_backward, inputs=("x",))
