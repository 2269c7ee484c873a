"""Activation functions: smooth ones, piecewise linear ones, and dropout."""

from __future__ import annotations

from math import inf, pi, sqrt
from typing import Any

from ddp.ops.cpu_blocking import blend, curve, keep, product
from ddp.ops.op import Array, Gradients, Needs, Op, Saved, fold, unary_op, where_or_zero
from ddp.ops.special import TANH_OF, compute_erfc

# Smooth activations, each one fused pass forward and one backward, in tiles.
#
# Where value and derivative share their costly part (`slope` is on where a gradient will be wanted), the derivative is
# computed beside the value and kept in place of the input; elsewhere backward reads the input or the result.


def _slope_backward(xp: Any, g: Array, needs: Needs, saved: Saved, slope: Any) -> Gradients:
    return (g * slope,)


# z = 1/(1 + e^-x);  dx = g*z*(1 - z)
def _sigmoid_tile(xp: Any, x: Array, out: Array, slope: None) -> None:
    xp.negative(x, out=out)
    xp.exp(out, out=out)  # inf for the smallest x, whose z is 0
    xp.add(out, 1, out=out)
    xp.divide(1, out, out=out)  # NumPy's reciprocal is slower


def _sigmoid(xp: Any, x: Array) -> tuple[Array, Any]:
    return curve(xp, _sigmoid_tile, x, False, 0)


def _sigmoid_backward_tile(xp: Any, g: Array, z: Array, dx: Array) -> None:
    xp.subtract(1, z, out=dx)
    xp.multiply(dx, z, out=dx)
    xp.multiply(dx, g, out=dx)


def _sigmoid_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (product(xp, _sigmoid_backward_tile, g, saved),)


sigmoid = Op("sigmoid", _sigmoid, _sigmoid_backward, inputs=("x",), saves=("out",))


