"""Losses between probabilities: binary cross entropy, also from logits, and the Kullback-Leibler divergence."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved
from ddp.ops.distance import incoming, reduced


# z = -t*log x - (1 - t)*log(1 - x), the logarithms no less than -100;  dx = g*(x - t)/(x*(1 - x)),
# dt = g*(log(1 - x) - log x)
def _binary_cross_entropy(xp: Any, x: Array, t: Array, reduction: str) -> tuple[Array, Any]:
    yes = xp.maximum(xp.log(x), -100)
    no = xp.maximum(xp.log1p(-x), -100)
    losses = yes - no
    losses *= -t
    losses -= no
    return reduced(xp, losses, reduction), reduction


def _binary_cross_entropy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, reduction: Any) -> Gradients:
    x, t = saved
    g = incoming(g, reduction, x.size)
    dx = dt = None
    if needs[0]:
        dx = x - t
        # The floor that PyTorch has: at 0 and 1 the slope is large, not infinite. float16 has a coarser one.
        dx /= xp.maximum((1 - x) * x, 1e-12 if x.dtype.itemsize > 2 else 6e-8)
        dx *= g
    if needs[1]:
        dt = (xp.log1p(-x) - xp.log(x)) * g
    return dx, dt


binary_cross_entropy = Op(
    "binary_cross_entropy",
    _binary_cross_entropy,
    _binary_cross_entropy_backward,
    inputs=("x", "t"),
    saves={"x": ("x", "t"), "t": ("x",)},
)


# z = (1 - t)*x + c*log(1 + e^-x), c = 1 + (w - 1)*t;  dx = g*(1 - t - c/(1 + e^x)),
# dt = g*((w - 1)*log(1 + e^-x) - x), w the weight of what is true
def _with_logits(xp: Any, x: Array, t: Array, weight: Array | None, reduction: str) -> tuple[Array, Any]:
    losses = _softplus(xp, x)
    if weight is not None:
        losses *= 1 + (weight - 1) * t
    losses += x
    losses -= t * x
    return reduced(xp, losses, reduction).reshape(x.shape if reduction == "none" else ()), (weight, reduction)


def _softplus(xp: Any, x: Array) -> Array:
    """log(1 + e^-x), without overflow."""
    out = xp.empty(x.shape or (1,), x.dtype)
    xp.abs(x, out=out)
    xp.negative(out, out=out)
    xp.exp(out, out=out)
    xp.log1p(out, out=out)
    out -= xp.minimum(x, 0)
    return out


def _with_logits_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    x, t = saved
    weight, reduction = residual
    g = incoming(g, reduction, x.size)
    dx = dt = None
    if needs[0]:
        # 1/(1 + e^x) by the hyperbolic tangent, which does not overflow.
        dx = xp.tanh(x * x.dtype.type(0.5))
        dx *= 0.5
        if weight is None:
            dx += 0.5
            dx -= t
        else:
            dx -= 0.5
            dx *= 1 + (weight - 1) * t
            dx += 1 - t
        dx *= g
    if needs[1]:
        dt = -x if weight is None else (weight - 1) * _softplus(xp, x).reshape(x.shape) - x
        dt *= g
    return dx, dt


binary_cross_entropy_with_logits = Op(
    "binary_cross_entropy_with_logits",
    _with_logits,
    _with_logits_backward,
    inputs=("x", "t"),
    saves={"x": ("x", "t"), "t": ("x",)},
)


# z = t*(log t - x), 0 where t = 0;  dx = -g*t, dt = g*(log t + 1 - x).  With log_target, t stands for log t:
# z = e^t*(t - x);  dx = -g*e^t, dt = g*e^t*(t - x + 1)
def _kl_div(xp: Any, x: Array, t: Array, log_target: bool, reduction: str) -> tuple[Array, Any]:
    if log_target:
        losses = t - x
        losses *= xp.exp(t)
    else:
        losses = xp.log(xp.where(t > 0, t, 1).astype(t.dtype, copy=False))
        losses -= x
        losses *= t
        losses = xp.where(t < 0, xp.nan, losses).astype(t.dtype, copy=False)
    return reduced(xp, losses, reduction), (log_target, reduction)


def _kl_div_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    t, x = saved
    log_target, reduction = residual
    g = incoming(g, reduction, t.size)
    p = xp.exp(t) if log_target else t
    dx = p * -g if needs[0] else None
    if not needs[1]:
        return dx, None
    slope = (t if log_target else xp.log(xp.where(t > 0, t, 1).astype(t.dtype, copy=False))) + 1 - x
    return dx, slope * p * g if log_target else slope * g


kl_div = Op("kl_div", _kl_div, _kl_div_backward, inputs=("x", "t"), saves={"x": ("t",), "t": ("t", "x")})
