"""Exponentials, logarithms, roots, trigonometry and rounding as methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp._tensor.arithmetic import Other, binary, flat_integers, required, unary
from ddp._tensor.base import TensorBase, apply
from ddp._tensor.reductions import required_float
from ddp.ops import activation, elementwise, special

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


class Mathematics(TensorBase):
    """Functions of each element. Results that lie between the integers are float32 for integers and bool."""

    __slots__ = ()

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
