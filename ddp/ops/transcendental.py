"""Exponentials, logarithms, roots, trigonometry and the error function."""

from __future__ import annotations

from collections.abc import Callable
from math import log as ln
from math import pi
from math import sqrt as root
from typing import Any

from ddp.ops import error_function
from ddp.ops._op import Array, Gradients, Needs, Op, Saved, fold, select, shape_of


def _function(
    name: str, value: Callable[[Any, Array], Array], gradient: Callable[[Any, Array, Array], Array], saves: str
) -> Op:
    """An op of one input: z = value(xp, x), dx = gradient(xp, g, x), or of z where `saves` is "out"."""

    def forward(xp: Any, x: Array) -> tuple[Array, Any]:
        return value(xp, x), None

    def backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
        return (gradient(xp, g, saved[0]),)

    return Op(name, forward, backward, inputs=("x",), saves=(saves,))


# z = e^x;  dx = g*z
exp = _function("exp", lambda xp, x: xp.exp(x), lambda xp, g, z: g * z, "out")
# z = 2^x;  dx = g*z*log 2
exp2 = _function("exp2", lambda xp, x: xp.exp2(x), lambda xp, g, z: g * z * ln(2), "out")
# z = e^x - 1;  dx = g*(z + 1)
expm1 = _function("expm1", lambda xp, x: xp.expm1(x), lambda xp, g, z: g * (z + 1), "out")
# z = log x;  dx = g/x
log = _function("log", lambda xp, x: xp.log(x), lambda xp, g, x: g / x, "x")
# z = log_2 x;  dx = g/(x*log 2)
log2 = _function("log2", lambda xp, x: xp.log2(x), lambda xp, g, x: g / (x * ln(2)), "x")
# z = log_10 x;  dx = g/(x*log 10)
log10 = _function("log10", lambda xp, x: xp.log10(x), lambda xp, g, x: g / (x * ln(10)), "x")
# z = log(1 + x);  dx = g/(1 + x)
log1p = _function("log1p", lambda xp, x: xp.log1p(x), lambda xp, g, x: g / (x + 1), "x")
# z = sqrt x;  dx = g/(2z)
sqrt = _function("sqrt", lambda xp, x: xp.sqrt(x), lambda xp, g, z: g / (2 * z), "out")
# z = 1/sqrt x;  dx = -g*z^3/2
rsqrt = _function("rsqrt", lambda xp, x: 1 / xp.sqrt(x), lambda xp, g, z: -0.5 * g * (z * z * z), "out")

# z = sin x;  dx = g*cos x
sin = _function("sin", lambda xp, x: xp.sin(x), lambda xp, g, x: g * xp.cos(x), "x")
# z = cos x;  dx = -g*sin x
cos = _function("cos", lambda xp, x: xp.cos(x), lambda xp, g, x: -g * xp.sin(x), "x")
# z = tan x;  dx = g*(1 + z^2)
tan = _function("tan", lambda xp, x: xp.tan(x), lambda xp, g, z: g * (1 + z * z), "out")
# z = arcsin x;  dx = g/sqrt(1 - x^2)
asin = _function("asin", lambda xp, x: xp.arcsin(x), lambda xp, g, x: g / xp.sqrt(1 - x * x), "x")
# z = arccos x;  dx = -g/sqrt(1 - x^2)
acos = _function("acos", lambda xp, x: xp.arccos(x), lambda xp, g, x: -g / xp.sqrt(1 - x * x), "x")
# z = arctan x;  dx = g/(1 + x^2)
atan = _function("atan", lambda xp, x: xp.arctan(x), lambda xp, g, x: g / (1 + x * x), "x")
# z = sinh x;  dx = g*cosh x
sinh = _function("sinh", lambda xp, x: xp.sinh(x), lambda xp, g, x: g * xp.cosh(x), "x")
# z = cosh x;  dx = g*sinh x
cosh = _function("cosh", lambda xp, x: xp.cosh(x), lambda xp, g, x: g * xp.sinh(x), "x")
# z = arsinh x;  dx = g/sqrt(x^2 + 1)
asinh = _function("asinh", lambda xp, x: xp.arcsinh(x), lambda xp, g, x: g / xp.sqrt(x * x + 1), "x")
# z = arcosh x;  dx = g/sqrt(x^2 - 1)
acosh = _function("acosh", lambda xp, x: xp.arccosh(x), lambda xp, g, x: g / xp.sqrt(x * x - 1), "x")
# z = artanh x;  dx = g/(1 - x^2)
atanh = _function("atanh", lambda xp, x: xp.arctanh(x), lambda xp, g, x: g / (1 - x * x), "x")

# z = erf x;  dx = g*2/sqrt(pi)*e^(-x^2)
erf = _function("erf", error_function.erf, lambda xp, g, x: g * (2 / root(pi) * xp.exp(-x * x)), "x")
# z = 1 - erf x;  dx = -g*2/sqrt(pi)*e^(-x^2)
erfc = _function("erfc", error_function.erfc, lambda xp, g, x: g * (-2 / root(pi) * xp.exp(-x * x)), "x")
# x = erf z;  dx = g*sqrt(pi)/2*e^(z^2)
erfinv = _function("erfinv", error_function.erfinv, lambda xp, g, z: g * (root(pi) / 2 * xp.exp(z * z)), "out")


# z = log(x/(1 - x)), x held within [eps, 1 - eps];  dx = g/(x*(1 - x)) within, 0 outside, nan without eps
def _logit(xp: Any, x: Array, eps: float | None) -> tuple[Array, Any]:
    y = x if eps is None else xp.clip(x, eps, 1 - eps)
    return xp.log(y / (1 - y)), eps


def _logit_backward(xp: Any, g: Array, needs: Needs, saved: Saved, eps: Any) -> Gradients:
    x = saved[0]
    low, high = (0, 1) if eps is None else (eps, 1 - eps)
    within = (x >= low) & (x <= high)
    dx = g / (x * (1 - x))
    return (xp.where(within, dx, x.dtype.type(float("nan"))) if eps is None else select(xp, within, dx),)


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
        dx = fold(select(xp, ~(xp.equal(x, 0) & xp.less_equal(y, 0)), g * xp.log(y)), shapes[0])
    if needs[1]:
        dy = fold(g * (x / y), shapes[1])
    return dx, dy


xlogy = Op("xlogy", _xlogy, _xlogy_backward, inputs=("x", "y"), saves=("x", "y"))
