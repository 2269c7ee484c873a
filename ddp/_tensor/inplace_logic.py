"""Comparisons, logic and bits that write into their tensor: `x.eq_(y)` is x == y in the memory of x."""

from __future__ import annotations

from typing import Any, TypeVar

from ddp._tensor.arithmetic import Other
from ddp._tensor.inplace import InPlace, become

T = TypeVar("T", bound=InPlace)
Self = TypeVar("Self", bound="LogicInPlace")


def computed(x: T, name: str, *operands: Other, **options: Any) -> T:
    """x = x.NAME(...) by way of a result of its own."""
    return become(x, f"{name}_", getattr(x, name)(*operands, **options))


class LogicInPlace(InPlace):
    """The truth is 1 in the dtype of the tensor; no gradient passes. Raises: as `InPlace`."""

    __slots__ = ()

    def __iand__(self: Self, other: Other) -> Self:
        return self.bitwise_and_(other)

    def __ior__(self: Self, other: Other) -> Self:
        return self.bitwise_or_(other)

    def __ixor__(self: Self, other: Other) -> Self:
        return self.bitwise_xor_(other)

    def __ilshift__(self: Self, other: Other) -> Self:
        return self.bitwise_left_shift_(other)

    def __irshift__(self: Self, other: Other) -> Self:
        return self.bitwise_right_shift_(other)

    def logical_not_(self: Self) -> Self:
        """Whether each element is zero, in this dtype."""
        return computed(self, "logical_not")

    def bitwise_not_(self: Self) -> Self:
        """The bits inverted."""
        return computed(self, "bitwise_not")

    def logical_and_(self: Self, other: Other) -> Self:
        """`and` of the truths of both, in this dtype."""
        return computed(self, "logical_and", other)

    def logical_or_(self: Self, other: Other) -> Self:
        """`or` of the truths of both, in this dtype."""
        return computed(self, "logical_or", other)

    def logical_xor_(self: Self, other: Other) -> Self:
        """`xor` of the truths of both, in this dtype."""
        return computed(self, "logical_xor", other)

    def bitwise_and_(self: Self, other: Other) -> Self:
        """self &= other."""
        return computed(self, "bitwise_and", other)

    def bitwise_or_(self: Self, other: Other) -> Self:
        """self |= other."""
        return computed(self, "bitwise_or", other)

    def bitwise_xor_(self: Self, other: Other) -> Self:
        """self ^= other."""
        return computed(self, "bitwise_xor", other)

    def bitwise_left_shift_(self: Self, other: Other) -> Self:
        """self <<= other."""
        return computed(self, "bitwise_left_shift", other)

    def bitwise_right_shift_(self: Self, other: Other) -> Self:
        """self >>= other."""
        return computed(self, "bitwise_right_shift", other)

    def eq_(self: Self, other: Other) -> Self:
        """self == other, as 0 and 1 in this dtype."""
        return computed(self, "eq", other)

    def ne_(self: Self, other: Other) -> Self:
        """self != other, as 0 and 1 in this dtype."""
        return computed(self, "ne", other)

    def lt_(self: Self, other: Other) -> Self:
        """self < other, as 0 and 1 in this dtype."""
        return computed(self, "lt", other)

    def le_(self: Self, other: Other) -> Self:
        """self <= other, as 0 and 1 in this dtype."""
        return computed(self, "le", other)

    def gt_(self: Self, other: Other) -> Self:
        """self > other, as 0 and 1 in this dtype."""
        return computed(self, "gt", other)

    def ge_(self: Self, other: Other) -> Self:
        """self >= other, as 0 and 1 in this dtype."""
        return computed(self, "ge", other)

    not_equal_, less_, less_equal_, greater_, greater_equal_ = ne_, lt_, le_, gt_, ge_
