"""The ops that have kernels: their pairs as CuPy arrays take them, with the formulas of the ops themselves."""

from __future__ import annotations

from typing import Any

from ddp.ops import attention, loss, noise, norm_rows, patches, pool, probability
from ddp.ops._op import Array, Gradients, Needs, Saved, as_rows
from ddp.ops.cuda import attending, choosing, dropping, normalizing, windows
from ddp.ops.cuda._source import wide


def _softmax(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
    return choosing.softmax(xp, x, dim), dim


def _softmax_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    return (choosing.softmax_backward(xp, g, saved[0], dim),)


probability.softmax.launches(_softmax, _softmax_backward)


def _log_softmax(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
    return choosing.softmax(xp, x, dim, "log_softmax"), dim


def _log_softmax_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    return (choosing.softmax_backward(xp, g, saved[0], dim, "log_softmax"),)


probability.log_softmax.launches(_log_softmax, _log_softmax_backward)


def _cross_entropy(
    xp: Any,
    x: Array,
    target: Array,
    keep: Array | None,
    weight: Array | None,
    smoothing: float,
    reduction: str,
) -> tuple[Array, Any]:
    # Copies: the target and the weights belong to the caller, who may write to them before backward.
    target = xp.array(target, "int64", order="C")
    keep = None if keep is None else xp.array(keep, bool, order="C")
    weight = None if weight is None else xp.array(weight, wide(x.dtype), order="C")
    losses, weights, tops, sums = choosing.entropy(xp, x, target, keep, weight, smoothing)
    scale: Any = 1.0
    out = losses
    if reduction != "none":
        out, scale = loss.reduced(xp, losses, weights, reduction)
    residual = target, keep, weight, weights, tops, sums, smoothing, scale, reduction
    return out.astype(x.dtype), residual


def _cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    target, keep, weight, weights, tops, sums, smoothing, scale, reduction = residual
    x = saved[0]
    g = g.astype(tops.dtype, copy=False)
    at = loss.spread(xp, g, scale, weights, keep, target, reduction) * (1 - smoothing)
    even = None
    if smoothing:
        even = xp.broadcast_to(loss.spread(xp, g, scale, None, keep, target, reduction), target.shape) * (
            smoothing / x.shape[1]
        )
    return (
        choosing.entropy_backward(xp, x, target, keep, weight, tops, sums, xp.broadcast_to(at, target.shape), even),
    )


loss.cross_entropy.launches(_cross_entropy, _cross_entropy_backward)


def _dropout(xp: Any, x: Array, p: float, shape: tuple[int, ...], generator: Any) -> tuple[Array, Any]:
    drawn = generator.random(shape, dtype=xp.float32)
    scale = 1 / (1 - p) if p < 1 else 0.0
    out, keep = dropping.drop(xp, x, xp.ascontiguousarray(xp.broadcast_to(drawn, x.shape)), p, scale)
    return out, (keep, scale)


def _dropout_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (dropping.drop_backward(xp, g, *residual),)


noise.dropout.launches(_dropout, _dropout_backward)


def _normalized(
    xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float, centered: bool
) -> tuple[Array, Any]:
    kind = norm_rows.kind_of(x, w, b)
    out, mean, rstd = normalizing.norm(xp, as_rows(x, axes), w, b, eps, centered)
    return out.reshape(x.shape), (axes, mean, rstd, kind)


def _normalized_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    w, x = saved
    axes, mean, rstd, kind = residual
    shape, inner = g.shape, g.shape[g.ndim - axes :]
    g = as_rows(g, axes)
    dx = dw = db = None
    if needs[0]:
        dx = normalizing.norm_backward(xp, g, as_rows(x, axes), w, mean, rstd).reshape(shape)
    if needs[1]:
        dw, db = normalizing.norm_columns(xp, g, as_rows(x, axes), mean, rstd)
    elif len(needs) > 2 and needs[2]:
        db = g.sum(axis=0, dtype=rstd.dtype)
    found = [None if d is None else d.reshape(inner).astype(kind, copy=False) for d in (dw, db)]
    return dx, *found[: len(needs) - 1]


def _layer_norm(xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    return _normalized(xp, x, w, b, axes, eps, True)


def _rms_norm(xp: Any, x: Array, w: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    return _normalized(xp, x, w, None, axes, eps, False)


norm_rows.layer_norm.launches(_layer_norm, _normalized_backward)
norm_rows.rms_norm.launches(_rms_norm, _normalized_backward)
attention.attention.launches(attending.attention, attending.attention_backward)


def _max_pool2d(xp: Any, x: Array, walk: Any) -> tuple[Array, Any]:
    if not windows.SOURCE.takes(x.dtype):  # integers, of which there are few
        return pool._max_pool2d(xp, x, walk)
    out, which, _ = windows.max_pool(xp, x, walk, False)
    return out, (which, walk)


def _max_pool2d_with_indices(xp: Any, x: Array, walk: Any) -> tuple[tuple[Array, Array], Any]:
    if not windows.SOURCE.takes(x.dtype):
        return pool._max_pool2d_with_indices(xp, x, walk)
    out, which, where = windows.max_pool(xp, x, walk, True)
    assert where is not None
    return (out, where), (which, walk)


def _max_pool2d_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (windows.max_pool_backward(xp, g, *residual),)


def _max_pool2d_with_indices_backward(xp: Any, g: Any, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return _max_pool2d_backward(xp, g[0], needs, saved, residual)


pool.max_pool2d.launches(_max_pool2d, _max_pool2d_backward)
pool.max_pool2d_with_indices.launches(_max_pool2d_with_indices, _max_pool2d_with_indices_backward)


def _unfold(xp: Any, x: Array, walk: Any) -> Array:
    return windows.to_columns(xp, x, walk)[:, 0]


def _fold(xp: Any, columns: Array, walk: Any) -> Array:
    dx = xp.empty((columns.shape[0], columns.shape[1] // walk.elements, *walk.image), columns.dtype)
    windows.from_columns(xp, columns, walk, dx)
    return dx


def _im2col(xp: Any, x: Array, walk: Any) -> tuple[Array, Any]:
    return _unfold(xp, x, walk), walk


def _im2col_backward(xp: Any, g: Array, needs: Needs, saved: Saved, walk: Any) -> Gradients:
    return (_fold(xp, g, walk),)


def _col2im(xp: Any, x: Array, walk: Any) -> tuple[Array, Any]:
    return _fold(xp, x, walk), walk


def _col2im_backward(xp: Any, g: Array, needs: Needs, saved: Saved, walk: Any) -> Gradients:
    return (_unfold(xp, g, walk),)


patches.im2col.launches(_im2col, _im2col_backward)
patches.col2im.launches(_col2im, _col2im_backward)
