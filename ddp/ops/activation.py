"""Activation functions: smooth ones, piecewise linear ones, and dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import inf, pi, sqrt
from typing import Any

from ddp.ops.arrays import Array, ForwardResult, Ints, array_function, upcast, where_or_zero
from ddp.ops.elementwise import formula_op
from ddp.ops.op import Gradients, Needs, Op, Saved, unary_op
from ddp.ops.special import compute_erfc

# Smooth activations. A curve returns the value and a function that computes the derivative from intermediate results of
# the value. Backward evaluates the curve again: keeping the derivative would cost memory in addition to x, and second
# derivatives need x in any case.


ValueAndDerivative = tuple[Array, Callable[[], Array]]  # z, and a function that computes z'
Curve = Callable[..., ValueAndDerivative]  # curve(xp, x, **parameters)


def _smooth(name: str, curve: Curve) -> Op:
    def forward(xp: Any, x: Array, **parameters: Any) -> ForwardResult:
        return curve(xp, upcast(x), **parameters)[0].astype(x.dtype, copy=False), parameters

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, parameters: Any) -> Gradients:
        x = saved[0]
        derivative = curve(xp, upcast(x), **parameters)[1]
        return (g * derivative().astype(x.dtype, copy=False),)

    return Op(name, forward, backward, inputs=("x",), saves=("x",))


# z = 1/(1 + e^-x);  dx = g*z*(1 - z)
def _sigmoid(xp: Any, x: Array) -> Array:
    upcast_x = upcast(x)
    return (1 / (1 + xp.exp(-upcast_x))).astype(x.dtype, copy=False)


@array_function
def times_sigmoid_derivative(xp: Any, g: Array, z: Array) -> Array:
    """g*z*(1 - z)."""
    return g * z * (1 - z)


sigmoid = unary_op("sigmoid", _sigmoid, times_sigmoid_derivative, "out")


# y = g*z*(1 - z), the gradient of sigmoid as one op;  dg = e*z*(1 - z), dz = e*g*(1 - 2*z), e the gradient of y
sigmoid_gradient = formula_op(
    "sigmoid_gradient",
    times_sigmoid_derivative,
    {"g": lambda xp, e, z, g: times_sigmoid_derivative(xp, e, z), "z": lambda xp, e, z, g: e * g * (1 - 2 * z)},
    {"g": ("z",), "z": ("z", "g")},
)


# z = tanh x;  dx = g*(1 - z^2)
@array_function
def times_tanh_derivative(xp: Any, g: Array, z: Array) -> Array:
    """g*(1 - z^2)."""
    return g * (1 - z * z)


tanh = unary_op("tanh", lambda xp, x: xp.tanh(x), times_tanh_derivative, "out")


# y = g*(1 - z^2), the gradient of tanh as one op;  dg = e*(1 - z^2), dz = -2*e*g*z, e the gradient of y
tanh_gradient = formula_op(
    "tanh_gradient",
    times_tanh_derivative,
    {"g": lambda xp, e, z, g: times_tanh_derivative(xp, e, z), "z": lambda xp, e, z, g: e * g * z * -2},
    {"g": ("z",), "z": ("z", "g")},
)


# z = x*s, s = sigmoid x;  z' = s + z*(1 - s)
def _silu(xp: Any, x: Array) -> ValueAndDerivative:
    s = 1 / (1 + xp.exp(-x))
    z = x * s
    return z, lambda: s + z * (1 - s)


silu = _smooth("silu", _silu)


# z = x*t, t = tanh(log(1 + e)) = n/(n + 2), n = e*(e + 2), e = e^x;  z' = t + x*(1 - t^2)*e/(1 + e)
def _mish(xp: Any, x: Array) -> ValueAndDerivative:
    e = xp.exp(xp.minimum(x, 20))  # from x = 20 on, t is 1, and n may overflow
    n = e * (e + 2)
    t = n / (n + 2)
    return x * t, lambda: t + x * (1 - t * t) * (e / (e + 1))


mish = _smooth("mish", _mish)


# z = log(1 + e)/b, e = e^(b*x);  z' = e/(1 + e).  Where b*x > threshold: z = x, z' = 1
def _softplus(xp: Any, x: Array, beta: float, threshold: float) -> ValueAndDerivative:
    scaled = x * beta
    e = xp.exp(xp.minimum(scaled, 80))  # e^80 is finite in float32
    over = scaled > threshold
    z = xp.where(over, x, xp.maximum(xp.log1p(e), scaled) / beta)
    return z, lambda: xp.where(over, xp.ones_like(x), e / (e + 1))


softplus = _smooth("softplus", _softplus)
# z = log sigmoid(x) = -softplus(-x);  z' = sigmoid(-x)
logsigmoid = _smooth("logsigmoid", functools.partial(_softplus, beta=-1, threshold=inf))


# z = x*c, c = (1 + erf(x/sqrt 2))/2;  z' = c + x*e^(-x^2/2)/sqrt(2 pi).  If `tanh`:
# z = x*s, s = (1 + tanh u)/2, u = k*(x + a*x^3), k = sqrt(2/pi), a = 0.044715;  z' = s + 2*z*(1 - s)*u'
def _gelu(xp: Any, x: Array, tanh: bool) -> ValueAndDerivative:
    if not tanh:
        c = compute_erfc(xp, x * -sqrt(0.5)) * 0.5
        return x * c, lambda: c + x * xp.exp(x * x * -0.5) * (1 / sqrt(2 * pi))
    k = sqrt(2 / pi)
    a = 0.044715
    y = x * x
    s = (1 + xp.tanh(k * x * (1 + a * y))) * 0.5
    z = x * s
    return z, lambda: s + 2 * z * (1 - s) * (k * (1 + 3 * a * y))


gelu = _smooth("gelu", _gelu)


# z = s*x for x > 0, else s*a*(e^(i*x) - 1);  z' = s, else s*a*i*e^(i*x);  s = scale, a = alpha, i = input_scale
def _elu(xp: Any, x: Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> ValueAndDerivative:
    e = xp.expm1(xp.minimum(x, 0) * input_scale)
    positive = x > 0
    z = xp.where(positive, scale * x, (scale * alpha) * e)
    return z, lambda: xp.where(positive, x.dtype.type(scale), (scale * alpha * input_scale) * (e + 1))


elu = _smooth("elu", _elu)


# z = x/(1 + |x|);  dx = g/(1 + |x|)^2
softsign = unary_op("softsign", lambda xp, x: x / (xp.abs(x) + 1), lambda xp, g, x: g / (xp.abs(x) + 1) ** 2)


# x = [a | b] along dim, s = sigmoid(b);  z = a*s;  dx = [g*s | g*z*(1 - s)]
def _glu(xp: Any, x: Array, dim: int) -> ForwardResult:
    a, b = xp.split(x, 2, axis=dim)
    return a * _sigmoid(xp, b), dim


def _glu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, dim: Any) -> Gradients:
    x = saved[0]
    a, b = xp.split(x, 2, axis=dim)
    s = _sigmoid(xp, b)
    dx = xp.empty(x.shape, x.dtype)
    da, db = xp.split(dx, 2, axis=dim)
    xp.multiply(g, s, out=da)
    xp.subtract(1, s, out=s)
    xp.multiply(s, da, out=s)
    xp.multiply(s, a, out=db)
    return (dx,)


glu = Op("glu", _glu, _glu_backward, inputs=("x",), saves=("x",))


# Piecewise linear or quadratic activations: backward needs to know the piece of each input.


# z = max(x, 0);  dx = g where z != 0 or z is nan (as in PyTorch), else 0
relu = unary_op("relu", lambda xp, x: xp.maximum(x, 0), lambda xp, g, z: where_or_zero(xp, z != 0, g), "out")


# z = x for x > 0, else s*x;  dx = g, else s*g
def _leaky_relu(xp: Any, x: Array, slope: float) -> ForwardResult:
    small = x * slope
    return xp.maximum(x, small) if 0 < slope <= 1 else xp.where(x > 0, x, small), slope


def _leaky_relu_backward(xp: Any, g: Array, needs: Needs, saved: Saved, slope: Any) -> Gradients:
    return (xp.where(saved[0] > 0, g, g * slope),)


leaky_relu = Op("leaky_relu", _leaky_relu, _leaky_relu_backward, inputs=("x",), saves=("x",))


# z = x for x > 0, else w*x;  dx = g, else w*g; dw = 0, else g*x
prelu = formula_op(
    "prelu",
    lambda xp, x, w: xp.where(x > 0, x, w * x),
    {"x": lambda xp, g, x, w: xp.where(x > 0, g, w * g), "w": lambda xp, g, x, w: g * xp.minimum(x, 0)},
    {"x": ("x", "w"), "w": ("x",)},
)


# z = x clipped to [low, high];  dx = g where low < x < high or x is nan (as in PyTorch), else 0. The dtype of x can
# represent both bounds.
hardtanh = formula_op(
    "hardtanh",
    lambda xp, x, low, high: xp.clip(x, low, high),
    {"x": lambda xp, g, z, low, high: where_or_zero(xp, ~((z <= low) | (z >= high)), g)},
    ("out",),
)


# z = (x + 3 clipped to [0, 6])/6;  dx = g/6 where -3 < x < 3, else 0
hardsigmoid = unary_op(
    "hardsigmoid",
    lambda xp, x: xp.clip(x + 3, 0, 6) / 6,
    lambda xp, g, x: where_or_zero(xp, (x > -3) & (x < 3), g / 6),
)


# z = x*(x + 3 clipped to [0, 6])/6;  dx = 0 up to -3, g*(x/3 + 1/2) between, g from 3 on
def _hardswish(xp: Any, x: Array) -> Array:
    upcast_x = upcast(x)
    return (xp.clip(upcast_x + 3, 0, 6) * upcast_x / 6).astype(x.dtype, copy=False)


hardswish = unary_op(
    "hardswish",
    _hardswish,
    lambda xp, g, x: where_or_zero(xp, ~(x <= -3), xp.where(x >= 3, g, g * (x / 3 + 0.5))),
)


# z = x where x > t or x is nan, else v;  dx = g where x > t or x is nan, else 0
threshold = formula_op(
    "threshold",
    lambda xp, x, threshold, value: xp.where(x <= threshold, x.dtype.type(value), x),
    {"x": lambda xp, g, x, threshold, value: where_or_zero(xp, ~(x <= threshold), g)},
    ("x",),
)


# Dropout: sets elements to zero at random.


# z = x/(1 - p) where kept, so that the expectation stays the same, else 0;  dx = g/(1 - p) where kept, else 0
def _dropout(xp: Any, x: Array, p: float, shape: Ints, generator: Any) -> ForwardResult:
    """shape: the shape of the random numbers. They broadcast over x: (N, C, 1, 1) drops whole channels of images."""
    keep = generator.random(shape, dtype=xp.float32) >= p
    scale = 1 / (1 - p) if p < 1 else 0.0
    return x * keep * scale, (keep, scale)


def _dropout_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    keep, scale = residual
    return (g * keep * scale,)


dropout = Op("dropout", _dropout, _dropout_backward, inputs=("x",))
