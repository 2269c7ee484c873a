"""Elementwise methods: arithmetic, exponentials, trigonometry, rounding, choices, comparisons, logic and bits.

Most are made from an op and a docstring. In-place forms are made from the methods, except that `add_`, `sub_`, `mul_`,
`div_` and `pow_` call `update`, which needs no intermediate result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ddp._tensor import operands
from ddp._tensor.base import Tensor, TensorBase, TensorFunction, apply, to_common_device, wrap
from ddp._tensor.dtypes import Number, bfloat16, finfo, is_float, promote_scalar
from ddp._tensor.indexing import broadcast_shape
from ddp._tensor.inplace import assign, both_forms, in_place_forms, update
from ddp._tensor.operands import (
    Other,
    as_method,
    binary,
    check_operand,
    compare,
    operand_as_tensor,
    promote_all,
    promote_pair,
)
from ddp._tensor.reductions import required_float, to_dtype
from ddp.errors import ArgumentError, DtypeError
from ddp.ops import activation, special
from ddp.ops import elementwise as ops
from ddp.ops.op import Op

T = TypeVar("T", bound="Elementwise")
Unary = Callable[[Any], "Tensor"]
Binary = Callable[[Any, Other], "Tensor"]
Comparison = tuple[Binary, Binary, TensorFunction]  # an operator, the method, the in-place form


def unary(op: Op, x: TensorBase, **parameters: Any) -> Tensor:
    """Applies `op`, whose results are floating: integers and bool are converted first."""
    return apply(op, (operands.floating(x),), **parameters)


def rounding(op: Op, x: TensorBase, **parameters: Any) -> Tensor:
    """Applies `op`, which changes only floating numbers; copies integers and bool."""
    return apply(op, (x,), **parameters) if is_float(x.array.dtype) else apply(ops.clone, (x,))


def _operators(run: Callable[..., Any], op: Op, **options: Any) -> tuple[Binary, Binary]:
    """Makes an operator and its reflected form. They apply `op` by `run`: `binary` or `division`."""
    reflected = {**options, "swap": True}
    return lambda self, y: run(op, self, y, **options), lambda self, y: run(op, self, y, **reflected)


def _unary(op: Op, doc: str, run: Callable[..., Any] = unary) -> tuple[Unary, Unary]:
    """Makes the method of a unary op, and its in-place form."""
    return both_forms(as_method(lambda self: run(op, self), op.name, doc))


def _binary(op: Op, doc: str, run: Callable[..., Any] = binary, **options: Any) -> Binary:
    def method(self: TensorBase, other: Other) -> Tensor:
        return check_operand(run(op, self, other, **options), op.name, other)

    return as_method(method, op.name, doc)


def _comparison(name: str, ufunc: str, doc: str) -> Comparison:
    """Makes an operator, the method, and its in-place form. Their results are outside the graph.

    For an operand that is not a tensor, array or number, the operator returns NotImplemented, and the method raises.
    ufunc: the array module's function.
    """

    def method(self: TensorBase, other: Other) -> Tensor:
        return check_operand(compare(ufunc, self, other), name, other)

    return lambda self, y: compare(ufunc, self, y), *both_forms(as_method(method, name, doc))


def _bits(name: str, ufunc: str, doc: str) -> Comparison:
    return _comparison(name, ufunc, f"{doc}, of integers or bool. Raises: DtypeError for floats.")


def _shift(name: str, ufunc: str, doc: str) -> Comparison:
    return _comparison(name, ufunc, f"{doc}, of integers. Raises: DtypeError for floats, and if both are bool.")


def _test(name: str, doc: str) -> Unary:
    """Makes the method `name`, which calls the array module's function of that name and returns bool."""

    def method(self: TensorBase) -> Tensor:
        xp = self._device.xp
        return wrap(xp.asarray(getattr(xp, name)(self.array)), self._device)

    return as_method(method, name, doc)


def _reverse(ufunc: str) -> Binary:
    return lambda self, y: compare(ufunc, self, y, swap=True)


