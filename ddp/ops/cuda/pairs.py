"""The ops that have kernels: their pairs as CuPy arrays take them, with the formulas of the ops themselves."""

from __future__ import annotations

from typing import Any

from ddp._engine.leaves import AccumulateInto
from ddp.ops import attention, lookup, noise, norm_rows
from ddp.ops._op import Array, Gradients, Needs, Saved, as_rows
from ddp.ops.cuda import attending, dropping, looking, rows
from ddp.ops.cuda import entropy as _entropy  # noqa: F401  # it gives cross entropy its kernels


def _dropout(xp: Any, x: Array, p: float, shape: tuple[int, ...], generator: Any) -> tuple[Array, Any]:
    key, order = attention.drawn(xp, generator), dropping.order(x, shape)
    return dropping.drop(xp, x, key, p, shape, order), (key, p, shape, order)


def _dropout_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (dropping.drop(xp, g, *residual),)


noise.dropout.launches(_dropout, _dropout_backward, native=True)


def _normalized(
    xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float, centered: bool
) -> tuple[Array, Any]:
    out, mean, rstd = rows.norm(xp, as_rows(x, axes), w, b, eps, centered)
    return out.reshape(x.shape), (axes, mean, rstd, norm_rows.kind_of(x, w, b))


def _layer_norm(xp: Any, x: Array, w: Array | None, b: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    return _normalized(xp, x, w, b, axes, eps, True)


def _layer_norm_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Saved = (None, None, None)
) -> Gradients:
    w, x = saved
    axes, mean, rstd, kind = residual
    x = None if x is None else as_rows(x, axes)
    inner = g.shape[g.ndim - axes :]
    dx, dw, db = rows.norm_backward(xp, as_rows(g, axes), x, w, mean, rstd, needs, inner, kind, outs)
    return None if dx is None else dx.reshape(g.shape), dw, db


def _rms_norm(xp: Any, x: Array, w: Array | None, axes: int, eps: float) -> tuple[Array, Any]:
    return _normalized(xp, x, w, None, axes, eps, False)


def _rms_norm_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Saved = (None, None)
) -> Gradients:
    return _layer_norm_backward(xp, g, (*needs, False), saved, residual, (*outs, None))[:2]


norm_rows.layer_norm.launches(_layer_norm, _layer_norm_backward, native=True, into="adding")
norm_rows.rms_norm.launches(_rms_norm, _rms_norm_backward, native=True, into="adding")
attention.attention.launches(attending.attention, attending.attention_backward, native=True)


def _embedding(xp: Any, w: Array, index: Array, padding: int | None, by_frequency: bool) -> tuple[Array, Any]:
    return xp.take(w, index, axis=0), (w.shape, index, padding, by_frequency)


def _embedding_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Saved = (None,)
) -> Gradients:
    shape, index, padding, by_frequency = residual
    if not looking.takes(g, index.size):
        return lookup.embedding.backward(xp, g, needs, saved, residual)
    dw, onto = outs[0], isinstance(outs[0], AccumulateInto)
    if onto:
        dw = dw.array
    if dw is None or dw.dtype != g.dtype or not dw.flags.c_contiguous:
        dw, onto = xp.empty(shape, g.dtype), False
    looking.add_rows(xp, index.reshape(-1), g.reshape(index.size, shape[1]), dw, onto, padding, by_frequency)
    return (dw,)


lookup.embedding.launches(_embedding, _embedding_backward, native=True, into="adding")
