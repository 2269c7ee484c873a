"""Arithmetic of tensors: promotion happens here, so that ops see one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._device import place
from ddp._tensor.base import TensorBase, apply, borrowed, wrap
from ddp._tensor.dtypes import DEFAULT, SUPPORTED, is_float, promote, promote_scalar
from ddp.errors import ArgumentError, DdpError, DeviceError, DtypeError, ShapeError
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
    """Raises: ShapeError if the shapes do not broadcast."""
    for i, (m, n) in enumerate(zip(reversed(a), reversed(b), strict=False), 1):
        if m != n and m != 1 and n != 1:
            raise ShapeError(f"{name}: shapes {a} and {b} do not broadcast: {m} and {n} differ in dimension {-i}")


def floating(x: TensorBase) -> TensorBase:
    """`x`, or for integers and bool its float32 form: what exp, mean and kin compute on."""
    return x if is_float(x._array.dtype) else convert(x, DEFAULT)


def unary(op: Op, x: TensorBase, **parameters: Any) -> Tensor:
    """A function that has results between the integers."""
    return apply(op, (floating(x),), **parameters)


def flat_integers(op: Op, x: TensorBase, **parameters: Any) -> Tensor:
    """A function that leaves integers and bool as they are: a copy of these."""
    return apply(op, (x,), **parameters) if is_float(x._array.dtype) else apply(ops.clone, (x,))


def binary(op: Op, x: TensorBase, y: Other, swap: bool = False, floating: bool = False, **parameters: Any) -> Any:
    """op(x, y), or op(y, x) with `swap`; NotImplemented if `y` is nothing to compute with."""
    pair = aligned(x, y, op.name, floating)
    if pair is None:
        return NotImplemented
    try:
        return apply(op, pair[::-1] if swap else pair, **parameters)
    except DdpError:
        raise
    except REFUSED as error:
        raise refusal(op.name, error) from error


def compare(name: str, x: TensorBase, y: Other, swap: bool = False) -> Any:
    """A tensor of bool or integers outside the graph, by the array module's function `name`."""
    pair = aligned(x, y, name)
    if pair is None:
        return NotImplemented
    a, b = pair
    if isinstance(b, TensorBase) and b._device is not a._device:
        raise DeviceError(f"{name}: one tensor is on {a._device}, another on {b._device}")
    xp = x._device.xp
    operands = a._array, b._array if isinstance(b, TensorBase) else b
    try:
        with np.errstate(invalid="ignore"):  # a nan compares
            out = getattr(xp, name)(*(operands[::-1] if swap else operands))
    except REFUSED as error:
        raise refusal(name, error) from error
    return wrap(xp.asarray(out), x._device)


def required(result: Any, name: str, y: Other) -> Tensor:
    """`result` of a named function, where there is no other operand to try."""
    if result is NotImplemented or result is None:
        raise DtypeError(f"{name}: expected a tensor, an array or a number, got {type(y).__name__}")
    return result


def beside(number: Other, x: TensorBase) -> Tensor:
    """A number as a 0-d tensor, in the dtype that it has beside `x`; an array as a tensor."""
    if isinstance(number, np.generic):
        number = number.item()
    if isinstance(number, bool | int | float) and isinstance(x, TensorBase):
        dtype = promote_scalar(x._array.dtype, number)
        try:
            return wrap(x._device.xp.asarray(number, dtype), x._device)
        except REFUSED as error:
            raise refusal("number", error) from error
    return required(adopted(x, number) if isinstance(x, TensorBase) else None, "operand", number)


def jointly(name: str, *tensors: TensorBase) -> list[TensorBase]:
    """The tensors in the dtype of their common result. Raises: ShapeError if they do not broadcast."""
    first = tensors[0]
    dtype, dims, shape = first._array.dtype, first._array.ndim, first._array.shape
    for x in tensors[1:]:
        if not isinstance(x, TensorBase):
            raise DtypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        broadcast(shape, x._array.shape, name)
        shape = np.broadcast_shapes(shape, x._array.shape)
        dtype, dims = promote(dtype, dims, x._array.dtype, x._array.ndim), max(dims, x._array.ndim)
    return [convert(x, dtype) for x in tensors]


