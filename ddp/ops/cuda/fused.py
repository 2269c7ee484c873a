"""Attention in one kernel, by cuDNN: which cases it is asked for, and how arrays are shown to it.

It is asked for 16 bits without a mask, (B, H, T, D) in any order of memory whose rows lie in one piece: q, k and v as
views of one projection are read where they lie, and the result lies as q does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp.ops._op import Array, Needs
from ddp.ops.formats import dense_strides, order_of, ordered

if TYPE_CHECKING:
    from ddp._gpu import dnn_attention as dnn
else:
    dnn = None  # imported with the first attention on a GPU

ALIGNED = 16  # bytes, of every row


def _seen(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array] | None:
    """q, k, v as (B, H, T, D), where key and value may have a divisor of H; None if they are anything else.

    Five axes are those of grouped heads: (B, Hk, H/Hk, T, D) and (B, Hk, 1, T, D).
    """
    if q.ndim == 3:
        q, k, v = (x[:, None] for x in (q, k, v))
    elif q.ndim == 5 and k.shape[2] == 1 == v.shape[2] and q.shape[:2] == k.shape[:2] == v.shape[:2]:
        q, k, v = q.reshape(q.shape[0], q.shape[1] * q.shape[2], *q.shape[3:]), k[:, :, 0], v[:, :, 0]
    if q.ndim != 4 or not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
        return None
    if 0 in (*q.shape, *k.shape, *v.shape) or q.shape[1] % k.shape[1]:
        return None
    return q, k, v


def _fit(xp: Any, x: Array) -> Array:
    """x, or a copy where a row does not lie in one piece, is not aligned, or is broadcast."""
    steps = [n for n, size in zip(x.strides[:-1], x.shape[:-1], strict=True) if size > 1]
    good = x.strides[-1] == x.itemsize and all(n > 0 and n % ALIGNED == 0 for n in steps)
    return x if good and x.data.ptr % ALIGNED == 0 else xp.array(x, order="C")


def _like(xp: Any, x: Array, last: int | None = None) -> Array:
    """Memory for an array like x, in its order, with `last` elements a row."""
    shape = (*x.shape[:-1], x.shape[-1] if last is None else last)
    return ordered(xp, shape, x.dtype, _order(x))


def _order(x: Array) -> tuple[int, ...]:
    order = order_of(x)
    return order if order[-1] == 3 else (0, 1, 2, 3)


def _open() -> Any:
    global dnn
    if dnn is None:
        from ddp._gpu import dnn_attention as dnn
    return dnn


def forward(
    xp: Any, q: Array, k: Array, v: Array, scale: float, causal: bool, p: float, key: Any
) -> tuple[Array, Any] | None:
    """The result and what backward wants; None where cuDNN does not take it."""
    if q.dtype.itemsize != 2 or not q.dtype == k.dtype == v.dtype or p >= 1:
        return None
    door = _open()
    seen = _seen(q, k, v)
    if seen is None or door.dnn.library(xp) is None:
        return None
    queries, keys, values = (_fit(xp, x) for x in seen)
    out = _like(xp, queries, values.shape[-1])
    stats = xp.ndarray((*queries.shape[:3], 1), "float32")
    how = door.How(float(scale), bool(causal), float(p))
    if p:
        # What is dropped must be the same in backward: so both can be had, or neither is taken.
        plan = _backward(door, queries, keys, values, out, out, stats, how)
        if not plan.there(xp):
            return None
    if not door.forward(xp, queries, keys, values, out, stats, how, key if p else None):
        return None
    return out.reshape(_shape(q, values)), (stats, float(scale), causal, p, key if p else None, how)


def _shape(q: Array, v: Array) -> tuple[int, ...]:
    return (*q.shape[:-1], v.shape[-1])


def _joint(q: Array, k: Array, v: Array) -> bool:
    return bool(q.shape == k.shape == v.shape and all(_order(x) == (0, 2, 1, 3) for x in (q, k, v)))


def _gradients(xp: Any, q: Array, k: Array, v: Array) -> list[Array]:
    """Memory for the gradients: of what lies as (B, T, H, D) in parts of one (B, T, 3, H, D), which joins them."""
    if not _joint(q, k, v):
        return [_like(xp, x) for x in (q, k, v)]
    batch, heads, length, depth = q.shape
    joint = xp.ndarray((batch, length, 3, heads, depth), q.dtype)
    return [joint[:, :, i].transpose(0, 2, 1, 3) for i in range(3)]


def _gradient_strides(q: Array, k: Array, v: Array) -> list[tuple[int, ...]]:
    """Of what `_gradients` gives, in elements."""
    if not _joint(q, k, v):
        return [dense_strides(x.shape, _order(x)) for x in (q, k, v)]
    _, heads, length, depth = q.shape
    return [(3 * length * heads * depth, depth, 3 * heads * depth, 1)] * 3


def _backward(door: Any, q: Array, k: Array, v: Array, out: Array, g: Array, stats: Array, how: Any) -> Any:
    spec = door.dnn.spec
    found = [spec(x, strides) for x, strides in zip((q, k, v), _gradient_strides(q, k, v), strict=True)]
    return door.Backward(*(spec(x) for x in (q, k, v, out, g, stats)), found, how)


def backward(xp: Any, g: Array, needs: Needs, saved: tuple[Array, ...], residual: Any) -> list[Array | None] | None:
    """The gradients of q, k and v; None where cuDNN does not take it: then our own kernels can, from the same stats."""
    door = _open()
    q, k, v, out = saved
    stats, _, _, p, key, how = residual
    seen = _seen(q, k, v)
    assert seen is not None
    queries, keys, values = (_fit(xp, x) for x in seen)
    shape = (*queries.shape[:3], values.shape[-1])
    out, g = (_fit(xp, x.reshape(shape)) for x in (out, g))
    dq, dk, dv = _gradients(xp, queries, keys, values)
    plan = _backward(door, queries, keys, values, out, g, stats, how)
    arrays = {door.Q: queries, door.K: keys, door.V: values, door.OUT: out, door.DO: g, door.STATS: stats}
    if not plan.run(xp, {**arrays, door.DQ: dq, door.DK: dk, door.DV: dv}, key):
        if not p:
            return None
        # Only a gradient that lies otherwise than the result did could have been refused.
        g = _lay(xp, g, out)
        plan = _backward(door, queries, keys, values, out, g, stats, how)
        assert plan.run(xp, {**arrays, door.DO: g, door.DQ: dq, door.DK: dk, door.DV: dv}, key)
    found: list[Array | None] = []
    for d, x, need in zip((dq, dk, dv), (q, k, v), needs, strict=False):
        found.append(d.reshape(x.shape) if need else None)
    return found


def _lay(xp: Any, g: Array, like: Array) -> Array:
    made = _like(xp, like)
    made[...] = g
    return made
