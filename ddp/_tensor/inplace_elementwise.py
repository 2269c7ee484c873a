"""Elementwise methods that write into their tensor, made from the out-of-place ones: `x.exp_()` of `x.exp()`."""

from __future__ import annotations

from typing import Any, TypeVar

from ddp._tensor.arithmetic import Other
from ddp._tensor.base import TensorBase
from ddp._tensor.calculating import Arithmetic
from ddp._tensor.choosing import Choosing
from ddp._tensor.comparing import Comparing
from ddp._tensor.inplace import InPlace, become, followed, in_place, update
from ddp._tensor.mathematics import Mathematics

Self = TypeVar("Self", bound="ElementwiseInPlace")


class ElementwiseInPlace(InPlace):
    """Truths are 1 in the dtype of the tensor; through comparisons, logic and bits no gradient passes.

    Raises, all of them: InplaceError as `InPlace` has it; DtypeError if the result does not fit the dtype, such as a
    floating result in a tensor of integers; ShapeError if an operand would make the tensor larger.
    """

    __slots__ = ()

    neg_ = in_place(Arithmetic.neg, "negative")
    abs_ = in_place(Arithmetic.abs, "absolute")
    square_ = in_place(Arithmetic.square, "square")
    reciprocal_ = in_place(Arithmetic.reciprocal, "reciprocal")
    floor_divide_ = in_place(Arithmetic.floor_divide)
    remainder_ = in_place(Arithmetic.remainder)
    fmod_ = in_place(Arithmetic.fmod)
    lerp_ = in_place(Arithmetic.lerp)
    addcmul_ = in_place(Arithmetic.addcmul)
    addcdiv_ = in_place(Arithmetic.addcdiv)
    exp_ = in_place(Mathematics.exp, "exp")
    exp2_ = in_place(Mathematics.exp2, "exp2")
    expm1_ = in_place(Mathematics.expm1, "expm1")
    log_ = in_place(Mathematics.log, "log")
    log2_ = in_place(Mathematics.log2, "log2")
    log10_ = in_place(Mathematics.log10, "log10")
    log1p_ = in_place(Mathematics.log1p, "log1p")
    sqrt_ = in_place(Mathematics.sqrt, "sqrt")
    sin_ = in_place(Mathematics.sin, "sin")
    cos_ = in_place(Mathematics.cos, "cos")
    tan_ = in_place(Mathematics.tan, "tan")
    asin_ = in_place(Mathematics.asin, "arcsin")
    acos_ = in_place(Mathematics.acos, "arccos")
    atan_ = in_place(Mathematics.atan, "arctan")
    sinh_ = in_place(Mathematics.sinh, "sinh")
    cosh_ = in_place(Mathematics.cosh, "cosh")
    tanh_ = in_place(Mathematics.tanh, "tanh")
    asinh_ = in_place(Mathematics.asinh, "arcsinh")
    acosh_ = in_place(Mathematics.acosh, "arccosh")
    atanh_ = in_place(Mathematics.atanh, "arctanh")
    floor_ = in_place(Mathematics.floor, "floor")
    ceil_ = in_place(Mathematics.ceil, "ceil")
    trunc_ = in_place(Mathematics.trunc, "trunc")
    sign_ = in_place(Mathematics.sign, "sign")
    rsqrt_ = in_place(Mathematics.rsqrt)
    erf_ = in_place(Mathematics.erf)
    erfc_ = in_place(Mathematics.erfc)
    erfinv_ = in_place(Mathematics.erfinv)
    sigmoid_ = in_place(Mathematics.sigmoid)
    frac_ = in_place(Mathematics.frac)
    round_ = in_place(Mathematics.round)
    logit_ = in_place(Mathematics.logit)
    atan2_ = in_place(Mathematics.atan2)
    hypot_ = in_place(Mathematics.hypot)
    xlogy_ = in_place(Mathematics.xlogy)
    relu_ = in_place(Choosing.relu)
    nan_to_num_ = in_place(Choosing.nan_to_num)
    logical_not_ = in_place(Comparing.logical_not)
    bitwise_not_ = in_place(Comparing.bitwise_not)
    logical_and_ = in_place(Comparing.logical_and)
    logical_or_ = in_place(Comparing.logical_or)
    logical_xor_ = in_place(Comparing.logical_xor)
    bitwise_and_ = in_place(Comparing.bitwise_and)
    bitwise_or_ = in_place(Comparing.bitwise_or)
    bitwise_xor_ = in_place(Comparing.bitwise_xor)
    bitwise_left_shift_ = in_place(Comparing.bitwise_left_shift)
    bitwise_right_shift_ = in_place(Comparing.bitwise_right_shift)
    eq_ = in_place(Comparing.eq)
    ne_ = in_place(Comparing.ne)
    lt_ = in_place(Comparing.lt)
    le_ = in_place(Comparing.le)
    gt_ = in_place(Comparing.gt)
    ge_ = in_place(Comparing.ge)

    negative_, absolute_, fix_, arctan2_ = neg_, abs_, trunc_, atan2_
    arcsin_, arccos_, arctan_ = asin_, acos_, atan_
    arcsinh_, arccosh_, arctanh_ = asinh_, acosh_, atanh_
    not_equal_, less_, less_equal_, greater_, greater_equal_ = ne_, lt_, le_, gt_, ge_
    subtract_, multiply_ = InPlace.sub_, InPlace.mul_

    def clamp_(self: Self, min: Other = None, max: Other = None) -> Self:
        """self held within [min, max], numbers or tensors."""
        numbers = not (isinstance(min, TensorBase) or isinstance(max, TensorBase) or (min is None and max is None))
        if numbers and self.array.dtype.kind == "f" and not followed(self, "clamp_"):
            self._device.xp.clip(self.array, min, max, out=self.array)
            self.version.count += 1
            return self
        x: Any = self
        return become(self, "clamp_", x.clamp(min, max))

    clip_ = clamp_

    def clamp_min_(self: Self, min: Other) -> Self:
        """self, at least `min`."""
        return self.clamp_(min=min)

    def clamp_max_(self: Self, max: Other) -> Self:
        """self, at most `max`."""
        return self.clamp_(max=max)

    def div_(self: Self, other: Other, *, rounding_mode: str | None = None) -> Self:
        """self /= other; rounding_mode: "trunc" or "floor"."""
        if rounding_mode is None:
            return super().div_(other)
        x: Any = self
        return become(self, "div_", x.div(other, rounding_mode=rounding_mode))

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
