"""Exponentials, logarithms, roots, trigonometry and rounding as functions."""

from __future__ import annotations

from typing import Any

from ddp._tensor.arithmetic import beside
from ddp._tensor.core import Tensor
from ddp._tensor.functions._called import called


@called
def exp(input: Tensor) -> Tensor:
    """exp(input): e to the power of each element."""
    return input.exp()


@called
def exp2(input: Tensor) -> Tensor:
    """2 to the power of each element."""
    return input.exp2()


@called
def expm1(input: Tensor) -> Tensor:
    """exp(input) - 1, without loss near 0."""
    return input.expm1()


@called
def log(input: Tensor) -> Tensor:
    """The natural logarithm."""
    return input.log()


@called
def log2(input: Tensor) -> Tensor:
    """The logarithm to base 2."""
    return input.log2()


@called
def log10(input: Tensor) -> Tensor:
    """The logarithm to base 10."""
    return input.log10()


@called
def log1p(input: Tensor) -> Tensor:
    """log(1 + input), without loss near 0."""
    return input.log1p()


@called
def sqrt(input: Tensor) -> Tensor:
    """The square root."""
    return input.sqrt()


@called
def rsqrt(input: Tensor) -> Tensor:
    """1 / sqrt(input)."""
    return input.rsqrt()


@called
def sin(input: Tensor) -> Tensor:
    """The sine; radians."""
    return input.sin()


@called
def cos(input: Tensor) -> Tensor:
    """The cosine; radians."""
    return input.cos()


@called
def tan(input: Tensor) -> Tensor:
    """The tangent; radians."""
    return input.tan()


@called
def asin(input: Tensor) -> Tensor:
    """The inverse of the sine, in [-pi/2, pi/2]."""
    return input.asin()


@called
def acos(input: Tensor) -> Tensor:
    """The inverse of the cosine, in [0, pi]."""
    return input.acos()


@called
def atan(input: Tensor) -> Tensor:
    """The inverse of the tangent, in [-pi/2, pi/2]."""
    return input.atan()


@called
def sinh(input: Tensor) -> Tensor:
    """The hyperbolic sine."""
    return input.sinh()


@called
def cosh(input: Tensor) -> Tensor:
    """The hyperbolic cosine."""
    return input.cosh()


@called
def asinh(input: Tensor) -> Tensor:
    """The inverse of the hyperbolic sine."""
    return input.asinh()


@called
def acosh(input: Tensor) -> Tensor:
    """The inverse of the hyperbolic cosine."""
    return input.acosh()


@called
def atanh(input: Tensor) -> Tensor:
    """The inverse of the hyperbolic tangent."""
    return input.atanh()


@called
def erf(input: Tensor) -> Tensor:
    """2/sqrt(pi) times the integral of exp(-t**2) from 0 to input."""
    return input.erf()


@called
def erfc(input: Tensor) -> Tensor:
    """1 - erf(input), exact also where it is small."""
    return input.erfc()


@called
def erfinv(input: Tensor) -> Tensor:
    """The number whose erf is input."""
    return input.erfinv()


@called
def tanh(input: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return input.tanh()


@called
def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-input))."""
    return input.sigmoid()


@called
def floor(input: Tensor) -> Tensor:
    """The largest integer that is not larger; integers stay."""
    return input.floor()


@called
def ceil(input: Tensor) -> Tensor:
    """The smallest integer that is not smaller; integers stay."""
    return input.ceil()


@called
def trunc(input: Tensor) -> Tensor:
    """The integer next to it towards 0; integers stay."""
    return input.trunc()


arcsin, arccos, arctan = asin, acos, atan
arcsinh, arccosh, arctanh = asinh, acosh, atanh
fix = trunc


@called
def logit(input: Tensor, eps: float | None = None) -> Tensor:
    """log(input / (1 - input)), the inverse of sigmoid; with `eps`, input is held within [eps, 1 - eps] before."""
    return input.logit(eps)


@called
def atan2(input: Tensor, other: Any) -> Tensor:
    """The angle of the point (other, input), in [-pi, pi]."""
    return input.atan2(other)


arctan2 = atan2


@called
def logaddexp(input: Tensor, other: Any) -> Tensor:
    """log(exp(input) + exp(other)), without overflow."""
    return input.logaddexp(other)


@called
def hypot(input: Tensor, other: Any) -> Tensor:
    """sqrt(input**2 + other**2), without overflow."""
    return input.hypot(other)


@called
def xlogy(input: Any, other: Any) -> Tensor:
    """input * log(other), 0 where input is 0; one of both may be a number."""
    return (input if isinstance(input, Tensor) else beside(input, other)).xlogy(other)


@called
def round(input: Tensor, *, decimals: int = 0) -> Tensor:
    """The nearest number of so many decimals, of two the even one; integers stay."""
    return input.round(decimals=decimals)


@called
def frac(input: Tensor) -> Tensor:
    """What trunc takes away. Raises: DtypeError unless floating."""
    return input.frac()


@called
def sign(input: Tensor) -> Tensor:
    """-1, 0 or 1; bool stays."""
    return input.sign()
