"""The error function and its kin on arrays: NumPy has none. On a GPU they are CUDA's own.

Source: W. J. Cody 1969, Rational Chebyshev approximations for the error function, Math. Comp. 23, 631-637 (float64);
M. Giles 2012, Approximating the erfinv function, GPU Computing Gems 2 (the start of the inverse).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt
from typing import Any

import numpy as np

from ddp.ops._op import Array

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
# Beyond: erfc = e^(-x^2)/x*(1/sqrt(pi) - P/(x^2*Q)), P and Q of 1/x^2.
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
    return (1 / sqrt(pi) - z * _horner(_P3, z) / _horner(_Q3, z)) / y


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
    z = x * np.float32(sqrt(2))
    y = z * z
    z *= _horner(TANH_OF, y)
    return np.tanh(z, out=z)


# Giles's polynomials, in w - 2.5 and in sqrt(w) - 3, where w = -log(1 - x^2).
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
    root = np.sqrt(np.maximum(w, 5)) - 3
    z = np.where(w < 5, _horner(_CENTRAL, np.minimum(w, 5) - 2.5), _horner(_OUTER, root)) * x
    a, p = np.abs(z), np.abs(x)
    middle, rest = p < 0.5, 1 - p
    for _ in range(3):
        # Newton's steps: on erf in the middle, on log erfc outside, where it is nearly a parabola.
        tail, scale = _erfc64(a), sqrt(pi) / 2 * np.exp(a * a)
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


# CuPy's: `ddp.ops.cuda.entries`
ERF: dict[str, Callable[..., Array]] = {"numpy": _numpy_erf}
ERFC: dict[str, Callable[..., Array]] = {"numpy": _double(_erfc64)}
ERFINV: dict[str, Callable[..., Array]] = {"numpy": _double(_erfinv64)}


def erf(xp: Any, x: Array) -> Array:
    """2/sqrt(pi) times the integral of e^(-t^2) from 0 to x: to 1e-7 in float32, 1e-15 in float64."""
    return ERF[xp.__name__](xp, x)


def erfc(xp: Any, x: Array) -> Array:
    """1 - erf(x), to the last digits also where it is small."""
    return ERFC[xp.__name__](xp, x)


def erfinv(xp: Any, x: Array) -> Array:
    """The number whose erf is x."""
    return ERFINV[xp.__name__](xp, x)
