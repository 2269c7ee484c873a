"""Elementwise methods: arithmetic, exponentials, trigonometry, rounding, choices, comparisons, logic and bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._tensor.base import TensorBase, apply, together, wrap
from ddp._tensor.dtypes import bfloat16, finfo, is_float, promote_scalar
from ddp._tensor.operands import (
    Other,
    binary,
    broadcast,
    compare,
    convert,
    flat_integers,
    number_as_tensor,
    promote_all,
    promote_pair,
    required,
    unary,
)
from ddp._tensor.reductions import required_float
from ddp.errors import ArgumentError, DtypeError
from ddp.ops import activation, elementwise, special
from ddp.ops import elementwise as ops

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor
    from ddp.ops import Op


class Elementwise(TensorBase):
    """Functions of each element; operands broadcast, and results follow PyTorch's promotion rules.

    Results that lie between the integers are float32 for integers and bool; those of comparisons are bool.
    """

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
        return apply(ops.addcmul, promote_all("addcmul", self, tensor1, tensor2), value=value)

    def addcdiv(self, tensor1: TensorBase, tensor2: TensorBase, *, value: float = 1) -> Tensor:
        """self + value*tensor1/tensor2; all broadcast. Raises: DtypeError for integers."""
        xs = promote_all("addcdiv", self, tensor1, tensor2)
        if not is_float(xs[0].array.dtype):
            raise DtypeError(f"addcdiv: expected floating tensors, got {xs[0].array.dtype}")
        return apply(ops.addcdiv, xs, value=value)

    def lerp(self, end: TensorBase, weight: Other) -> Tensor:
        """self + weight*(end - self); weight: a number or a tensor. Raises: DtypeError for integers."""
        if isinstance(weight, TensorBase):
            xs: Sequence[Any] = promote_all("lerp", self, end, weight)
        else:
            xs = (*promote_all("lerp", self, end), float(weight))
        if not is_float(xs[0].array.dtype):
            raise DtypeError(f"lerp: expected floating tensors, got {xs[0].array.dtype}")
        return apply(ops.lerp, xs)

    def exp(self) -> Tensor:
        """exp(self): e to the power of each element."""
        return unary(special.exp, self)

    def exp2(self) -> Tensor:
        """2 to the power of each element."""
        return unary(special.exp2, self)

    def expm1(self) -> Tensor:
        """exp(self) - 1, without loss near 0."""
        return unary(special.expm1, self)

    def log(self) -> Tensor:
        """The natural logarithm."""
        return unary(special.log, self)

    def log2(self) -> Tensor:
        """The logarithm to base 2."""
        return unary(special.log2, self)

    def log10(self) -> Tensor:
        """The logarithm to base 10."""
        return unary(special.log10, self)

    def log1p(self) -> Tensor:
        """log(1 + self), without loss near 0."""
        return unary(special.log1p, self)

    def sqrt(self) -> Tensor:
        """The square root."""
        return unary(special.sqrt, self)

    def rsqrt(self) -> Tensor:
        """1 / sqrt(self)."""
        return unary(special.rsqrt, self)

    def sin(self) -> Tensor:
        """The sine; radians."""
        return unary(special.sin, self)

    def cos(self) -> Tensor:
        """The cosine; radians."""
        return unary(special.cos, self)

    def tan(self) -> Tensor:
        """The tangent; radians."""
        return unary(special.tan, self)

    def asin(self) -> Tensor:
        """The inverse of the sine, in [-pi/2, pi/2]."""
        return unary(special.asin, self)

    def acos(self) -> Tensor:
        """The inverse of the cosine, in [0, pi]."""
        return unary(special.acos, self)

    def atan(self) -> Tensor:
        """The inverse of the tangent, in [-pi/2, pi/2]."""
        return unary(special.atan, self)

    def sinh(self) -> Tensor:
        """The hyperbolic sine."""
        return unary(special.sinh, self)

    def cosh(self) -> Tensor:
        """The hyperbolic cosine."""
        return unary(special.cosh, self)

    def asinh(self) -> Tensor:
        """The inverse of the hyperbolic sine."""
        return unary(special.asinh, self)

    def acosh(self) -> Tensor:
        """The inverse of the hyperbolic cosine."""
        return unary(special.acosh, self)

    def atanh(self) -> Tensor:
        """The inverse of the hyperbolic tangent."""
        return unary(special.atanh, self)

    def erf(self) -> Tensor:
        """2/sqrt(pi) times the integral of exp(-t**2) from 0 to self."""
        return unary(special.erf, self)

    def erfc(self) -> Tensor:
        """1 - erf(self), exact also where it is small."""
        return unary(special.erfc, self)

    def erfinv(self) -> Tensor:
        """The number whose erf is self."""
        return unary(special.erfinv, self)

    def tanh(self) -> Tensor:
        """The hyperbolic tangent."""
        return unary(activation.tanh, self)

    def sigmoid(self) -> Tensor:
        """1 / (1 + exp(-self))."""
        return unary(activation.sigmoid, self)

    arcsin, arccos, arctan = asin, acos, atan
    arcsinh, arccosh, arctanh = asinh, acosh, atanh

    def logit(self, eps: float | None = None) -> Tensor:
        """log(self / (1 - self)), the inverse of sigmoid; with `eps`, self is held within [eps, 1 - eps] before."""
        return unary(special.logit, self, eps=eps)

    def atan2(self, other: Other) -> Tensor:
        """The angle of the point (other, self), in [-pi, pi]."""
        return required(binary(special.atan2, self, other, floating=True), "atan2", other)

    arctan2 = atan2

    def logaddexp(self, other: Other) -> Tensor:
        """log(exp(self) + exp(other)), without overflow."""
        return required(binary(special.logaddexp, self, other, floating=True), "logaddexp", other)

    def hypot(self, other: Other) -> Tensor:
        """sqrt(self**2 + other**2), without overflow."""
        return required(binary(special.hypot, self, other, floating=True), "hypot", other)

    def xlogy(self, other: Other) -> Tensor:
        """self * log(other), 0 where self is 0."""
        return required(binary(special.xlogy, self, other, floating=True), "xlogy", other)

    def floor(self) -> Tensor:
        """The largest integer that is not larger; integers stay."""
        return flat_integers(elementwise.floor, self)

    def ceil(self) -> Tensor:
        """The smallest integer that is not smaller; integers stay."""
        return flat_integers(elementwise.ceil, self)

    def trunc(self) -> Tensor:
        """The integer next to it towards 0; integers stay."""
        return flat_integers(elementwise.trunc, self)

    fix = trunc

    def round(self, *, decimals: int = 0) -> Tensor:
        """The nearest number of so many decimals, of two the even one; integers stay."""
        return flat_integers(elementwise.round, self, decimals=decimals)

    def frac(self) -> Tensor:
        """What trunc takes away. Raises: DtypeError unless floating."""
        return apply(elementwise.frac, (required_float(self, "frac"),))

    def sign(self) -> Tensor:
        """-1, 0 or 1; bool stays."""
        return self.clone() if self.array.dtype.kind == "b" else apply(elementwise.sign, (self,))  # type: ignore[attr-defined]  # every tensor has the mixins

    def maximum(self, other: TensorBase) -> Tensor:
        """The larger of both, nan if one is; equal elements share the gradient."""
        return required(binary(elementwise.maximum, self, other), "maximum", other)

    def minimum(self, other: TensorBase) -> Tensor:
        """The smaller of both, nan if one is; equal elements share the gradient."""
        return required(binary(elementwise.minimum, self, other), "minimum", other)

    def fmax(self, other: TensorBase) -> Tensor:
        """The larger of both, of a number and nan the number."""
        return required(binary(elementwise.fmax, self, other), "fmax", other)

    def fmin(self, other: TensorBase) -> Tensor:
        """The smaller of both, of a number and nan the number."""
        return required(binary(elementwise.fmin, self, other), "fmin", other)

    def clamp(self, min: Other = None, max: Other = None) -> Tensor:
        """self held within [min, max], numbers or tensors; where min > max, it is max. Either may be left out.

        Raises: ArgumentError if both are; ShapeError if tensors do not broadcast.
        """
        if min is None and max is None:
            raise ArgumentError("clamp: expected min, max or both")
        if isinstance(min, TensorBase) or isinstance(max, TensorBase):
            bounds = [
                each if each is None or isinstance(each, TensorBase) else number_as_tensor(each, self)
                for each in (min, max)
            ]
            found = iter(promote_all("clamp", self, *[each for each in bounds if each is not None]))
            x = next(found)
            return apply(elementwise.clamp_between, (x, *[None if each is None else next(found) for each in bounds]))
        x = self
        for bound in (min, max):
            if bound is not None:
                x = convert(x, promote_scalar(x.array.dtype, bound))
        return apply(elementwise.clamp, (x,), low=min, high=max)

    clip = clamp

    def clamp_min(self, min: Other) -> Tensor:
        """self, at least `min`."""
        return self.clamp(min=min)

    def clamp_max(self, max: Other) -> Tensor:
        """self, at most `max`."""
        return self.clamp(max=max)

    def where(self, condition: TensorBase, other: Other) -> Tensor:
        """self where `condition` (bool) holds, else `other`."""
        return chosen(condition, self, other)

    def nan_to_num(self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
        """Numbers in place of nan and infinities: by default 0, and the largest and smallest of the dtype."""
        if not is_float(self.array.dtype):
            return self.clone()  # type: ignore[attr-defined]  # every tensor has the mixins
        bounds = finfo(self.array.dtype)
        return apply(
            elementwise.nan_to_num,
            (self,),
            nan=nan,
            posinf=float(bounds.max) if posinf is None else posinf,
            neginf=float(bounds.min) if neginf is None else neginf,
        )

    def relu(self) -> Tensor:
        """max(self, 0). Raises: DtypeError for bool."""
        if self.array.dtype.kind == "b":
            raise DtypeError("relu: expected numbers, got bool")
        return apply(activation.relu, (self,))

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
        pair = promote_pair(self, other, "isclose")
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


def scaled(op: Op, x: TensorBase, y: Other, alpha: float, swap: bool = False) -> Tensor:
    """x + alpha*y or x - alpha*y; with `swap`, y - alpha*x. Raises: DtypeError for a fractional `alpha` of integers."""
    if alpha == 1:
        return required(binary(op, x, y, swap), op.name, y)
    pair = promote_pair(x, y, op.name)
    if pair is not None and isinstance(alpha, float) and not is_float(pair[0].array.dtype):
        raise DtypeError(f"{op.name}: alpha={alpha} for a result of {pair[0].array.dtype}: expected an integer")
    return required(binary(op, x, y, swap, alpha=alpha), op.name, y)


def divided(op: Op, x: TensorBase, y: Other, swap: bool = False, **parameters: Any) -> Any:
    """op(x, y), which divides, or op(y, x) with `swap`; NotImplemented if `y` is nothing to compute with.

    Raises: ArgumentError where integers are divided by 0. A zero in a tensor on a GPU, which nobody should have to wait
    for, gives what the GPU makes of it.
    """
    name = "div" if op is ops.div_rounded else op.name
    pair = promote_pair(x, y, name)
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


def chosen(condition: TensorBase, input: Any, other: Any) -> Tensor:
    """`input` where `condition`, else `other`: tensors or numbers. Raises: DtypeError, ShapeError."""
    if condition.array.dtype.kind != "b":
        raise DtypeError(f"where: the condition is bool, not {condition.array.dtype}")
    values = [input, other]
    for i, each in enumerate(values):
        if not isinstance(each, TensorBase):
            values[i] = number_as_tensor(each, values[1 - i] if isinstance(values[1 - i], TensorBase) else condition)
    pair = promote_all("where", *values)
    for x in pair:
        broadcast(condition.array.shape, x.array.shape, "where")
    return apply(elementwise.where, (condition, *pair))