def division(op: Op, x: TensorBase, y: Other, swap: bool = False, **parameters: Any) -> Any:
    """Computes op(x, y), a division, or op(y, x) with `swap`. Returns NotImplemented if `y` is not a number, tensor
    or array.

    Raises: DtypeError if both are bool; ArgumentError if integers are divided by 0. A divisor on a GPU is not checked
    for zeros: the host would have to wait.
    """
    name = "div" if op is ops.div_rounded else op.name
    pair = promote_pair(x, y, name)
    if pair is None:
        return NotImplemented
    divisor: Any = pair[0 if swap else 1]
    if pair[0].array.dtype.kind == "b":
        raise DtypeError(f"{name}: expected numbers, got bool")
    known = not isinstance(divisor, TensorBase) or divisor._device.type == "cpu"
    if known and not is_float(pair[0].array.dtype) and not np.all(getattr(divisor, "array", divisor)):
        above, below = (getattr(operand, "shape", operand) for operand in ((y, x) if swap else (x, y)))
        raise ArgumentError(f"{name}: {above} / {below}, of {pair[0].array.dtype}: division by zero")
    return binary(op, *pair, swap, **parameters)


class Elementwise(TensorBase):
    """Functions of each element; operands broadcast, and results follow PyTorch's promotion rules.

    Functions such as exp convert integers and bool to the default dtype; comparisons return bool. Methods whose names
    end in an underscore write into this tensor: see `ddp._tensor.inplace`.
    """

    __slots__ = ()

    __array_priority__ = 1000  # makes NumPy leave `array + tensor` to the tensor

    __add__, __radd__ = _operators(binary, ops.add)
    __sub__, __rsub__ = _operators(binary, ops.sub)
    __mul__, __rmul__ = _operators(binary, ops.mul)
    __truediv__, __rtruediv__ = _operators(binary, ops.div, floating=True)
    __pow__, __rpow__ = _operators(binary, ops.pow)
    __floordiv__, __rfloordiv__ = _operators(division, ops.div_rounded, rounding="floor")
    __mod__, __rmod__ = _operators(division, ops.remainder)

    def add(self, other: Other, *, alpha: float = 1) -> Tensor:
        """self + alpha*other. Raises: DtypeError for integers or bool with a float `alpha` other than 1."""
        return add_scaled(ops.add, self, other, alpha)

    def sub(self, other: Other, *, alpha: float = 1) -> Tensor:
        """self - alpha*other.

        Raises: DtypeError if both are bool and `alpha` is 1, or for integers or bool with a float `alpha` other than 1.
        """
        return add_scaled(ops.sub, self, other, alpha)

    subtract = sub

    def rsub(self, other: Other, *, alpha: float = 1) -> Tensor:
        """other - alpha*self."""
        return add_scaled(ops.sub, self, other, alpha, swap=True)

    mul = _binary(ops.mul, "self * other.")
    multiply = mul

    def div(self, other: Other, *, rounding_mode: str | None = None) -> Tensor:
        """self / other; integers give the default dtype. rounding_mode: "trunc" (towards 0) or "floor" keeps integers.

        Raises: ArgumentError for another mode, or if a mode is given and integers are divided by 0, except by a tensor
        on a GPU; DtypeError if a mode is given and both are bool.
        """
        if rounding_mode is None:
            return check_operand(binary(ops.div, self, other, floating=True), "div", other)
        if rounding_mode not in ("trunc", "floor"):
            raise ArgumentError(f"div: rounding_mode is None, 'trunc' or 'floor', not {rounding_mode!r}")
        return check_operand(division(ops.div_rounded, self, other, rounding=rounding_mode), "div", other)

    divide = true_divide = div

    def floor_divide(self, other: Other) -> Tensor:
        """floor(self / other); integers stay integers.

        Raises: ArgumentError if integers are divided by 0, except by a tensor on a GPU; DtypeError if both are bool.
        """
        return check_operand(division(ops.div_rounded, self, other, rounding="floor"), "floor_divide", other)

    remainder, remainder_ = both_forms(
        _binary(ops.remainder, "self - other*floor(self/other). Raises: as div.", division)
    )
    fmod, fmod_ = both_forms(_binary(ops.fmod, "self - other*trunc(self/other), as in C. Raises: as div.", division))

    def pow(self, exponent: Other) -> Tensor:
        """self ** exponent.

        Raises: ArgumentError for negative exponents of integers on the CPU. On a GPU such powers are 0, 1 or -1.
        """
        return check_operand(binary(ops.pow, self, exponent), "pow", exponent)

    def neg(self) -> Tensor:
        """-self. Raises: DtypeError for bool."""
        if self.array.dtype.kind == "b":
            raise DtypeError("neg: bool has no negative; use ~")
        return apply(ops.neg, (self,))

    __neg__ = negative = neg

    def positive(self) -> Tensor:
        """self. Raises: DtypeError for bool."""
        if self.array.dtype.kind == "b":
            raise DtypeError("positive: bool has no sign")
        return self  # type: ignore[return-value]  # every tensor has the mixins

    __pos__ = positive

    def abs(self) -> Tensor:
        """The absolute value."""
        return apply(ops.abs, (self,))

    __abs__ = absolute = abs

    reciprocal, reciprocal_ = _unary(ops.reciprocal, "1 / self; integers give the default dtype.")

    def square(self) -> Tensor:
        """self * self; int64 for bool."""
        x = to_dtype(self, "int64") if self.array.dtype.kind == "b" else self
        return apply(ops.square, (x,))

    def addcmul(self, tensor1: TensorBase, tensor2: TensorBase, *, value: float = 1) -> Tensor:
        """self + value*tensor1*tensor2; all broadcast."""
        return apply(ops.addcmul, promote_all("addcmul", self, tensor1, tensor2), value=value)

    def addcdiv(self, tensor1: TensorBase, tensor2: TensorBase, *, value: float = 1) -> Tensor:
        """self + value*tensor1/tensor2; all broadcast.

        Raises: DtypeError for integers, or if an operand is not a tensor; ShapeError if they do not broadcast.
        """
        xs = promote_all("addcdiv", self, tensor1, tensor2)
        required_float(xs[0], "addcdiv")
        return apply(ops.addcdiv, xs, value=value)

    def lerp(self, end: TensorBase, weight: Other) -> Tensor:
        """self + weight*(end - self); weight: a number or a tensor.

        Raises: DtypeError for integers, or if `end` is not a tensor; ShapeError if tensors do not broadcast.
        """
        weights = (weight,) if isinstance(weight, TensorBase) else ()
        xs: Sequence[Any] = promote_all("lerp", self, end, *weights)
        required_float(xs[0], "lerp")
        return apply(ops.lerp, xs if weights else (*xs, float(weight)))

    exp, exp_ = _unary(special.exp, "exp(self): e to the power of each element.")
    exp2, exp2_ = _unary(special.exp2, "2 to the power of each element.")
    expm1, expm1_ = _unary(special.expm1, "exp(self) - 1, without loss near 0.")
    log, log_ = _unary(special.log, "The natural logarithm.")
    log2, log2_ = _unary(special.log2, "The logarithm to base 2.")
    log10, log10_ = _unary(special.log10, "The logarithm to base 10.")
    log1p, log1p_ = _unary(special.log1p, "log(1 + self), without loss near 0.")
    sqrt, sqrt_ = _unary(special.sqrt, "The square root.")
    rsqrt, rsqrt_ = _unary(special.rsqrt, "1 / sqrt(self).")
    sin, sin_ = _unary(special.sin, "The sine; radians.")
    cos, cos_ = _unary(special.cos, "The cosine; radians.")
    tan, tan_ = _unary(special.tan, "The tangent; radians.")
    asin, asin_ = _unary(special.asin, "The inverse of the sine, in [-pi/2, pi/2].")
    acos, acos_ = _unary(special.acos, "The inverse of the cosine, in [0, pi].")
    atan, atan_ = _unary(special.atan, "The inverse of the tangent, in [-pi/2, pi/2].")
    sinh, sinh_ = _unary(special.sinh, "The hyperbolic sine.")
    cosh, cosh_ = _unary(special.cosh, "The hyperbolic cosine.")
    asinh, asinh_ = _unary(special.asinh, "The inverse of the hyperbolic sine.")
    acosh, acosh_ = _unary(special.acosh, "The inverse of the hyperbolic cosine.")
    atanh, atanh_ = _unary(special.atanh, "The inverse of the hyperbolic tangent.")
    erf, erf_ = _unary(special.erf, "2/sqrt(pi) times the integral of exp(-t**2) from 0 to self.")
    erfc, erfc_ = _unary(special.erfc, "1 - erf(self), exact also where it is small.")
    erfinv, erfinv_ = _unary(special.erfinv, "The number whose erf is self.")
    lgamma, lgamma_ = _unary(special.lgamma, "The logarithm of the gamma function's absolute value.")
    digamma, digamma_ = _unary(special.digamma, "The derivative of lgamma.")
    tanh, tanh_ = _unary(activation.tanh, "The hyperbolic tangent.")
    sigmoid, sigmoid_ = _unary(activation.sigmoid, "1 / (1 + exp(-self)).")

    arcsin = asin
    arccos = acos
    arctan = atan
    arcsinh = asinh
    arccosh = acosh
    arctanh = atanh

    def logit(self, eps: float | None = None) -> Tensor:
        """log(self / (1 - self)), the inverse of sigmoid; with `eps`, self is first clamped to [eps, 1 - eps]."""
        return unary(special.logit, self, eps=eps)

    atan2, atan2_ = both_forms(_binary(special.atan2, "The angle of (other, self), in [-pi, pi].", floating=True))
    arctan2 = atan2
    logaddexp = _binary(special.logaddexp, "log(exp(self) + exp(other)), without overflow.", floating=True)
    hypot, hypot_ = both_forms(_binary(special.hypot, "sqrt(self**2 + other**2), without overflow.", floating=True))
    xlogy, xlogy_ = both_forms(_binary(special.xlogy, "self * log(other), 0 where self is 0.", floating=True))

    floor, floor_ = _unary(ops.floor, "The largest integer that is not larger; integers stay.", rounding)
    ceil, ceil_ = _unary(ops.ceil, "The smallest integer that is not smaller; integers stay.", rounding)
    trunc, trunc_ = _unary(ops.trunc, "The integer next to it towards 0; integers stay.", rounding)
    fix = trunc

    def round(self, *, decimals: int = 0) -> Tensor:
        """Rounds to `decimals` decimal places, halves to even. Integers stay."""
        return rounding(ops.round, self, decimals=decimals)

    def frac(self) -> Tensor:
        """The fractional part: self - trunc(self). Raises: DtypeError unless floating."""
        return apply(ops.frac, (required_float(self, "frac"),))

    def sign(self) -> Tensor:
        """The sign: -1, 0 or 1; bool is unchanged."""
        return self.clone() if self.array.dtype.kind == "b" else apply(ops.sign, (self,))  # type: ignore[attr-defined]  # every tensor has the mixins

    maximum = _binary(ops.maximum, "The larger of both, nan if one is; equal elements share the gradient.")
    minimum = _binary(ops.minimum, "The smaller of both, nan if one is; equal elements share the gradient.")
    fmax = _binary(ops.fmax, "The larger of both, of a number and nan the number.")
    fmin = _binary(ops.fmin, "The smaller of both, of a number and nan the number.")

    def clamp(self, min: Other = None, max: Other = None) -> Tensor:
        """Limits self to [min, max], numbers or tensors; where min > max, the result is max. Either may be left out.

        Raises: ArgumentError if both are left out; ShapeError if tensors do not broadcast; DtypeError if a bound is not
        a number, a tensor or an array.
        """
        if min is None and max is None:
            raise ArgumentError("clamp: expected min, max or both")
        bounds = [bound for bound in (min, max) if bound is not None]
        if not all(isinstance(bound, Number) for bound in bounds):
            x, *limits = promote_all("clamp", self, *[operand_as_tensor(bound, self, "clamp") for bound in bounds])
            low = None if min is None else limits[0]
            high = None if max is None else limits[-1]
            return apply(ops.clamp_between, (x, low, high))
        dtype = self.array.dtype
        for bound in bounds:
            dtype = promote_scalar(dtype, bound)
        return apply(ops.clamp, (to_dtype(self, dtype),), low=min, high=max)

    clip = clamp

    def clamp_min(self, min: Other) -> Tensor:
        """self, at least `min`."""
        return self.clamp(min=min)

    def clamp_max(self, max: Other) -> Tensor:
        """self, at most `max`."""
        return self.clamp(max=max)

    def where(self, condition: TensorBase, other: Other) -> Tensor:
        """self where `condition` (bool) holds, else `other`."""
        return select_where(condition, self, other)

    def nan_to_num(self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
        """Replaces nan and infinities by numbers: by default 0, and the largest and the lowest number of the dtype."""
        if not is_float(self.array.dtype):
            return self.clone()  # type: ignore[attr-defined]  # every tensor has the mixins
        bounds = finfo(self.array.dtype)
        return apply(
            ops.nan_to_num,
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

    __hash__ = object.__hash__  # by identity, since == is elementwise

    __eq__, eq, eq_ = _comparison("eq", "equal", "self == other, bool.")  # type: ignore[assignment]  # elementwise
    __ne__, ne, ne_ = _comparison("ne", "not_equal", "self != other, bool.")  # type: ignore[assignment]  # elementwise
    __lt__, lt, lt_ = _comparison("lt", "less", "self < other, bool.")
    __le__, le, le_ = _comparison("le", "less_equal", "self <= other, bool.")
    __gt__, gt, gt_ = _comparison("gt", "greater", "self > other, bool.")
    __ge__, ge, ge_ = _comparison("ge", "greater_equal", "self >= other, bool.")
    not_equal = ne
    less = lt
    less_equal = le
    greater = gt
    greater_equal = ge
    not_equal_ = ne_
    less_ = lt_
    less_equal_ = le_
    greater_ = gt_
    greater_equal_ = ge_

    logical_and, logical_and_ = _comparison("logical_and", "logical_and", "`and` of the truths of both, bool.")[1:]
    logical_or, logical_or_ = _comparison("logical_or", "logical_or", "`or` of the truths of both, bool.")[1:]
    logical_xor, logical_xor_ = _comparison("logical_xor", "logical_xor", "`xor` of the truths of both, bool.")[1:]
    logical_not, logical_not_ = both_forms(_test("logical_not", "Whether each element is zero, bool."))

    __and__, bitwise_and, bitwise_and_ = _bits("bitwise_and", "bitwise_and", "`and` of the bits")
    __or__, bitwise_or, bitwise_or_ = _bits("bitwise_or", "bitwise_or", "`or` of the bits")
    __xor__, bitwise_xor, bitwise_xor_ = _bits("bitwise_xor", "bitwise_xor", "`xor` of the bits")
    __lshift__, bitwise_left_shift, bitwise_left_shift_ = _shift("bitwise_left_shift", "left_shift", "self << other")
    __rshift__, bitwise_right_shift, bitwise_right_shift_ = _shift(
        "bitwise_right_shift", "right_shift", "self >> other"
    )
    __rand__ = __and__
    __ror__ = __or__
    __rxor__ = __xor__
    __rlshift__ = _reverse("left_shift")
    __rrshift__ = _reverse("right_shift")

    def bitwise_not(self) -> Tensor:
        """The bits of integers or bool inverted. Raises: DtypeError for floats."""
        if is_float(self.array.dtype):
            raise DtypeError(f"invert: expected integers or bool, got {self.array.dtype}")
        return wrap(self._device.xp.asarray(~self.array), self._device)

    __invert__ = bitwise_not

    isnan = _test("isnan", "Whether each element is nan, bool.")
    isinf = _test("isinf", "Whether each element is infinite, bool.")
    isfinite = _test("isfinite", "Whether each element is neither infinite nor nan, bool.")

    def equal(self, other: TensorBase) -> bool:
        """Whether both have the same shape and equal elements."""
        return self.array.shape == other.array.shape and bool(self.eq(other).array.all())

    def isclose(self, other: Other, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
        """Whether |self - other| <= atol + rtol*|other|, or both are equal, bool; equal_nan: nan equals nan.

        Raises: ShapeError if they do not broadcast; DtypeError if `other` is not a number, tensor or array; DeviceError
        if it is on another device, unless one of the two is a 0-d tensor on the CPU.
        """
        pair = promote_all("isclose", self, operand_as_tensor(other, self, "isclose"))
        x, y = pair if pair[0]._device is pair[1]._device else to_common_device("isclose", pair)
        xp = x._device.xp
        a = x.array
        b = y.array
        if not is_float(a.dtype) or a.dtype == bfloat16:
            # A difference of unsigned integers would wrap around; float64 represents every bfloat16 exactly.
            a = xp.asarray(a, "float64")
            b = xp.asarray(b, "float64")
        return wrap(xp.asarray(xp.isclose(a, b, rtol, atol, equal_nan)), x._device)

    def allclose(self, other: Other, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
        """Whether isclose holds everywhere."""
        return bool(self.isclose(other, rtol, atol, equal_nan).array.all())

    def add_(self: T, other: Other, alpha: float = 1) -> T:
        """self += alpha * other."""
        return update(self, "add_", operator.add, "add", other if alpha == 1 else other * alpha)

    def sub_(self: T, other: Other, alpha: float = 1) -> T:
        """self -= alpha * other."""
        return update(self, "sub_", operator.sub, "subtract", other if alpha == 1 else other * alpha)

    def mul_(self: T, other: Other) -> T:
        """self *= other."""
        return update(self, "mul_", operator.mul, "multiply", other)

    def div_(self: T, other: Other, *, rounding_mode: str | None = None) -> T:
        """self /= other; rounding_mode: "trunc" or "floor"."""
        if rounding_mode is None:
            return update(self, "div_", operator.truediv, "true_divide", other)
        return assign(self, "div_", self.div(other, rounding_mode=rounding_mode))

    def pow_(self: T, exponent: Other) -> T:
        """self **= exponent."""
        return update(self, "pow_", operator.pow, "power", exponent)

    floor_divide_, lerp_, addcmul_, addcdiv_ = in_place_forms(floor_divide, lerp, addcmul, addcdiv)
    neg_, abs_, square_, sign_, frac_, round_ = in_place_forms(neg, abs, square, sign, frac, round)
    logit_, relu_, nan_to_num_, bitwise_not_ = in_place_forms(logit, relu, nan_to_num, bitwise_not)
    clamp_, clamp_min_, clamp_max_ = in_place_forms(clamp, clamp_min, clamp_max)

    negative_ = neg_
    absolute_ = abs_
    fix_ = trunc_
    arctan2_ = atan2_
    clip_ = clamp_
    arcsin_ = asin_
    arccos_ = acos_
    arctan_ = atan_
    arcsinh_ = asinh_
    arccosh_ = acosh_
    arctanh_ = atanh_
    subtract_ = sub_
    multiply_ = mul_
    divide_ = div_
    true_divide_ = div_
    __iadd__ = add_
    __isub__ = sub_
    __imul__ = mul_
    __itruediv__ = div_
    __ipow__ = pow_
    __ifloordiv__ = floor_divide_
    __imod__ = remainder_
    __iand__ = bitwise_and_
    __ior__ = bitwise_or_
    __ixor__ = bitwise_xor_
    __ilshift__ = bitwise_left_shift_
    __irshift__ = bitwise_right_shift_


for _name, _function in vars(Elementwise).items():
    if getattr(_function, "__name__", "") == "<lambda>":  # an operator: it was made without its name
        as_method(_function, _name, None)


def add_scaled(op: Op, x: TensorBase, y: Other, alpha: float, swap: bool = False) -> Tensor:
    """x + alpha*y or x - alpha*y; with `swap`, y - alpha*x.

    Raises: DtypeError for integers or bool with a float `alpha` other than 1, or if `y` is not a number, tensor or
    array.
    """
    if alpha == 1:
        return check_operand(binary(op, x, y, swap), op.name, y)
    pair = promote_pair(x, y, op.name)
    if pair is not None and isinstance(alpha, float) and not is_float(pair[0].array.dtype):
        raise DtypeError(f"{op.name}: alpha={alpha} for a result of {pair[0].array.dtype}: expected an integer")
    return check_operand(binary(op, x, y, swap, alpha=alpha), op.name, y)


def select_where(condition: TensorBase, input: Any, other: Any) -> Tensor:
    """`input` where `condition` is True, else `other`; both are tensors or numbers.

    Raises: DtypeError if the condition is not bool, or a value is neither a tensor, an array nor a number; ShapeError
    if the three do not broadcast.
    """
    if condition.array.dtype.kind != "b":
        raise DtypeError(f"where: the condition is bool, not {condition.array.dtype}")
    like = next((x for x in (input, other) if isinstance(x, TensorBase)), condition)
    values = [operand_as_tensor(x, like, "where") for x in (input, other)]
    pair = promote_all("where", *values)
    broadcast_shape("where", condition.array.shape, *[x.array.shape for x in pair])
    return apply(ops.where, (condition, *pair))
