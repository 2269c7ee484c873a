"""Activations made of straight pieces, and of a parabola: backward asks which piece the input was on."""

from __future__ import annotations

from typing import Any

from ddp.ops._op import Array, Gradients, Needs, Op, Saved, fold, select
from ddp.ops.tiles import blend, curve, keep, product


# z = max(x, 0);  dx = g unless z = 0, so that a nan lets it pass (as PyTorch has it)
def _relu(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.maximum(x, 0), None


def _relu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (select(xp, saved[0] != 0, g),)


relu = Op("relu", _relu, _relu_backward, inputs=("x",), saves=("out",))


# z = x for x > 0, else s*x;  dx = g, else s*g
def _leaky_relu(xp: Any, x: Array, slope: float) -> tuple[Array, Any]:
    small = x * slope
    return xp.maximum(x, small) if 0 <= slope <= 1 else xp.where(x > 0, x, small), slope


def _leaky_relu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, slope: Any) -> Gradients:
    return (product(xp, _leaky_relu_backward_tile, g, saved, slope=slope),)


def _leaky_relu_backward_tile(xp: Any, g: Array, x: Array, dx: Array, *, slope: float) -> None:
    xp.multiply(g, slope, out=dx)
    blend(xp, x > 0, g, dx, dx)


leaky_relu = Op("leaky_relu", _leaky_relu, _leaky_relu_backward, inputs=("x",), saves=("x",))


# z = x for x > 0, else w*x;  dx = g, else w*g; dw = 0, else g*x
def _prelu(xp: Any, x: Array, w: Array) -> tuple[Array, Any]:
    return xp.where(x > 0, x, w * x), w.shape


def _prelu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shape: Any) -> Gradients:
    x, w = saved
    dx = xp.where(x > 0, g, w * g) if needs[0] else None
    return dx, fold(g * xp.minimum(x, 0), shape) if needs[1] else None


prelu = Op("prelu", _prelu, _prelu_backward, inputs=("x", "w"), saves={"x": ("x", "w"), "w": ("x",)})


# z = x held within [low, high];  dx = g strictly between, and for nan (as PyTorch has it)
def _hardtanh(xp: Any, x: Array, low: float, high: float) -> tuple[Array, Any]:
    return xp.clip(x, low, high), (low, high)


def _hardtanh_backward(xp: Any, g: Array, needs: Needs, saved: Saved, bounds: Any) -> Gradients:
    return (select(xp, ~((saved[0] <= bounds[0]) | (saved[0] >= bounds[1])), g),)


hardtanh = Op("hardtanh", _hardtanh, _hardtanh_backward, inputs=("x",), saves=("x",))


# z = (x + 3 held within [0, 6])/6;  dx = g/6 strictly between
def _hardsigmoid(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.clip(x + 3, 0, 6) / 6, None


def _hardsigmoid_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (select(xp, (saved[0] > -3) & (saved[0] < 3), g / 6),)


hardsigmoid = Op("hardsigmoid", _hardsigmoid, _hardsigmoid_backward, inputs=("x",), saves=("x",))


# z = x*(x + 3 held within [0, 6])/6;  dx = 0 up to -3, g*(x/3 + 1/2) between, g from 3 on
def _hardswish_tile(xp: Any, x: Array, out: Array, slope: None) -> None:
    xp.add(x, 3, out=out)
    xp.clip(out, 0, 6, out=out)
    xp.multiply(out, x, out=out)
    xp.divide(out, 6, out=out)


def _hardswish(xp: Any, x: Array) -> tuple[Array, Any]:
    return curve(xp, _hardswish_tile, x, False, 0)


def _hardswish_backward_tile(xp: Any, g: Array, x: Array, dx: Array) -> None:
    xp.divide(x, 3, out=dx)
    xp.add(dx, 0.5, out=dx)
    xp.multiply(dx, g, out=dx)
    keep(xp, x > -3, dx, dx)
    blend(xp, x >= 3, g, dx, dx)


def _hardswish_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (product(xp, _hardswish_backward_tile, g, saved),)


hardswish = Op("hardswish", _hardswish, _hardswish_backward, inputs=("x",), saves=("x",))


# z = x where x > t, else v;  dx = g there, else 0;  a nan stays, and lets nothing pass
def _threshold(xp: Any, x: Array, threshold: float, value: float) -> tuple[Array, Any]:
    return xp.where(x <= threshold, x.dtype.type(value), x), threshold


def _threshold_backward(xp: Any, g: Array, needs: Needs, saved: Saved, threshold: Any) -> Gradients:
    return (select(xp, ~(saved[0] <= threshold), g),)


threshold = Op("threshold", _threshold, _threshold_backward, inputs=("x",), saves=("x",))
