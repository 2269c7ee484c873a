"""A linear layer with its activation, and two of them with one between: what a Transformer's feed-forward part is.

On a GPU the activation, its slope and the bias gradients ride along with the products, and nothing of the hidden width
passes through memory more often than it must. Elsewhere these are the separate ops, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, select
from ddp.ops.activation import gelu
from ddp.ops.products import _linear, _linear_backward

ACTIVATIONS = ("relu", "gelu_tanh")


def _act(xp: Any, x: Array, activation: str, keep: bool) -> tuple[Array, Any]:
    """z = act(x), and its slope."""
    if activation == "relu":
        z = xp.maximum(x, 0)
        return z, z > 0
    return gelu.forward(xp, x, tanh=True, slope=keep)


def _behind(xp: Any, g: Array, slope: Array, activation: str) -> Array:
    return select(xp, slope, g) if activation == "relu" else g * slope


# z = act(x @ w^T + b);  with dy = g*act': dx = dy @ w, dw = dy^T @ x, db = sum dy
def _linear_act(xp: Any, x: Array, w: Array, b: Array | None, activation: str, keep: bool) -> tuple[Array, Any]:
    y, shape = _linear(xp, x, w, b)
    z, slope = _act(xp, y, activation, keep)
    return z, (slope, activation, shape)


def _linear_act_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, outs: Sequence[Array | None] = (None, None, None)
) -> Gradients:
    slope, activation, shape = residual
    return _linear_backward(xp, _behind(xp, g, slope, activation), needs, saved, shape, outs)


linear_act = Op(
    "linear_act",
    _linear_act,
    _linear_act_backward,
    inputs=("x", "w", "b"),
    saves={"x": ("w",), "w": ("x",), "b": ()},
    into=True,
)


# h = act(x @ w1^T + b1), z = h @ w2^T + b2;  dw2 = g^T @ h, db2 = sum g, with dy = (g @ w2)*act' as above
def _feed_forward(
    xp: Any, x: Array, w1: Array, b1: Array | None, w2: Array, b2: Array | None, activation: str, keep: bool
) -> tuple[Array, Any]:
    hidden, residual = _linear_act(xp, x, w1, b1, activation, keep)
    z, shape = _linear(xp, hidden, w2, b2)
    return z, (hidden, residual, shape)


def _feed_forward_backward(
    xp: Any,
    g: Array,
    needs: Needs,
    saved: Saved,
    residual: Any,
    outs: Sequence[Array | None] = (None, None, None, None, None),
) -> Gradients:
    w2, w1, x = saved
    hidden, inner, shape = residual
    first = any(needs[:3])
    wants, places = (first, *needs[3:]), (None, *outs[3:])
    dh, dw2, db2 = _linear_backward(xp, g, wants, (w2, hidden), shape, places)
    if not first:
        return None, None, None, dw2, db2
    assert dh is not None
    return (*_linear_act_backward(xp, dh, needs[:3], (w1, x), inner, outs[:3]), dw2, db2)


feed_forward = Op(
    "feed_forward",
    _feed_forward,
    _feed_forward_backward,
    inputs=("x", "w1", "b1", "w2", "b2"),
    saves={"x": ("w2", "w1"), "w1": ("w2", "x"), "b1": ("w2",), "w2": (), "b2": ()},
    into=True,
)
