"""Elementwise functions that write into their tensor: `x.exp_()` is exp in the memory of x.

Where autograd need not follow, the array module writes its result straight into that memory.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from ddp._tensor.arithmetic import Other
from ddp._tensor.base import TensorBase
from ddp._tensor.inplace import InPlace, become, followed, update
from ddp._tensor.inplace_logic import LogicInPlace, computed
from ddp._tensor.watching import placed

Self = TypeVar("Self", bound="ElementwiseInPlace")


@placed
def _direct(x: Self, name: str, ufunc: str) -> Self:
    """x = x.NAME() in the memory of `x`."""
    array = x.array
    if array.dtype.kind != "f" or followed(x, f"{name}_"):
        return become(x, f"{name}_", getattr(x, name)())
    with np.errstate(all="ignore"):
        getattr(x._device.xp, ufunc)(array, out=array)
    x.version.count += 1
    return x


class ElementwiseInPlace(LogicInPlace):
    """Raises, all of them: InplaceError as `InPlace` has it; DtypeError if the result does not fit the dtype, such as
    a floating result in a tensor of integers; ShapeError if an operand would make the tensor larger.
    """

    __slots__ = ()

    def neg_(self: Self) -> Self:
        """-self."""
        return _direct(self, "neg", "negative")

    def abs_(self: Self) -> Self:
        """The absolute value."""
        return _direct(self, "abs", "absolute")

    def square_(self: Self) -> Self:
        """self * self."""
        return _direct(self, "square", "square")

    def exp_(self: Self) -> Self:
        """e to the power of each element."""
        return _direct(self, "exp", "exp")

    def exp2_(self: Self) -> Self:
        """2 to the power of each element."""
        return _direct(self, "exp2", "exp2")

    def expm1_(self: Self) -> Self:
        """exp(self) - 1."""
        return _direct(self, "expm1", "expm1")

    def log_(self: Self) -> Self:
        """The natural logarithm."""
        return _direct(self, "log", "log")

    def log2_(self: Self) -> Self:
        """The logarithm to base 2."""
        return _direct(self, "log2", "log2")

    def log10_(self: Self) -> Self:
        """The logarithm to base 10."""
        return _direct(self, "log10", "log10")

    def log1p_(self: Self) -> Self:
        """log(1 + self)."""
        return _direct(self, "log1p", "log1p")

    def sqrt_(self: Self) -> Self:
        """The square root."""
        return _direct(self, "sqrt", "sqrt")

    def sin_(self: Self) -> Self:
        """The sine."""
        return _direct(self, "sin", "sin")

    def cos_(self: Self) -> Self:
        """The cosine."""
        return _direct(self, "cos", "cos")

    def tan_(self: Self) -> Self:
        """The tangent."""
        return _direct(self, "tan", "tan")

    def asin_(self: Self) -> Self:
        """The inverse of the sine."""
        return _direct(self, "asin", "arcsin")

    def acos_(self: Self) -> Self:
        """The inverse of the cosine."""
        return _direct(self, "acos", "arccos")

    def atan_(self: Self) -> Self:
        """The inverse of the tangent."""
        return _direct(self, "atan", "arctan")

    def sinh_(self: Self) -> Self:
        """The hyperbolic sine."""
        return _direct(self, "sinh", "sinh")

    def cosh_(self: Self) -> Self:
        """The hyperbolic cosine."""
        return _direct(self, "cosh", "cosh")

    def tanh_(self: Self) -> Self:
        """The hyperbolic tangent."""
        return _direct(self, "tanh", "tanh")

    def asinh_(self: Self) -> Self:
        """The inverse of the hyperbolic sine."""
        return _direct(self, "asinh", "arcsinh")

    def acosh_(self: Self) -> Self:
        """The inverse of the hyperbolic cosine."""
        return _direct(self, "acosh", "arccosh")

    def atanh_(self: Self) -> Self:
        """The inverse of the hyperbolic tangent."""
        return _direct(self, "atanh", "arctanh")

    def floor_(self: Self) -> Self:
        """The largest integer that is not larger."""
        return _direct(self, "floor", "floor")

    def ceil_(self: Self) -> Self:
        """The smallest integer that is not smaller."""
        return _direct(self, "ceil", "ceil")

    def trunc_(self: Self) -> Self:
        """The integer next to it towards 0."""
        return _direct(self, "trunc", "trunc")

    def sign_(self: Self) -> Self:
        """-1, 0 or 1."""
        return _direct(self, "sign", "sign")

    def reciprocal_(self: Self) -> Self:
        """1 / self."""
        return _direct(self, "reciprocal", "reciprocal")

    def rsqrt_(self: Self) -> Self:
        """1 / sqrt(self)."""
        return computed(self, "rsqrt")

    def erf_(self: Self) -> Self:
        """The error function."""
        return computed(self, "erf")

    def erfc_(self: Self) -> Self:
        """1 - erf(self)."""
        return computed(self, "erfc")

    def erfinv_(self: Self) -> Self:
        """The number whose erf is self."""
        return computed(self, "erfinv")

    def sigmoid_(self: Self) -> Self:
        """1 / (1 + exp(-self))."""
        return computed(self, "sigmoid")

    def relu_(self: Self) -> Self:
        """max(self, 0)."""
        return computed(self, "relu")

    def frac_(self: Self) -> Self:
        """What trunc takes away."""
        return computed(self, "frac")

    negative_, absolute_ = neg_, abs_
    arcsin_, arccos_, arctan_ = asin_, acos_, atan_
    arcsinh_, arccosh_, arctanh_ = asinh_, acosh_, atanh_
    fix_ = trunc_

    def round_(self: Self, *, decimals: int = 0) -> Self:
        """The nearest number of so many decimals, of two the even one."""
        return computed(self, "round", decimals=decimals)

    def logit_(self: Self, eps: float | None = None) -> Self:
        """log(self / (1 - self))."""
        return computed(self, "logit", eps)

    def nan_to_num_(self: Self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Self:
        """Numbers in place of nan and infinities."""
        return computed(self, "nan_to_num", nan, posinf, neginf)

    @placed
    def clamp_(self: Self, min: Other = None, max: Other = None) -> Self:
        """self held within [min, max], numbers or tensors."""
        numbers = not (isinstance(min, TensorBase) or isinstance(max, TensorBase) or (min is None and max is None))
        if numbers and self.array.dtype.kind == "f" and not followed(self, "clamp_"):
            self._device.xp.clip(self.array, min, max, out=self.array)
            self.version.count += 1
            return self
        return computed(self, "clamp", min, max)

    clip_ = clamp_

    def clamp_min_(self: Self, min: Other) -> Self:
        """self, at least `min`."""
        return self.clamp_(min=min)

    def clamp_max_(self: Self, max: Other) -> Self:
        """self, at most `max`."""
        return self.clamp_(max=max)

    subtract_, multiply_ = InPlace.sub_, InPlace.mul_

    def div_(self: Self, other: Other, *, rounding_mode: str | None = None) -> Self:
        """self /= other; rounding_mode: "trunc" or "floor"."""
        if rounding_mode is None:
            return super().div_(other)
        return computed(self, "div", other, rounding_mode=rounding_mode)

    divide_ = true_divide_ = div_

    def pow_(self: Self, exponent: Other) -> Self:
        """self **= exponent."""
        return update(self, "pow_", lambda x, y: x**y, "power", exponent)

    def __ipow__(self: Self, exponent: Other) -> Self:
        return self.pow_(exponent)

    def __ifloordiv__(self: Self, other: Other) -> Self:
        return self.floor_divide_(other)

    def __imod__(self: Self, other: Other) -> Self:
        return self.remainder_(other)

    def floor_divide_(self: Self, other: Other) -> Self:
        """self //= other."""
        return computed(self, "floor_divide", other)

    def remainder_(self: Self, other: Other) -> Self:
        """self %= other."""
        return computed(self, "remainder", other)

    def fmod_(self: Self, other: Other) -> Self:
        """fmod(self, other)."""
        return computed(self, "fmod", other)

    def atan2_(self: Self, other: Other) -> Self:
        """The angle of the point (other, self)."""
        return computed(self, "atan2", other)

    arctan2_ = atan2_

    def hypot_(self: Self, other: Other) -> Self:
        """sqrt(self**2 + other**2)."""
        return computed(self, "hypot", other)

    def xlogy_(self: Self, other: Other) -> Self:
        """self * log(other)."""
        return computed(self, "xlogy", other)

    def lerp_(self: Self, end: TensorBase, weight: Other) -> Self:
        """self + weight*(end - self)."""
        return computed(self, "lerp", end, weight)

    def addcmul_(self: Self, tensor1: TensorBase, tensor2: TensorBase, *, value: float = 1) -> Self:
        """self + value*tensor1*tensor2."""
        return computed(self, "addcmul", tensor1, tensor2, value=value)

    def addcdiv_(self: Self, tensor1: TensorBase, tensor2: TensorBase, *, value: float = 1) -> Self:
        """self + value*tensor1/tensor2."""
        return computed(self, "addcdiv", tensor1, tensor2, value=value)
