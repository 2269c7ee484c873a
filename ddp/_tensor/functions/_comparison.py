"""Comparisons, logic and bits as functions."""

from __future__ import annotations

from typing import Any

from ddp._tensor.core import Tensor
from ddp._tensor.functions._called import called


@called
def eq(input: Tensor, other: Any) -> Tensor:
    """input == other, bool."""
    return input.eq(other)


@called
def ne(input: Tensor, other: Any) -> Tensor:
    """input != other, bool."""
    return input.ne(other)


@called
def lt(input: Tensor, other: Any) -> Tensor:
    """input < other, bool."""
    return input.lt(other)


@called
def le(input: Tensor, other: Any) -> Tensor:
    """input <= other, bool."""
    return input.le(other)


@called
def gt(input: Tensor, other: Any) -> Tensor:
    """input > other, bool."""
    return input.gt(other)


@called
def ge(input: Tensor, other: Any) -> Tensor:
    """input >= other, bool."""
    return input.ge(other)


not_equal, less, less_equal, greater, greater_equal = ne, lt, le, gt, ge


@called
def logical_and(input: Tensor, other: Any) -> Tensor:
    """`and` of the truths of both (non-zero is true), bool."""
    return input.logical_and(other)


@called
def logical_or(input: Tensor, other: Any) -> Tensor:
    """`or` of the truths of both (non-zero is true), bool."""
    return input.logical_or(other)


@called
def logical_xor(input: Tensor, other: Any) -> Tensor:
    """`xor` of the truths of both (non-zero is true), bool."""
    return input.logical_xor(other)


@called
def logical_not(input: Tensor) -> Tensor:
    """Whether each element is zero, bool."""
    return input.logical_not()


@called
def bitwise_and(input: Tensor, other: Any) -> Tensor:
    """`and` of the bits of integers or bool. Raises: DtypeError for floats."""
    return input.bitwise_and(other)


@called
def bitwise_or(input: Tensor, other: Any) -> Tensor:
    """`or` of the bits of integers or bool. Raises: DtypeError for floats."""
    return input.bitwise_or(other)


@called
def bitwise_xor(input: Tensor, other: Any) -> Tensor:
    """`xor` of the bits of integers or bool. Raises: DtypeError for floats."""
    return input.bitwise_xor(other)


@called
def bitwise_not(input: Tensor) -> Tensor:
    """The bits of integers or bool inverted. Raises: DtypeError for floats."""
    return input.bitwise_not()


@called
def bitwise_left_shift(input: Tensor, other: Any) -> Tensor:
    """input << other, of integers."""
    return input.bitwise_left_shift(other)


@called
def bitwise_right_shift(input: Tensor, other: Any) -> Tensor:
    """input >> other, of integers; the sign stays."""
    return input.bitwise_right_shift(other)


def isnan(input: Tensor) -> Tensor:
    """Whether each element is nan, bool."""
    return input.isnan()


def isinf(input: Tensor) -> Tensor:
    """Whether each element is infinite, bool."""
    return input.isinf()


def isfinite(input: Tensor) -> Tensor:
    """Whether each element is neither infinite nor nan, bool."""
    return input.isfinite()


def equal(input: Tensor, other: Tensor) -> bool:
    """Whether both have one shape and equal elements."""
    return input.equal(other)


def isclose(input: Tensor, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    """Whether |input - other| <= atol + rtol*|other|, or both are equal, bool; with `equal_nan`, nan is like nan."""
    return input.isclose(other, rtol, atol, equal_nan)


def allclose(input: Tensor, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether isclose holds everywhere."""
    return input.allclose(other, rtol, atol, equal_nan)
