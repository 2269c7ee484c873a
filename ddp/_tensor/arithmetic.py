"""Operators and elementwise mathematics of tensors: promotion happens here, so that ops see one dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._device import place
from ddp._tensor.base import TensorBase, apply, borrowed, wrap
from ddp._tensor.dtypes import DEFAULT, SUPPORTED, is_float, promote, promote_scalar
from ddp.errors import ArgumentError, DdpError, DtypeError, ShapeError
from ddp.ops import activation, choice, transcendental
from ddp.ops import elementwise as ops

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor
    from ddp.ops import Op

Other = Any  # a tensor, a Python number, or an array


def convert(x: TensorBase, dtype: np.dtype[Any]) -> TensorBase:
    """`x` in `dtype`; the same tensor if it has it."""
    return x if x._array.dtype == dtype else apply(ops.cast, (x,), dtype=dtype)


def adopted(x: TensorBase, y: Other) -> Tensor | None:
    """An array `y` as a tensor beside `x`; None if it is no array."""
    if not hasattr(y, "dtype") or y.dtype not in SUPPORTED:
        return None
    return wrap(place(borrowed(y, x), x._device), x._device)


def refusal(name: str, error: Exception) -> DdpError:
    """What the array module refused, as an error of ours: a dtype for a TypeError, else a value."""
    return (DtypeError if isinstance(error, TypeError) else ArgumentError)(f"{name}: {error}")


REFUSED = (TypeError, ValueError, OverflowError)  # bool - bool, integer ** -1, uint8 + 300


def aligned(x: TensorBase, y: Other, name: str, floating: bool = False) -> tuple[TensorBase, Any] | None:
    """`x` and `y` in the dtype of their result; None if `y` is nothing to compute with.

    floating: integers become float32, as in a true division. Raises: ShapeError if they do not broadcast.
    """
    if isinstance(y, np.generic):
        y = y.item()  # a NumPy scalar counts as a number; its float64 must not widen the result
    if isinstance(y, bool | int | float):
        dtype = promote_scalar(x._array.dtype, y)
        if floating and not is_float(dtype):
            dtype = DEFAULT
        return convert(x, dtype), y
    if not isinstance(y, TensorBase):
        y = adopted(x, y)
        if y is None:
            return None
    a, b = x._array, y._array
    if a.shape != b.shape:
        broadcast(a.shape, b.shape, name)
    if a.dtype == b.dtype and not floating:
        return x, y
    dtype = promote(a.dtype, a.ndim, b.dtype, b.ndim)
    if floating and not is_float(dtype):
        dtype = DEFAULT
    return convert(x, dtype), convert(y, dtype)


def broadcast(a: tuple[int, ...], b: tuple[int, ...], name: str) -> None:
    """Raises ShapeError if the shapes do not broadcast."""
    for i, (m, n) in enumerate(zip(reversed(a), reversed(b), strict=False), 1):
        if m != n and m != 1 and n != 1:
            raise ShapeError(f"{name}: shapes {a} and {b} do not broadcast: {m} and {n} differ in dimension {-i}")


def floating(x: TensorBase) -> TensorBase:
    """`x`, or for integers and bool its float32 form: what exp, mean and kin compute on."""
    return x if is_float(x._array.dtype) else convert(x, DEFAULT)


def unary(op: Op, x: TensorBase) -> Tensor:
    """A function that has results between the integers."""
    return apply(op, (floating(x),))


def binary(op: Op, x: TensorBase, y: Other, swap: bool = False, floating: bool = False) -> Any:
    """op(x, y), or op(y, x) with `swap`; NotImplemented if `y` is nothing to compute with."""
    pair = aligned(x, y, op.name, floating)
    if pair is None:
        return NotImplemented
    try:
        return apply(op, pair[::-1] if swap else pair)
    except DdpError:
        raise
    except REFUSED as error:
        raise refusal(op.name, error) from error


def compare(name: str, x: TensorBase, y: Other) -> Any:
    """A bool tensor outside the graph, by the array module's function `name`."""
    pair = aligned(x, y, name)
    if pair is None:
        return NotImplemented
    a, b = pair
    xp = x._device.xp
    try:
        out = getattr(xp, name)(a._array, b._array if isinstance(b, TensorBase) else b)
    except REFUSED as error:
        raise refusal(name, error) from error
    return wrap(xp.asarray(out), x._device)


def required(result: Any, name: str, y: Other) -> Tensor:
    """`result` of a named function, where there is no other operand to try."""
    if result is NotImplemented:
        raise DtypeError(f"{name}: expected a tensor, an array or a number, got {type(y).__name__}")
    return result