class Arithmetic(TensorBase):
    """Elementwise methods; operands broadcast, and results follow PyTorch's promotion rules."""

    __slots__ = ()
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

    def __floordiv__(self, y: Other) -> Tensor:
        return divided(ops.div_rounded, self, y, rounding="floor")

    def __rfloordiv__(self, y: Other) -> Tensor:
        return divided(ops.div_rounded, self, y, swap=True, rounding="floor")

    def __mod__(self, y: Other) -> Tensor:
        return divided(ops.remainder, self, y)

    def __rmod__(self, y: Other) -> Tensor:
        return divided(ops.remainder, self, y, swap=True)

    def __pos__(self) -> Tensor:
        return self.positive()

    def add(self, other: Other, *, alpha: float = 1) -> Tensor:
        """self + alpha*other. Raises: DtypeError for a fractional `alpha` of integers."""
        return scaled(ops.add, self, other, alpha)

    def sub(self, other: Other, *, alpha: float = 1) -> Tensor:
        """self - alpha*other. Raises: DtypeError for bool, or for a fractional `alpha` of integers."""
        return scaled(ops.sub, self, other, alpha)

    subtract = sub

    def rsub(self, other: Other, *, alpha: float = 1) -> Tensor:
        """other - alpha*self."""
        return scaled(ops.sub, self, other, alpha, swap=True)

    def mul(self, other: Other) -> Tensor:
        """self * other."""
        return required(self.__mul__(other), "mul", other)

    multiply = mul

    def div(self, other: Other, *, rounding_mode: str | None = None) -> Tensor:
        """self / other; integers divide to float32. rounding_mode: "trunc" (towards 0) or "floor" keeps integers.

        Raises: ArgumentError for another mode, or where integers are divided by 0.
        """
        if rounding_mode is None:
            return required(self.__truediv__(other), "div", other)
        if rounding_mode not in ("trunc", "floor"):
            raise ArgumentError(f"div: rounding_mode is None, 'trunc' or 'floor', not {rounding_mode!r}")
        return required(divided(ops.div_rounded, self, other, rounding=rounding_mode), "div", other)

    divide = true_divide = div

    def floor_divide(self, other: Other) -> Tensor:
        """floor(self / other); integers stay integers. Raises: ArgumentError where these are divided by 0."""
        return required(self.__floordiv__(other), "floor_divide", other)

    def remainder(self, other: Other) -> Tensor:
        """self - other*floor(self/other), with the sign of `other`: Python's %. Raises: as floor_divide."""
        return required(self.__mod__(other), "remainder", other)

    def fmod(self, other: Other) -> Tensor:
        """self - other*trunc(self/other), with the sign of self: C's fmod. Raises: as floor_divide."""
        return required(divided(ops.fmod, self, other), "fmod", other)

    def pow(self, exponent: Other) -> Tensor:
        """self ** exponent. Raises: ArgumentError for negative exponents of integers."""
        return required(self.__pow__(exponent), "pow", exponent)

    def neg(self) -> Tensor:
        """-self. Raises: DtypeError for bool."""
        return -self

    negative = neg

    def positive(self) -> Tensor:
        """self. Raises: DtypeError for bool."""
        if self._array.dtype.kind == "b":
            raise DtypeError("positive: bool has no sign")
        return self  # type: ignore[return-value]  # every tensor has the mixins

    def abs(self) -> Tensor:
        """The absolute value."""
        return apply(ops.abs, (self,))

    absolute = abs

    def reciprocal(self) -> Tensor:
        """1 / self; of integers float32."""
        return unary(ops.reciprocal, self)

    def square(self) -> Tensor:
        """self * self; of bool int64."""
        x = convert(self, np.dtype("int64")) if self._array.dtype.kind == "b" else self
        return apply(ops.square, (x,))

    def addcmul(self, tensor1: TensorBase, tensor2: TensorBase, *, value: float = 1) -> Tensor:
        """self + value*tensor1*tensor2; all broadcast."""
        return apply(ops.addcmul, jointly("addcmul", self, tensor1, tensor2), value=value)

    def addcdiv(self, tensor1: TensorBase, tensor2: TensorBase, *, value: float = 1) -> Tensor:
        """self + value*tensor1/tensor2; all broadcast. Raises: DtypeError for integers."""
        xs = jointly("addcdiv", self, tensor1, tensor2)
        if not is_float(xs[0]._array.dtype):
            raise DtypeError(f"addcdiv: expected floating tensors, got {xs[0]._array.dtype}")
        return apply(ops.addcdiv, xs, value=value)

    def lerp(self, end: TensorBase, weight: Other) -> Tensor:
        """self + weight*(end - self); weight: a number or a tensor. Raises: DtypeError for integers."""
        if isinstance(weight, TensorBase):
            xs: Sequence[Any] = jointly("lerp", self, end, weight)
        else:
            xs = (*jointly("lerp", self, end), float(weight))
        if not is_float(xs[0]._array.dtype):
            raise DtypeError(f"lerp: expected floating tensors, got {xs[0]._array.dtype}")
        return apply(ops.lerp, xs)


def scaled(op: Op, x: TensorBase, y: Other, alpha: float, swap: bool = False) -> Tensor:
    """x + alpha*y or x - alpha*y; with `swap`, y - alpha*x. Raises: DtypeError for a fractional `alpha` of integers."""
    if alpha == 1:
        return required(binary(op, x, y, swap), op.name, y)
    pair = aligned(x, y, op.name)
    if pair is not None and isinstance(alpha, float) and not is_float(pair[0]._array.dtype):
        raise DtypeError(f"{op.name}: alpha={alpha} for a result of {pair[0]._array.dtype}: expected an integer")
    return required(binary(op, x, y, swap, alpha=alpha), op.name, y)


def divided(op: Op, x: TensorBase, y: Other, swap: bool = False, **parameters: Any) -> Any:
    """op(x, y), which divides, or op(y, x) with `swap`; NotImplemented if `y` is nothing to compute with.

    Raises: ArgumentError where integers are divided by 0. A zero in a tensor on a GPU, which nobody should have to wait
    for, gives what the GPU makes of it.
    """
    name = "div" if op is ops.div_rounded else op.name
    pair = aligned(x, y, name)
    if pair is None:
        return NotImplemented
    if not is_float(pair[0]._array.dtype):
        divisor = pair[0 if swap else 1]
        if isinstance(divisor, TensorBase):
            zero = divisor._device.type == "cpu" and not divisor._array.all()
        else:
            zero = divisor == 0
        if zero:
            above, below = (y, x) if swap else (x, y)
            raise ArgumentError(
                f"{name}: {getattr(above, 'shape', above)} / {getattr(below, 'shape', below)}, "
                f"of {pair[0]._array.dtype}: division by zero"
            )
    return binary(op, *pair, swap, **parameters)
