"""Comparisons and logic as methods: results are bool, or integers for bits, and outside the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp._tensor.arithmetic import Other, aligned, compare, required
from ddp._tensor.base import TensorBase, together, wrap
from ddp._tensor.dtypes import bfloat16, is_float
from ddp.errors import DtypeError

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


class Comparing(TensorBase):
    """Comparisons, logic and bits; operands broadcast."""

    __slots__ = ()
    __hash__ = object.__hash__  # by identity: == is elementwise

    def __eq__(self, y: Other) -> Tensor:  # type: ignore[override]  # elementwise
        return compare("equal", self, y)

    def __ne__(self, y: Other) -> Tensor:  # type: ignore[override]  # elementwise
        return compare("not_equal", self, y)

    def __lt__(self, y: Other) -> Tensor:
        return compare("less", self, y)

    def __le__(self, y: Other) -> Tensor:
        return compare("less_equal", self, y)

    def __gt__(self, y: Other) -> Tensor:
        return compare("greater", self, y)

    def __ge__(self, y: Other) -> Tensor:
        return compare("greater_equal", self, y)

    def __invert__(self) -> Tensor:
        if is_float(self.array.dtype):
            raise DtypeError(f"invert: expected integers or bool, got {self.array.dtype}")
        return wrap(self._device.xp.asarray(~self.array), self._device)

    def __and__(self, y: Other) -> Tensor:
        return compare("bitwise_and", self, y)

    def __or__(self, y: Other) -> Tensor:
        return compare("bitwise_or", self, y)

    def __xor__(self, y: Other) -> Tensor:
        return compare("bitwise_xor", self, y)

    def __rand__(self, y: Other) -> Tensor:
        return compare("bitwise_and", self, y)

    def __ror__(self, y: Other) -> Tensor:
        return compare("bitwise_or", self, y)

    def __rxor__(self, y: Other) -> Tensor:
        return compare("bitwise_xor", self, y)

    def __lshift__(self, y: Other) -> Tensor:
        return compare("left_shift", self, y)

    def __rlshift__(self, y: Other) -> Tensor:
        return compare("left_shift", self, y, swap=True)

    def __rshift__(self, y: Other) -> Tensor:
        return compare("right_shift", self, y)

    def __rrshift__(self, y: Other) -> Tensor:
        return compare("right_shift", self, y, swap=True)

    def eq(self, other: Other) -> Tensor:
        """self == other, bool."""
        return required(self.__eq__(other), "eq", other)

    def ne(self, other: Other) -> Tensor:
        """self != other, bool."""
        return required(self.__ne__(other), "ne", other)

    def lt(self, other: Other) -> Tensor:
        """self < other, bool."""
        return required(self.__lt__(other), "lt", other)

    def le(self, other: Other) -> Tensor:
        """self <= other, bool."""
        return required(self.__le__(other), "le", other)

    def gt(self, other: Other) -> Tensor:
        """self > other, bool."""
        return required(self.__gt__(other), "gt", other)

    def ge(self, other: Other) -> Tensor:
        """self >= other, bool."""
        return required(self.__ge__(other), "ge", other)

    not_equal, less, less_equal, greater, greater_equal = ne, lt, le, gt, ge

    def logical_and(self, other: Other) -> Tensor:
        """`and` of the truths of both (non-zero is true), bool."""
        return required(compare("logical_and", self, other), "logical_and", other)

    def logical_or(self, other: Other) -> Tensor:
        """`or` of the truths of both (non-zero is true), bool."""
        return required(compare("logical_or", self, other), "logical_or", other)

    def logical_xor(self, other: Other) -> Tensor:
        """`xor` of the truths of both (non-zero is true), bool."""
        return required(compare("logical_xor", self, other), "logical_xor", other)

    def logical_not(self) -> Tensor:
        """Whether each element is zero, bool."""
        return wrap(self._device.xp.logical_not(self.array), self._device)

    def bitwise_and(self, other: Other) -> Tensor:
        """`and` of the bits of integers or bool. Raises: DtypeError for floats."""
        return required(self.__and__(other), "bitwise_and", other)

    def bitwise_or(self, other: Other) -> Tensor:
        """`or` of the bits of integers or bool. Raises: DtypeError for floats."""
        return required(self.__or__(other), "bitwise_or", other)

    def bitwise_xor(self, other: Other) -> Tensor:
        """`xor` of the bits of integers or bool. Raises: DtypeError for floats."""
        return required(self.__xor__(other), "bitwise_xor", other)

    def bitwise_not(self) -> Tensor:
        """The bits of integers or bool inverted. Raises: DtypeError for floats."""
        return ~self

    def bitwise_left_shift(self, other: Other) -> Tensor:
        """self << other, of integers."""
        return required(self.__lshift__(other), "bitwise_left_shift", other)

    def bitwise_right_shift(self, other: Other) -> Tensor:
        """self >> other, of integers; the sign stays."""
        return required(self.__rshift__(other), "bitwise_right_shift", other)

    def isnan(self) -> Tensor:
        """Whether each element is nan, bool."""
        return wrap(self._device.xp.asarray(self._device.xp.isnan(self.array)), self._device)

    def isinf(self) -> Tensor:
        """Whether each element is infinite, bool."""
        return wrap(self._device.xp.asarray(self._device.xp.isinf(self.array)), self._device)

    def isfinite(self) -> Tensor:
        """Whether each element is neither infinite nor nan, bool."""
        return wrap(self._device.xp.asarray(self._device.xp.isfinite(self.array)), self._device)

    def equal(self, other: TensorBase) -> bool:
        """Whether both have one shape and equal elements."""
        return self.array.shape == other.array.shape and bool(self.eq(other).array.all())

    def isclose(self, other: Other, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
        """Whether |self - other| <= atol + rtol*|other|, or both are equal, bool; with `equal_nan`, nan is like nan.

        Raises: ShapeError if they do not broadcast; DeviceError.
        """
        pair = aligned(self, other, "isclose")
        if pair is None:
            return required(None, "isclose", other)
        x, y = pair
        if isinstance(y, TensorBase) and y._device is not x._device:
            x, y = together("isclose", pair)
        xp = x._device.xp
        a, b = x.array, y.array if isinstance(y, TensorBase) else y
        if not is_float(a.dtype) or a.dtype == bfloat16:
            # A difference of unsigned integers would wrap around, and float64 holds bfloat16 whole.
            a, b = xp.asarray(a, "float64"), xp.asarray(b, "float64")
        return wrap(xp.asarray(xp.isclose(a, b, rtol, atol, equal_nan)), x._device)

    def allclose(self, other: Other, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
        """Whether isclose holds everywhere."""
        return bool(self.isclose(other, rtol, atol, equal_nan).array.all())
