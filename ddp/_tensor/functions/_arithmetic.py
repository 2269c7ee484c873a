"""Arithmetic as functions."""

from __future__ import annotations

from typing import Any

from ddp._tensor.arithmetic import beside
from ddp._tensor.core import Tensor
from ddp._tensor.functions._called import called


def _left(input: Any, other: Any) -> Tensor:
    return input if isinstance(input, Tensor) else beside(input, other)


@called
def add(input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """input + alpha*other."""
    return _left(input, other).add(other, alpha=alpha)


@called
def sub(input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """input - alpha*other."""
    return _left(input, other).sub(other, alpha=alpha)


def rsub(input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """other - alpha*input."""
    return _left(input, other).rsub(other, alpha=alpha)


@called
def mul(input: Any, other: Any) -> Tensor:
    """input * other."""
    return _left(input, other).mul(other)


@called
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    """input / other; rounding_mode: "trunc" (towards 0) or "floor". Raises: ArgumentError for another."""
    return _left(input, other).div(other, rounding_mode=rounding_mode)


subtract, multiply, divide, true_divide = sub, mul, div, div


@called
def floor_divide(input: Any, other: Any) -> Tensor:
    """floor(input / other); integers stay integers."""
    return _left(input, other).floor_divide(other)


@called
def remainder(input: Any, other: Any) -> Tensor:
    """input - other*floor(input/other), with the sign of `other`: Python's %."""
    return _left(input, other).remainder(other)


@called
def fmod(input: Any, other: Any) -> Tensor:
    """input - other*trunc(input/other), with the sign of input: C's fmod."""
    return _left(input, other).fmod(other)


@called
def pow(input: Any, exponent: Any) -> Tensor:
    """input ** exponent; one of both may be a number. Raises: ArgumentError for negative exponents of integers."""
    return input.pow(exponent) if isinstance(input, Tensor) else input**exponent


@called
def neg(input: Tensor) -> Tensor:
    """-input. Raises: DtypeError for bool."""
    return input.neg()


def positive(input: Tensor) -> Tensor:
    """input. Raises: DtypeError for bool."""
    return input.positive()


@called
def abs(input: Tensor) -> Tensor:
    """The absolute value."""
    return input.abs()


negative, absolute = neg, abs


@called
def reciprocal(input: Tensor) -> Tensor:
    """1 / input; of integers float32."""
    return input.reciprocal()


@called
def square(input: Tensor) -> Tensor:
    """input * input."""
    return input.square()


@called
def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """input + value*tensor1*tensor2; all broadcast."""
    return input.addcmul(tensor1, tensor2, value=value)


@called
def addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """input + value*tensor1/tensor2; all broadcast. Raises: DtypeError for integers."""
    return input.addcdiv(tensor1, tensor2, value=value)


@called
def lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    """input + weight*(end - input); weight: a number or a tensor. Raises: DtypeError for integers."""
    return input.lerp(end, weight)
