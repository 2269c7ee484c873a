"""Complex numbers as pairs of tensors, since no dtype is complex. Fourier transforms and rotations use them."""

from __future__ import annotations

from operator import methodcaller, mul
from typing import Any

from ddp._tensor.base import Tensor

_OF_REAL = "device dim ndim numel requires_grad shape size"
_OF_BOTH = (
    "clone contiguous cpu cuda cumsum detach double expand expand_as flatten flip float index_select "
    "mean movedim narrow permute repeat reshape roll select squeeze sum swapaxes to transpose unflatten unsqueeze "
    "view"
)


class ComplexTensor:
    """Complex numbers real + i*imag, as `ddp.fft`, `ddp.view_as_complex`, `ddp.polar` and `ddp.complex` return them.

    real, imag: tensors of one shape and dtype, through which gradients flow. Complex tensors support +, - and * with
    each other, tensors and numbers, and can be divided by them. They also have `abs`, `angle`, `conj`, indexing, and
    the shape methods and sums of tensors. They are not `Tensor`s: compute everything else from `real` and `imag`. For a
    complex parameter, make a real one of shape (..., 2), and apply `view_as_complex`.
    """

    def __init__(self, real: Tensor, imag: Tensor) -> None:
        self.real: Any = real
        self.imag: Any = imag

    def __getattr__(self, name: str) -> Any:
        if name in _OF_REAL.split():
            return getattr(self.real, name)
        if name in _OF_BOTH.split():
            return lambda *args, **named: ComplexTensor(
                *map(methodcaller(name, *args, **named), (self.real, self.imag))
            )
        raise AttributeError(f"ComplexTensor has no {name}: compute it of its real, imag, abs() or angle()")

    def __getitem__(self, index: Any) -> ComplexTensor:
        return ComplexTensor(self.real[index], self.imag[index])

    def conj(self) -> ComplexTensor:
        """real - i*imag"""
        return ComplexTensor(self.real, -self.imag)

    def abs(self) -> Any:
        """sqrt(real**2 + imag**2), with the gradient 0 at the origin."""
        origin = (self.real == 0) & (self.imag == 0)
        return self.real.masked_fill(origin, 1).hypot(self.imag).masked_fill(origin, 0)

    def angle(self) -> Any:
        """The angle of each number in the complex plane, in radians, in [-pi, pi]."""
        return self.imag.atan2(self.real)

    def __neg__(self) -> ComplexTensor:
        return self * -1

    def __add__(self, other: Any) -> ComplexTensor:
        if isinstance(other, ComplexTensor | complex):
            return ComplexTensor(self.real + other.real, self.imag + other.imag)
        real = self.real + other
        return ComplexTensor(real, self.imag.expand(real.shape))

    def __sub__(self, other: Any) -> ComplexTensor:
        return self + -other

    def __rsub__(self, other: Any) -> ComplexTensor:
        return -self + other

    def __mul__(self, other: Any) -> ComplexTensor:
        return product(mul, self, other)

    def __truediv__(self, other: Any) -> ComplexTensor:
        if isinstance(other, ComplexTensor):
            return self * other.conj() / (other.real**2 + other.imag**2)
        return self * (1 / other)

    __abs__ = abs
    __radd__ = __add__
    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"ComplexTensor(real={self.real}, imag={self.imag})"


def product(multiply: Any, x: Any, y: Any) -> Any:
    """Multiplies complex numbers by means of `multiply`, a product of real tensors; `y` may be real."""
    if not isinstance(y, ComplexTensor | complex):
        return ComplexTensor(multiply(x.real, y), multiply(x.imag, y))
    real = multiply(x.real, y.real) - multiply(x.imag, y.imag)
    return ComplexTensor(real, multiply(x.real, y.imag) + multiply(x.imag, y.real))
