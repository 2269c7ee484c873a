"""Transcendental functions, and the error function, which NumPy lacks.

Source: W. J. Cody 1969, Rational Chebyshev approximations for the error function, Math. Comp. 23, 631-637 (float64);
M. Giles 2012, Approximating the erfinv function, GPU Computing Gems 2 (the start of the inverse).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log as ln
from math import pi
from math import sqrt as root
from typing import Any

import numpy as np

from ddp.ops.op import Array, Gradients, Needs, Op, Saved, array_function, fold, shape_of, unary_op, where_or_zero

# The error function and its kin on arrays: NumPy has none. On a GPU they are CUDA's own.
#
# Source: W. J. Cody 1969, Rational Chebyshev approximations for the error function, Math. Comp. 23, 631-637 (float64);
# M. Giles 2012, Approximating the erfinv function, GPU Computing Gems 2 (the start of the inverse).

# Coefficients from the highest power down. |x| <= 0.46875: erf = x*P/Q of x^2.
_P1 = (
    1.85777706184603153e-1,
    3.16112374387056560e0,
    1.13864154151050156e2,
    3.77485237685302021e2,
    3.20937758913846947e3,
)
_Q1 = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
# Up to 4: erfc = e^(-x^2)*P/Q of x.
_P2 = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e0,
    6.61191906371416295e1,
    2.98635138197400131e2,
    8.81952221241769090e2,
    1.71204761263407058e3,
    2.05107837782607147e3,
    1.23033935479799725e3,
)
_Q2 = (
    1.0,
    1.57449261107098347e1,
    1.17693950891312499e2,
    5.37181101862009858e2,
    1.62138957456669019e3,
    3.29079923573345963e3,
    4.36261909014324716e3,
    3.43936767414372164e3,
    1.23033935480374942e3,
)
# Beyond: erfc = e^(-x^2)/x*(1/root(pi) - P/(x^2*Q)), P and Q of 1/x^2.
_P3 = (
    1.63153871373020978e-2,
    3.05326634961232344e-1,
    3.60344899949804439e-1,
    1.25781726111229246e-1,
    1.60837851487422766e-2,
    6.58749161529837803e-4,
)
_Q3 = (
    1.0,
    2.56852019228982242e0,
    1.87295284992346725e0,
    5.27905102951428412e-1,
    6.05183413124413191e-2,
    2.33520497626869185e-3,
)
# erf(x/sqrt 2) = tanh(x*P(x^2)) to 1e-7: our own fit, in the sense of least maximal error.
TANH_OF = (
    1.5672636e-9,
    -1.2525690e-7,
    3.8730604e-6,
    -5.4781747e-5,
    -3.3911206e-5,
    3.6334348e-2,
    7.9788464e-1,
)


def _horner(coefficients: Sequence[float], x: Array) -> Array:
    out = coefficients[0] * x
    for c in coefficients[1:-1]:
        out += c
        out *= x
    out += coefficients[-1]
    return out


def _center(x: Array) -> Array:
    y = x * x
    return x * _horner(_P1, y) / _horner(_Q1, y)


def _tail(a: Array) -> Array:
    """erfc of a > 0.46875, or nan."""
    out = np.empty_like(a)
    near = a <= 4
    for mask, ratio in ((near, _near), (~near, _far)):
        if mask.any():
            y = a[mask]
            # e^(-y^2), where rounding y^2 would cost digits: y in two parts, of which one is a square without rounding.
            high = np.minimum(np.trunc(y * 16) / 16, 30)
            out[mask] = np.exp(-high * high) * np.exp((high - y) * (high + y)) * ratio(y)
    return out


def _near(y: Array) -> Array:
    return _horner(_P2, y) / _horner(_Q2, y)


def _far(y: Array) -> Array:
    z = 1 / (y * y)
    return (1 / root(pi) - z * _horner(_P3, z) / _horner(_Q3, z)) / y


def _erfc64(x: Array) -> Array:
    a = np.abs(x)
    out = np.empty_like(x)
    small = a <= 0.46875
    out[small] = 1 - _center(x[small])
    outer = ~small
    tail = _tail(a[outer])
    out[outer] = np.where(x[outer] < 0, 2 - tail, tail)
    return out


def _erf64(x: Array) -> Array:
    a = np.abs(x)
    out = np.empty_like(x)
    small = a <= 0.46875
    out[small] = _center(x[small])
    outer = ~small
    out[outer] = np.copysign(0.5 - _tail(a[outer]) + 0.5, x[outer])
    return out


def _erf32(x: Array) -> Array:
    z = x * np.float32(root(2))
    y = z * z
    z *= _horner(TANH_OF, y)
    return np.tanh(z, out=z)


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


def _erfinv64(x: Array) -> Array:
    w = -np.log((1 - x) * (1 + x))
    outer = np.sqrt(np.maximum(w, 5)) - 3
    z = np.where(w < 5, _horner(_CENTRAL, np.minimum(w, 5) - 2.5), _horner(_OUTER, outer)) * x
    a, p = np.abs(z), np.abs(x)
    middle, rest = p < 0.5, 1 - p
    for _ in range(3):
        # Newton's steps: on erf in the middle, on log erfc outside, where it is nearly a parabola.
        tail, scale = _erfc64(a), root(pi) / 2 * np.exp(a * a)
        a = np.where(middle, a - (_erf64(a) - p) * scale, a + np.log(tail / rest) * tail * scale)
    z = np.copysign(a, x)
    return np.where(p == 1, np.copysign(np.inf, x), z)


def _double(fn: Any) -> Any:
    """`fn` of float64, on any floating dtype."""
    return lambda xp, x: np.asarray(fn(np.atleast_1d(x).astype("float64", copy=False)).reshape(x.shape), x.dtype)


def _numpy_erf(xp: Any, x: Array) -> Array:
    if x.dtype.itemsize == 8:
        return _double(_erf64)(xp, x)
    return _erf32(np.atleast_1d(x).astype("float32", copy=False)).reshape(x.shape).astype(x.dtype, copy=False)


@array_function
def compute_erf(xp: Any, x: Array) -> Array:
    """2/sqrt(pi) times the integral of e^(-t^2) from 0 to x: to 1e-7 in float32, 1e-15 in float64."""
    return _numpy_erf(xp, x)


@array_function
def compute_erfc(xp: Any, x: Array) -> Array:
    """1 - erf(x), to the last digits also where it is small."""
    return _double(_erfc64)(xp, x)


@array_function
def compute_erfinv(xp: Any, x: Array) -> Array:
    """The number whose erf is x."""
    return _double(_erfinv64)(xp, x)


# Exponentials, logarithms, roots, trigonometry and the error function.

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


# z = log(x/(1 - x)), x held within [eps, 1 - eps];  dx = g/(x*(1 - x)) within, 0 outside, nan without eps
def _logit(xp: Any, x: Array, eps: float | None) -> tuple[Array, Any]:
    y = x if eps is None else xp.clip(x, eps, 1 - eps)
    return xp.log(y / (1 - y)), eps


def _logit_backward(xp: Any, g: Array, needs: Needs, saved: Saved, eps: Any) -> Gradients:
    x = saved[0]
    low, high = (0, 1) if eps is None else (eps, 1 - eps)
    within = (x >= low) & (x <= high)
    dx = g / (x * (1 - x))
    return (xp.where(within, dx, x.dtype.type(float("nan"))) if eps is None else where_or_zero(xp, within, dx),)


logit = Op("logit", _logit, _logit_backward, inputs=("x",), saves=("x",))


# z = the angle of (y, x);  dy = g*x/(x^2 + y^2), dx = -g*y/(x^2 + y^2)
def _atan2(xp: Any, y: Array, x: Array) -> tuple[Array, Any]:
    return xp.arctan2(y, x), (shape_of(y), shape_of(x))


def _atan2_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    y, x = saved
    g = g / (x * x + y * y)
    return fold(g * x, shapes[0]) if needs[0] else None, fold(-g * y, shapes[1]) if needs[1] else None


atan2 = Op("atan2", _atan2, _atan2_backward, inputs=("y", "x"), saves=("y", "x"))


# z = log(e^x + e^y);  dx = g/(1 + e^(y - x)), dy = g/(1 + e^(x - y))
def _logaddexp(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return xp.logaddexp(x, y), (shape_of(x), shape_of(y))


def _logaddexp_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    x, y = saved
    dx = fold(g / (1 + xp.exp(y - x)), shapes[0]) if needs[0] else None
    return dx, fold(g / (1 + xp.exp(x - y)), shapes[1]) if needs[1] else None


logaddexp = Op("logaddexp", _logaddexp, _logaddexp_backward, inputs=("x", "y"), saves=("x", "y"))


# z = sqrt(x^2 + y^2);  dx = g*x/z, dy = g*y/z
def _hypot(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return xp.hypot(x, y), (shape_of(x), shape_of(y))


def _hypot_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    x, out, y = saved
    return fold(g * (x / out), shapes[0]) if needs[0] else None, fold(g * (y / out), shapes[1]) if needs[1] else None


hypot = Op("hypot", _hypot, _hypot_backward, inputs=("x", "y"), saves={"x": ("x", "out"), "y": ("y", "out")})


# z = x*log y, 0 where x = 0 and y is not nan;  dx = g*log y, 0 where x = 0 and y <= 0; dy = g*x/y
def _xlogy(xp: Any, x: Array, y: Array) -> tuple[Array, Any]:
    product = x * xp.log(y)
    zero = xp.equal(x, 0) & ~xp.isnan(y)
    return xp.where(zero, xp.zeros_like(product), product), (shape_of(x), shape_of(y))


def _xlogy_backward(xp: Any, g: Array, needs: Needs, saved: Saved, shapes: Any) -> Gradients:
    x, y = saved
    dx = dy = None
    if needs[0]:
        dx = fold(where_or_zero(xp, ~(xp.equal(x, 0) & xp.less_equal(y, 0)), g * xp.log(y)), shapes[0])
    if needs[1]:
        dy = fold(g * (x / y), shapes[1])
    return dx, dy


xlogy = Op("xlogy", _xlogy, _xlogy_backward, inputs=("x", "y"), saves=("x", "y"))
