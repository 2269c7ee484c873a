"""Dropout layers. `inplace` writes the result into the input, as the functions of `functional` do."""

from __future__ import annotations

from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError
from ddp.nn import functional
from ddp.nn._module import Module


class _Dropping(Module):
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ArgumentError(f"{type(self).__name__}: p is a probability, not {p}")
        self.p = p
        self.inplace = inplace

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}"


class Dropout(_Dropping):
    """In training, zeros each element with probability `p` and scales the rest by 1/(1 - p).

    Raises: ArgumentError unless 0 <= p <= 1.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(input, self.p, self.training, self.inplace)


class Dropout1d(_Dropping):
    """As Dropout, but whole channels fall. input: (N, C, L) or (C, L). Raises: ArgumentError, ShapeError."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout1d(input, self.p, self.training, self.inplace)


class Dropout2d(_Dropping):
    """As Dropout, but whole channels fall. input: (N, C, H, W), (N, C, L) or (N, C).

    Raises: ArgumentError, ShapeError.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout2d(input, self.p, self.training, self.inplace)
