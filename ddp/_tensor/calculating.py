"""Arithmetic as methods: operators and their named forms; operands are brought to one dtype by `arithmetic`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._tensor.arithmetic import Other, aligned, binary, convert, jointly, required, unary
from ddp._tensor.base import TensorBase, apply
from ddp._tensor.dtypes import is_float
from ddp.errors import ArgumentError, DtypeError
from ddp.ops import elementwise as ops

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor
    from ddp.ops import Op


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
        if self.array.dtype.kind == "b":
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
        if self.array.dtype.kind == "b":
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
        x = convert(self, np.dtype("int64")) if self.array.dtype.kind == "b" else self
        return apply(ops.square, (x,))

    def addcmul(self, tensor1: TensorBase, tensor2: TensorBase, *, value: float = 1) -> Tensor:
        """self + value*tensor1*tensor2; all broadcast."""
        return apply(ops.addcmul, jointly("addcmul", self, tensor1, tensor2), value=value)

    def addcdiv(self, tensor1: TensorBase, tensor2: TensorBase, *, value: float = 1) -> Tensor:
        """self + value*tensor1/tensor2; all broadcast. Raises: DtypeError for integers."""
        xs = jointly("addcdiv", self, tensor1, tensor2)
        if not is_float(xs[0].array.dtype):
            raise DtypeError(f"addcdiv: expected floating tensors, got {xs[0].array.dtype}")
        return apply(ops.addcdiv, xs, value=value)

    def lerp(self, end: TensorBase, weight: Other) -> Tensor:
        """self + weight*(end - self); weight: a number or a tensor. Raises: DtypeError for integers."""
        if isinstance(weight, TensorBase):
            xs: Sequence[Any] = jointly("lerp", self, end, weight)
        else:
            xs = (*jointly("lerp", self, end), float(weight))
        if not is_float(xs[0].array.dtype):
            raise DtypeError(f"lerp: expected floating tensors, got {xs[0].array.dtype}")
        return apply(ops.lerp, xs)


def scaled(op: Op, x: TensorBase, y: Other, alpha: float, swap: bool = False) -> Tensor:
    """x + alpha*y or x - alpha*y; with `swap`, y - alpha*x. Raises: DtypeError for a fractional `alpha` of integers."""
    if alpha == 1:
        return required(binary(op, x, y, swap), op.name, y)
    pair = aligned(x, y, op.name)
    if pair is not None and isinstance(alpha, float) and not is_float(pair[0].array.dtype):
        raise DtypeError(f"{op.name}: alpha={alpha} for a result of {pair[0].array.dtype}: expected an integer")
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
    if not is_float(pair[0].array.dtype):
        divisor = pair[0 if swap else 1]
        if isinstance(divisor, TensorBase):
            zero = divisor._device.type == "cpu" and not divisor.array.all()
        else:
            zero = divisor == 0
        if zero:
            above, below = (y, x) if swap else (x, y)
            raise ArgumentError(
                f"{name}: {getattr(above, 'shape', above)} / {getattr(below, 'shape', below)}, "
                f"of {pair[0].array.dtype}: division by zero"
            )
    return binary(op, *pair, swap, **parameters)
