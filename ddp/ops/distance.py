"""Losses of a difference d = x - y, which forward keeps: mean squared, absolute, and the two that change over.

Each is a value and a slope; the reduction is folded into both, so that no array is made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, total


def reduced(xp: Any, losses: Array, reduction: str) -> Array:
    """The losses, their sum or their mean; of none, the mean is nan, as in PyTorch."""
    if reduction == "none":
        return losses
    out = total(losses)
    if reduction == "sum":
        return out
    return out / losses.size if losses.size else xp.full((), xp.nan)


def incoming(g: Array, reduction: str, size: int) -> Array:
    """The gradient of each loss, as an array that broadcasts to it."""
    return g / max(size, 1) if reduction == "mean" else g


Value = Callable[[Any, Array, float, str], Array]  # the reduced loss of the differences
Slope = Callable[[Any, Array, float, Array], Array]  # its derivative, times a gradient


def _pair(name: str, value: Value, slope: Slope) -> Op:
    def forward(xp: Any, x: Array, y: Array, reduction: str, bound: float = 1.0) -> tuple[Array, Any]:
        d = xp.subtract(x, y, dtype="float32" if x.dtype.char == "e" else None)
        return xp.asarray(value(xp, d, bound, reduction)).astype(x.dtype, copy=False), (d, bound, reduction)

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        d, bound, reduction = residual
        wide = g.astype(d.dtype, copy=False)
        dx = slope(xp, d, bound, incoming(wide, reduction, d.size)).astype(g.dtype, copy=False)
        return dx if needs[0] else None, -dx if needs[1] else None

    return Op(name, forward, backward, inputs=("x", "y"))


# The product makes no array of squares; on a GPU it would be cuBLAS's, which CuPy refuses while a graph is captured.
SQUARES = {"numpy": lambda flat: flat.dot(flat), "cupy": lambda flat: (flat * flat).sum()}


# z = d^2;  dd = 2*g*d
def _square(xp: Any, d: Array, bound: float, reduction: str) -> Array:
    if reduction == "none" or not d.size:
        return reduced(xp, d * d, reduction)
    out = SQUARES[xp.__name__](d.reshape(-1))
    return out / d.size if reduction == "mean" else out


def _square_slope(xp: Any, d: Array, bound: float, g: Array) -> Array:
    return d * (2 * g)


mse_loss = _pair("mse_loss", _square, _square_slope)


# z = |d|;  dd = g*sign d
def _absolute(xp: Any, d: Array, bound: float, reduction: str) -> Array:
    return reduced(xp, xp.abs(d), reduction)


def _absolute_slope(xp: Any, d: Array, bound: float, g: Array) -> Array:
    return xp.sign(d) * g


l1_loss = _pair("l1_loss", _absolute, _absolute_slope)


# z = a*(d - a/2), a = d held within [-bound, bound];  dd = g*a
def _bounded(xp: Any, d: Array, bound: float, reduction: str) -> Array:
    a = xp.clip(d, -bound, bound)
    losses = a * -0.5
    losses += d
    losses *= a
    return reduced(xp, losses, reduction)


def _bounded_slope(xp: Any, d: Array, bound: float, g: Array) -> Array:
    return xp.clip(d, -bound, bound) * g


huber_loss = _pair("huber_loss", _bounded, _bounded_slope)


# z = a*(d - a/2)/bound, a = d held within [-bound, bound];  dd = g*a/bound
def _smooth(xp: Any, d: Array, bound: float, reduction: str) -> Array:
    return _bounded(xp, d, bound, reduction) / bound


def _smooth_slope(xp: Any, d: Array, bound: float, g: Array) -> Array:
    return _bounded_slope(xp, d, bound, g / bound)


smooth_l1_loss = _pair("smooth_l1_loss", _smooth, _smooth_slope)
