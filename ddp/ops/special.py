"""Transcendental functions, and the error and gamma functions, which NumPy lacks.

Source: M. Giles 2012, Approximating the erfinv function, GPU Computing Gems 2 (the first guess of erfinv); Abramowitz
and Stegun 1964, Handbook of Mathematical Functions, 6.1 to 6.4 (the gamma function and its derivatives).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import log as ln
from math import pi
from math import sqrt as root
from typing import Any

import numpy as np

from ddp.ops.arrays import Array, ForwardResult, array_function, shape_of, unbroadcast, where_or_zero
from ddp.ops.elementwise import formula_op
from ddp.ops.op import Gradients, Needs, Op, Saved, unary_op

# The error functions, which NumPy lacks. On the CPU, native kernels compute erf and erfc; without these kernels, the
# standard library does, element by element. Newton's method finds erfinv. On a GPU all three are CUDA's.


def _by_element(function: Callable[[float], float], x: Array) -> Array:
    return np.asarray(np.frompyfunc(function, 1, 1)(x.astype("float64")), x.dtype)


@array_function
def compute_erf(xp: Any, x: Array) -> Array:
    """2/sqrt(pi) times the integral of e^(-t^2) from 0 to x."""
    return _by_element(math.erf, x)


@array_function
def compute_erfc(xp: Any, x: Array) -> Array:
    """1 - erf(x), accurate even where this is small."""
    return _by_element(math.erfc, x)


def _horner(coefficients: Sequence[float], x: Array) -> Array:
    out = coefficients[0] * x
    for c in coefficients[1:-1]:
        out += c
        out *= x
    out += coefficients[-1]
    return out


# Giles's polynomials, in w - 2.5 and in root(w) - 3, where w = -log(1 - x^2).
_CENTRAL = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_OUTER = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


@array_function
def compute_erfinv(xp: Any, x: Array) -> Array:
    """The number whose erf is x."""
    p = xp.abs(x.astype("float64"))
    w = -xp.log((1 - p) * (1 + p))
    outer = xp.sqrt(xp.maximum(w, 5)) - 3
    z = p * xp.where(w < 5, _horner(_CENTRAL, xp.minimum(w, 5) - 2.5), _horner(_OUTER, outer))
    for _ in range(3):
        # Newton's steps: on erf in the middle, on log erfc outside, because log erfc is nearly a parabola there.
        tail = compute_erfc(xp, z)
        scale = root(pi) / 2 * xp.exp(z * z)
        z = xp.where(p < 0.5, z - (compute_erf(xp, z) - p) * scale, z + xp.log(tail / (1 - p)) * tail * scale)
    return xp.copysign(xp.where(p == 1, xp.inf, z), x).astype(x.dtype, copy=False)


# The logarithm of the gamma function and its derivatives, by a power series about 2 and by Stirling's series.

# log gamma(2 + z) = (1 - Euler's constant)*z + the sum of c_k*(-z)^k;  c_k = (zeta(k) - 1)/k, k from 23 down to 2
_ZETA = (
    5.183475041970047e-09,
    1.0838659214896955e-08,
    2.2711094608943164e-08,
    4.7698101693639804e-08,
    1.0043224823968099e-07,
    2.1207184805554665e-07,
    4.492469198764566e-07,
    9.55141213040742e-07,
    2.039215753801366e-06,
    4.374866789907488e-06,
    9.439488275268397e-06,
    2.050721277567069e-05,
    4.492623673813314e-05,
    9.945751278180853e-05,
    0.00022315475845357939,
    0.0005096695247430425,
    0.001192753911703261,
    0.0028905103307415234,
    0.007385551028673986,
    0.020580808427784546,
    0.0673523010531981,
    0.3224670334241132,
)
_EULER = 0.5772156649015329
# Stirling's series of lgamma, digamma and trigamma, from Bernoulli's numbers: B_k/(k*(k - 1)), B_k/k and B_k, k from 10
# down to 2 by 2. From z = 16 on, the first term left out is lost in rounding.
_STIRLING = (1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)
_FIRST_DERIVATIVE = (1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)
_SECOND_DERIVATIVE = (5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6)


def _reflect(xp: Any, x: Array) -> tuple[Array, Array, Array]:
    """Returns three float64 arrays: x; x where x > 0, else 1 - x (Euler's reflection formula); pi*(x - round(x))."""
    y = x.astype("float64")
    return y, xp.where(y > 0, y, 1 - y), pi * (y - xp.rint(y))


def compute_lgamma(xp: Any, x: Array) -> Array:
    """The logarithm of the absolute value of the gamma function."""
    y, z, angle = _reflect(xp, x)
    # Below 3.5, at most two steps of the recurrence lead to a number within 1/2 of 2. The result may be near 0: a sum
    # of large numbers would lose its digits by cancellation.
    steps = xp.floor(2.5 - z)
    near = z - (2 - steps)
    small = near * (near * _horner(_ZETA, -near) + (1 - _EULER)) + xp.log(xp.where(steps < 0, z - 1, 1))
    small = small - xp.log(xp.where(steps > 0, z, 1)) - xp.log1p(xp.where(steps > 1, z, 0))
    far = z + 13
    large = (far - 0.5) * (xp.log(far) - 1) + (ln(2 * pi) - 1) / 2 + _horner(_STIRLING, far**-2) / far
    out = xp.where(z < 3.5, small, large - sum(xp.log(z + i) for i in range(13)))
    out = xp.where(y > 0, out, xp.log(pi / xp.abs(xp.sin(angle))) - out)
    return xp.where(xp.isinf(y), xp.inf, out).astype(x.dtype)


@array_function
def compute_digamma(xp: Any, x: Array) -> Array:
    """The derivative of lgamma."""
    y, z, angle = _reflect(xp, x)
    far = z + 16
    w = far**-2
    out = xp.log(far) - 0.5 / far - w * _horner(_FIRST_DERIVATIVE, w) - sum(1 / (z + i) for i in range(16))
    out = xp.where(y > 0, out, out - pi / xp.tan(angle))
    out = xp.where((y < 0) & (angle == 0), xp.nan, out)
    return xp.where(y == 0, -1 / y, out).astype(x.dtype)  # the sign of 0 decides the sign of infinity


def compute_trigamma(xp: Any, x: Array) -> Array:
    """The derivative of digamma."""
    y, z, angle = _reflect(xp, x)
    far = z + 16
    w = far**-2
    out = (1 + w * _horner(_SECOND_DERIVATIVE, w)) / far + w / 2 + sum((z + i) ** -2 for i in range(16))
    return xp.where(y > 0, out, (pi / xp.sin(angle)) ** 2 - out).astype(x.dtype)


def standard_gamma_gradient(xp: Any, a: Array, z: Array) -> Array:
    """dz/da of a number z that was drawn from the gamma distribution of shape a and scale 1.

    It is -(dF/da)/(dF/dz) of the distribution function F: Figurnov et al. 2018, arXiv:1805.08498. With t = z*e^-s in
    the integral of dF/da, the quotient is z times the integral of e^(z*(1 - e^-s) - a*s) * (digamma(a) - log z + s)
    over s > 0, by the rule of Takahasi and Mori 1974: s is proportional to e^(u - e^-u), and u takes equal steps.
    """
    y = a.astype("float64")
    x = z.astype("float64")
    offset = compute_digamma(xp, y) - xp.log(x)
    scale = xp.maximum(1 / y, y**-0.5)
    out = 0
    for i in range(-40, 50):
        u = 0.1 * i
        s = scale * math.exp(u - math.exp(-u))
        weight = 0.1 * (1 + math.exp(-u)) * s
        out = out + weight * xp.exp(-x * xp.expm1(-s) - y * s) * (offset + s)
    return (x * out).astype(a.dtype)


# Exponentials, logarithms, roots, trigonometry, and the error and gamma functions.

# z = e^x;  dx = g*z
exp = unary_op("exp", lambda xp, x: xp.exp(x), lambda xp, g, z: g * z, "out")
# z = 2^x;  dx = g*z*log 2
exp2 = unary_op("exp2", lambda xp, x: xp.exp2(x), lambda xp, g, z: g * z * ln(2), "out")
# z = e^x - 1;  dx = g*(z + 1)
expm1 = unary_op("expm1", lambda xp, x: xp.expm1(x), lambda xp, g, z: g * (z + 1), "out")
# z = log x;  dx = g/x
log = unary_op("log", lambda xp, x: xp.log(x), lambda xp, g, x: g / x, "x")
# z = log_2 x;  dx = g/(x*log 2)
log2 = unary_op("log2", lambda xp, x: xp.log2(x), lambda xp, g, x: g / (x * ln(2)), "x")
# z = log_10 x;  dx = g/(x*log 10)
log10 = unary_op("log10", lambda xp, x: xp.log10(x), lambda xp, g, x: g / (x * ln(10)), "x")
# z = log(1 + x);  dx = g/(1 + x)
log1p = unary_op("log1p", lambda xp, x: xp.log1p(x), lambda xp, g, x: g / (x + 1), "x")
# z = sqrt x;  dx = g/(2z)
sqrt = unary_op("sqrt", lambda xp, x: xp.sqrt(x), lambda xp, g, z: g / (2 * z), "out")
# z = 1/sqrt x;  dx = -g*z^3/2
rsqrt = unary_op("rsqrt", lambda xp, x: 1 / xp.sqrt(x), lambda xp, g, z: -0.5 * g * (z * z * z), "out")

# z = sin x;  dx = g*cos x
sin = unary_op("sin", lambda xp, x: xp.sin(x), lambda xp, g, x: g * xp.cos(x), "x")
# z = cos x;  dx = -g*sin x
cos = unary_op("cos", lambda xp, x: xp.cos(x), lambda xp, g, x: -g * xp.sin(x), "x")
# z = tan x;  dx = g*(1 + z^2)
tan = unary_op("tan", lambda xp, x: xp.tan(x), lambda xp, g, z: g * (1 + z * z), "out")
# z = arcsin x;  dx = g/sqrt(1 - x^2)
asin = unary_op("asin", lambda xp, x: xp.arcsin(x), lambda xp, g, x: g / xp.sqrt(1 - x * x), "x")
# z = arccos x;  dx = -g/sqrt(1 - x^2)
acos = unary_op("acos", lambda xp, x: xp.arccos(x), lambda xp, g, x: -g / xp.sqrt(1 - x * x), "x")
# z = arctan x;  dx = g/(1 + x^2)
atan = unary_op("atan", lambda xp, x: xp.arctan(x), lambda xp, g, x: g / (1 + x * x), "x")
# z = sinh x;  dx = g*cosh x
sinh = unary_op("sinh", lambda xp, x: xp.sinh(x), lambda xp, g, x: g * xp.cosh(x), "x")
# z = cosh x;  dx = g*sinh x
cosh = unary_op("cosh", lambda xp, x: xp.cosh(x), lambda xp, g, x: g * xp.sinh(x), "x")
# z = arsinh x;  dx = g/sqrt(x^2 + 1)
asinh = unary_op("asinh", lambda xp, x: xp.arcsinh(x), lambda xp, g, x: g / xp.sqrt(x * x + 1), "x")
# z = arcosh x;  dx = g/sqrt(x^2 - 1)
acosh = unary_op("acosh", lambda xp, x: xp.arccosh(x), lambda xp, g, x: g / xp.sqrt(x * x - 1), "x")
# z = artanh x;  dx = g/(1 - x^2)
atanh = unary_op("atanh", lambda xp, x: xp.arctanh(x), lambda xp, g, x: g / (1 - x * x), "x")

# z = erf x;  dx = g*2/sqrt(pi)*e^(-x^2)
erf = unary_op("erf", compute_erf, lambda xp, g, x: g * (2 / root(pi) * xp.exp(-x * x)), "x")
# z = 1 - erf x;  dx = -g*2/sqrt(pi)*e^(-x^2)
erfc = unary_op("erfc", compute_erfc, lambda xp, g, x: g * (-2 / root(pi) * xp.exp(-x * x)), "x")
# x = erf z;  dx = g*sqrt(pi)/2*e^(z^2)
erfinv = unary_op("erfinv", compute_erfinv, lambda xp, g, z: g * (root(pi) / 2 * xp.exp(z * z)), "out")

# z = log |gamma(x)|;  dx = g*digamma(x)
lgamma = unary_op("lgamma", compute_lgamma, lambda xp, g, x: g * compute_digamma(xp, x), "x")
# z = digamma(x);  dx = g*trigamma(x)
digamma = unary_op("digamma", compute_digamma, lambda xp, g, x: g * compute_trigamma(xp, x), "x")


# z is drawn from the gamma distribution of shape a;  da = g*dz/da
def _standard_gamma(xp: Any, a: Array, generator: Any) -> Array:
    drawn = xp.asarray(generator.standard_gamma(a.astype("float64")))
    return xp.maximum(drawn, xp.finfo(a.dtype).tiny).astype(a.dtype)


standard_gamma = formula_op(
    "standard_gamma",
    _standard_gamma,
    {"a": lambda xp, g, a, z, generator: g * standard_gamma_gradient(xp, a, z)},
    ("a", "out"),
)


# z = log(x/(1 - x)), x clipped to [eps, 1 - eps];  dx = g/(x*(1 - x)) inside, else 0; without eps, nan outside [0, 1]
def _logit(xp: Any, x: Array, eps: float | None) -> Array:
    y = x if eps is None else xp.clip(x, eps, 1 - eps)
    return xp.log(y / (1 - y))


def _logit_gradient(xp: Any, g: Array, x: Array, eps: float | None) -> Array:
    low, high = (0, 1) if eps is None else (eps, 1 - eps)
    within = (x >= low) & (x <= high)
    dx = g / (x * (1 - x))
    return xp.where(within, dx, x.dtype.type(float("nan"))) if eps is None else where_or_zero(xp, within, dx)


logit = formula_op("logit", _logit, {"x": _logit_gradient}, ("x",))


# z = the angle of (y, x);  dy = g*x/(x^2 + y^2), dx = -g*y/(x^2 + y^2), both 0 at the origin
def _atan2(xp: Any, y: Array, x: Array) -> ForwardResult:
    return xp.arctan2(y, x), (shape_of(y), shape_of(x))


def _atan2_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    y, x = saved
    g = g / ((square := x * x + y * y) + (square == 0))
    return unbroadcast(g * x, shapes[0]) if needs[0] else None, unbroadcast(-g * y, shapes[1]) if needs[1] else None


atan2 = Op("atan2", _atan2, _atan2_backward, inputs=("y", "x"), saves=("y", "x"))


# z = log(e^x + e^y);  dx = g/(1 + e^(y - x)), dy = g/(1 + e^(x - y))
logaddexp = formula_op(
    "logaddexp",
    lambda xp, x, y: xp.logaddexp(x, y),
    {"x": lambda xp, g, x, y: g / (1 + xp.exp(y - x)), "y": lambda xp, g, x, y: g / (1 + xp.exp(x - y))},
    ("x", "y"),
)


# z = sqrt(x^2 + y^2);  dx = g*x/z, dy = g*y/z
hypot = formula_op(
    "hypot",
    lambda xp, x, y: xp.hypot(x, y),
    {"x": lambda xp, g, x, z, y: g * (x / z), "y": lambda xp, g, x, z, y: g * (y / z)},
    {"x": ("x", "out"), "y": ("y", "out")},
)


# z = x*log y, 0 where x = 0 and y is not nan;  dx = g*log y, 0 where x = 0 and y <= 0; dy = g*x/y
def _xlogy(xp: Any, x: Array, y: Array) -> Array:
    product = x * xp.log(y)
    zero = xp.equal(x, 0) & ~xp.isnan(y)
    return xp.where(zero, xp.zeros_like(product), product)


xlogy = formula_op(
    "xlogy",
    _xlogy,
    {
        "x": lambda xp, g, x, y: where_or_zero(xp, ~(xp.equal(x, 0) & xp.less_equal(y, 0)), g * xp.log(y)),
        "y": lambda xp, g, x, y: g * (x / y),
    },
    ("x", "y"),
)