class Arithmetic(TensorBase):
    """Elementwise methods; operands broadcast, and results follow PyTorch's promotion rules."""

    __slots__ = ()
    __hash__ = object.__hash__  # by identity: == is elementwise
    __array_priority__ = 1000  # an array on the left leaves the operation to us

    def __add__(self, y: Other) -> Tensor:
        return binary(ops.add, self, y)

    def __radd__(self, y: Other) -> Tensor:
        return binary(ops.add, self, y, swap=True)

    def __sub__(self, y: Other) -> Tensor:
        return binary(ops.sub, self, y)

    def __rsub__(self, y: Other) -> Tensor:
        return binary(ops.sub, self, y, swap=True)

    def __mul__(self, y: Other) -> Tensor:
        return binary(ops.mul, self, y)

    def __rmul__(self, y: Other) -> Tensor:
        return binary(ops.mul, self, y, swap=True)

    def __truediv__(self, y: Other) -> Tensor:
        return binary(ops.div, self, y, floating=True)

    def __rtruediv__(self, y: Other) -> Tensor:
        return binary(ops.div, self, y, swap=True, floating=True)

    def __pow__(self, y: Other) -> Tensor:
        return binary(ops.pow, self, y)

    def __rpow__(self, y: Other) -> Tensor:
        return binary(ops.pow, self, y, swap=True)

    def __neg__(self) -> Tensor:
        if self._array.dtype.kind == "b":
            raise DtypeError("neg: bool has no negative; use ~")
        return apply(ops.neg, (self,))

    def __abs__(self) -> Tensor:
        return apply(ops.abs, (self,))

    def __eq__(self, y: Other) -> Tensor:  # type: ignore[override]  # elementwise, as everywhere in array code
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
        if is_float(self._array.dtype):
            raise DtypeError(f"invert: expected integers or bool, got {self._array.dtype}")
        return wrap(self._device.xp.asarray(~self._array), self._device)

    def __and__(self, y: Other) -> Tensor:
        return compare("bitwise_and", self, y)

    def __or__(self, y: Other) -> Tensor:
        return compare("bitwise_or", self, y)

    def __xor__(self, y: Other) -> Tensor:
        return compare("bitwise_xor", self, y)

    def add(self, other: Other) -> Tensor:
        """self + other."""
        return required(self.__add__(other), "add", other)

    def sub(self, other: Other) -> Tensor:
        """self - other."""
        return required(self.__sub__(other), "sub", other)

    def mul(self, other: Other) -> Tensor:
        """self * other."""
        return required(self.__mul__(other), "mul", other)

    def div(self, other: Other) -> Tensor:
        """self / other; integers divide to float32."""
        return required(self.__truediv__(other), "div", other)

    def pow(self, exponent: Other) -> Tensor:
        """self ** exponent."""
        return required(self.__pow__(exponent), "pow", exponent)

    def eq(self, other: Other) -> Tensor:
        """Elementwise equality, bool."""
        return required(self.__eq__(other), "eq", other)

    def ne(self, other: Other) -> Tensor:
        """Elementwise inequality, bool."""
        return required(self.__ne__(other), "ne", other)

    def maximum(self, other: TensorBase) -> Tensor:
        """The larger of both, elementwise; equal elements share the gradient."""
        return required(binary(choice.maximum, self, other), "maximum", other)

    def minimum(self, other: TensorBase) -> Tensor:
        """The smaller of both, elementwise; equal elements share the gradient."""
        return required(binary(choice.minimum, self, other), "minimum", other)

    def neg(self) -> Tensor:
        """-self."""
        return -self

    def abs(self) -> Tensor:
        """The absolute value."""
        return apply(ops.abs, (self,))

    def exp(self) -> Tensor:
        """e to the power of self."""
        return unary(transcendental.exp, self)

    def log(self) -> Tensor:
        """The natural logarithm."""
        return unary(transcendental.log, self)

    def sqrt(self) -> Tensor:
        """The square root."""
        return unary(transcendental.sqrt, self)

    def tanh(self) -> Tensor:
        """The hyperbolic tangent."""
        return unary(activation.tanh, self)

    def sigmoid(self) -> Tensor:
        """1 / (1 + exp(-self))."""
        return unary(activation.sigmoid, self)

    def relu(self) -> Tensor:
        """max(self, 0)."""
        return apply(activation.relu, (self,))

    def clamp(self, min: float | None = None, max: float | None = None) -> Tensor:
        """self held within [min, max]; either may be left out. Raises: ArgumentError if both are."""
        if min is None and max is None:
            raise ArgumentError("clamp: expected min, max or both")
        x: TensorBase = self
        for bound in (min, max):
            if bound is not None:
                x = convert(x, promote_scalar(x._array.dtype, bound))
        return apply(choice.clamp, (x,), low=min, high=max)