# z = tanh x;  dx = g*(1 - z^2)
def _tanh(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.tanh(x), None


def _tanh_backward_tile(xp: Any, g: Array, z: Array, dx: Array) -> None:
    xp.multiply(z, z, out=dx)
    xp.subtract(1, dx, out=dx)
    xp.multiply(dx, g, out=dx)


def _tanh_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (product(xp, _tanh_backward_tile, g, saved),)


tanh = Op("tanh", _tanh, _tanh_backward, inputs=("x",), saves=("out",))


# z = x*s(x), s = sigmoid;  z' = s + z*(1 - s)
def _silu_tile(xp: Any, x: Array, out: Array, slope: Array | None, s: Array) -> None:
    _sigmoid_tile(xp, x, s, None)
    xp.multiply(x, s, out=out)
    if slope is not None:
        xp.subtract(1, s, out=slope)
        xp.multiply(slope, out, out=slope)
        xp.add(slope, s, out=slope)


def _silu(xp: Any, x: Array, slope: bool) -> tuple[Array, Any]:
    return curve(xp, _silu_tile, x, slope, 1)


silu = Op("silu", _silu, _slope_backward, inputs=("x",))


# e = exp(x held below 20);  tanh(log(1 + e)) = t = n/(n + 2), n = e*(e + 2);  z = x*t
# z' = t + x*(1 - t^2)*s(x), s = e/(1 + e)
def _mish_tile(xp: Any, x: Array, out: Array, slope: Array | None, e: Array, t: Array) -> None:
    xp.minimum(x, 20, out=e)  # t is 1 from there on, and e^2 must not overflow
    xp.exp(e, out=e)
    xp.add(e, 2, out=out)
    xp.multiply(out, e, out=out)
    xp.add(out, 2, out=t)
    xp.divide(out, t, out=t)
    if slope is not None:
        xp.add(e, 1, out=slope)
        xp.divide(e, slope, out=e)
        xp.multiply(t, t, out=slope)
        xp.subtract(1, slope, out=slope)
        xp.multiply(slope, e, out=slope)
        xp.multiply(slope, x, out=slope)
        xp.add(slope, t, out=slope)
    xp.multiply(x, t, out=out)


def _mish(xp: Any, x: Array, slope: bool) -> tuple[Array, Any]:
    return curve(xp, _mish_tile, x, slope, 2)


mish = Op("mish", _mish, _slope_backward, inputs=("x",))


# e = e^(b*x), u = 1 + e;  z = log(u)/b, x itself where b*x > threshold;  z' = e/u, 1 there
def _softplus_tile(
    xp: Any,
    x: Array,
    out: Array,
    slope: Array | None,
    scaled: Array,
    e: Array,
    u: Array,
    back: Array,
    *,
    beta: float,
    threshold: float,
) -> None:
    if beta != 1:
        x = xp.multiply(x, beta, out=scaled)
    xp.minimum(x, 80, out=e)  # so that e is finite in float32
    xp.exp(e, out=e)
    xp.add(e, 1, out=u)
    xp.log(u, out=out)
    if slope is not None:
        xp.divide(e, u, out=slope)
    # What rounding took of e when it became u, which is all of a small e: log(1 + e) = log(u) + (e - (u - 1))/u.
    xp.subtract(u, 1, out=back)
    xp.subtract(e, back, out=e)
    xp.divide(e, u, out=e)
    xp.add(out, e, out=out)
    xp.maximum(out, x, out=out)  # what was held at 80
    if threshold < (17 if x.dtype.itemsize == 4 else 40):  # above, z = x to the last digit
        over = xp.greater(x, threshold)
        blend(xp, over, x, out, out)
        if slope is not None:
            blend(xp, over, xp.ones_like(x), slope, slope)
    if beta != 1:
        xp.divide(out, beta, out=out)


def _softplus(xp: Any, x: Array, beta: float, threshold: float, slope: bool) -> tuple[Array, Any]:
    return curve(xp, _softplus_tile, x, slope, 4, beta=beta, threshold=threshold)


softplus = Op("softplus", _softplus, _slope_backward, inputs=("x",))


# z = log sigmoid(x) = -softplus(-x);  z' = sigmoid(-x)
def _logsigmoid(xp: Any, x: Array, slope: bool) -> tuple[Array, Any]:
    return curve(xp, _softplus_tile, x, slope, 4, beta=-1, threshold=inf)


logsigmoid = Op("logsigmoid", _logsigmoid, _slope_backward, inputs=("x",))


# z = x*c, c = (1 + erf(x/sqrt 2))/2;  z' = c + x*e^(-x^2/2)/sqrt(2 pi)
def _gelu_tile(xp: Any, x: Array, out: Array, slope: Array | None, y: Array, c: Array) -> None:
    xp.multiply(x, x, out=y)
    if x.dtype.itemsize == 4:
        xp.multiply(y, TANH_OF[0], out=c)
        for coefficient in TANH_OF[1:-1]:
            xp.add(c, coefficient, out=c)
            xp.multiply(c, y, out=c)
        xp.add(c, TANH_OF[-1], out=c)
        xp.multiply(c, x, out=c)
        xp.tanh(c, out=c)
        xp.multiply(c, 0.5, out=c)
        xp.add(c, 0.5, out=c)
    else:
        xp.multiply(compute_erfc(xp, x * -sqrt(0.5)), 0.5, out=c)
    if slope is not None:
        xp.multiply(y, -0.5, out=y)
        xp.exp(y, out=y)
        xp.multiply(y, x, out=y)
        xp.multiply(y, 1 / sqrt(2 * pi), out=y)
        xp.add(y, c, out=slope)
    xp.multiply(x, c, out=out)


# z = x*c, c = (1 + t)/2, t = tanh(k*(x + 0.044715*x^3)), k = sqrt(2/pi)
# z' = c + x*(1 - t^2)*k*(1 + 3*0.044715*x^2)/2
def _gelu_tanh_tile(xp: Any, x: Array, out: Array, slope: Array | None, y: Array, t: Array) -> None:
    k = sqrt(2 / pi)
    xp.multiply(x, x, out=y)
    xp.multiply(y, 0.044715 * k, out=t)
    xp.add(t, k, out=t)
    xp.multiply(t, x, out=t)
    xp.tanh(t, out=t)
    if slope is not None:
        xp.multiply(y, 1.5 * 0.044715 * k, out=y)
        xp.add(y, 0.5 * k, out=y)
        xp.multiply(y, x, out=y)
        xp.multiply(t, t, out=slope)
        xp.subtract(1, slope, out=slope)
        xp.multiply(y, slope, out=y)
    xp.multiply(t, 0.5, out=t)
    xp.add(t, 0.5, out=t)
    if slope is not None:
        xp.add(y, t, out=slope)
    xp.multiply(x, t, out=out)


def _gelu(xp: Any, x: Array, tanh: bool, slope: bool) -> tuple[Array, Any]:
    return curve(xp, _gelu_tanh_tile if tanh else _gelu_tile, x, slope, 2)


gelu = Op("gelu", _gelu, _slope_backward, inputs=("x",))


# z = s*x for x > 0, else s*a*(e^(i*x) - 1);  z' = s, else s*a*i*e^(i*x)
def _elu_tile(
    xp: Any, x: Array, out: Array, slope: Array | None, e: Array, *, alpha: float, scale: float, input_scale: float
) -> None:
    xp.minimum(x, 0, out=e)
    if input_scale != 1:
        xp.multiply(e, input_scale, out=e)
    xp.expm1(e, out=e)
    xp.maximum(x, 0, out=out)
    if scale != 1:
        xp.multiply(out, scale, out=out)
    if slope is not None:
        xp.add(e, 1, out=slope)
        factor = scale * alpha * input_scale
        if factor != 1:
            xp.multiply(slope, factor, out=slope)
        if factor != scale:
            blend(xp, x > 0, xp.full_like(x, scale), slope, slope)
    if scale * alpha != 1:
        xp.multiply(e, scale * alpha, out=e)
    xp.add(out, e, out=out)


def _elu(
    xp: Any, x: Array, slope: bool, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> tuple[Array, Any]:
    return curve(xp, _elu_tile, x, slope, 1, alpha=alpha, scale=scale, input_scale=input_scale)


elu = Op("elu", _elu, _slope_backward, inputs=("x",))


# z = x/(1 + |x|);  dx = g/(1 + |x|)^2
softsign = unary_op("softsign", lambda xp, x: x / (xp.abs(x) + 1), lambda xp, g, x: g / (xp.abs(x) + 1) ** 2)


# x = [a | b] along dim, s = sigmoid(b);  z = a*s;  dx = [g*s | g*z*(1 - s)]
def _glu(xp: Any, x: Array, dim: int) -> tuple[Array, Any]:
    a, b = xp.split(x, 2, axis=dim)
    return a * _sigmoid(xp, b)[0], dim


def _glu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    x = saved[0]
    a, b = xp.split(x, 2, axis=dim)
    s = _sigmoid(xp, b)[0]
    dx = xp.empty(x.shape, x.dtype)
    da, db = xp.split(dx, 2, axis=dim)
    xp.multiply(g, s, out=da)
    xp.subtract(1, s, out=s)
    xp.multiply(s, da, out=s)
    xp.multiply(s, a, out=db)
    return (dx,)


glu = Op("glu", _glu, _glu_backward, inputs=("x",), saves=("x",))


# Activations made of straight pieces, and of a parabola: backward asks which piece the input was on.


# z = max(x, 0);  dx = g unless z = 0, so that a nan lets it pass (as PyTorch has it)
def _relu(xp: Any, x: Array) -> tuple[Array, Any]:
    return xp.maximum(x, 0), None


def _relu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (where_or_zero(xp, saved[0] != 0, g),)


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
    return (where_or_zero(xp, ~((saved[0] <= bounds[0]) | (saved[0] >= bounds[1])), g),)


hardtanh = Op("hardtanh", _hardtanh, _hardtanh_backward, inputs=("x",), saves=("x",))


# z = (x + 3 held within [0, 6])/6;  dx = g/6 strictly between
hardsigmoid = unary_op(
    "hardsigmoid",
    lambda xp, x: xp.clip(x + 3, 0, 6) / 6,
    lambda xp, g, x: where_or_zero(xp, (x > -3) & (x < 3), g / 6),
)


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
    return (where_or_zero(xp, ~(saved[0] <= threshold), g),)


threshold = Op("threshold", _threshold, _threshold_backward, inputs=("x",), saves=("x",))


# Elements put to zero at random.


# z = x where kept, scaled to the same expectation, else 0;  dx = g treated alike
def _dropout(xp: Any, x: Array, p: float, shape: tuple[int, ...], generator: Any) -> tuple[Array, Any]:
    """shape: of what is drawn, which broadcasts over x: whole channels fall where their sizes are 1."""
    keep = generator.random(shape, dtype=xp.float32) >= p
    scale = 1 / (1 - p) if p < 1 else 0.0
    return x * keep * scale, (keep, scale)


def _dropout_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    keep, scale = residual
    return (g * keep * scale,)


dropout = Op("dropout", _dropout, _dropout_backward, inputs=("x",))
