"""Dropout. `inplace` writes the result into the input."""

from __future__ import annotations

from ddp._device import generator
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.inplace import assign
from ddp._tensor.reductions import required_float
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.module import Layer
from ddp.ops import activation


def _dropout(name: str, input: Tensor, p: float, training: bool, inplace: bool, shape: tuple[int, ...]) -> Tensor:
    if not 0 <= p <= 1:
        raise ArgumentError(f"{name}: p is a probability, not {p}")
    if not training or p == 0:
        return input
    required_float(input, name)
    result = apply(activation.dropout, (input,), p=p, shape=shape, generator=generator(input.device))
    return assign(input, f"{name}_", result) if inplace else result


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeros each element with probability `p` and scales the rest by 1/(1 - p).

    Returns the input itself if `training` is False or p is 0.

    Raises: ArgumentError unless 0 <= p <= 1; DtypeError for an input that is not floating, in training with p above 0.
    Source: Srivastava et al. 2014, JMLR 15, 1929-1958.
    """
    return _dropout("dropout", input, p, training, inplace, input.shape)


def dropout1d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As dropout, but zeros whole channels. input: (N, C, L) or (C, L).

    Raises: ArgumentError, DtypeError, ShapeError.
    """
    if input.ndim not in (2, 3):
        raise ShapeError(f"dropout1d: input {tuple(input.shape)}: expected (N, C, L) or (C, L)")
    return _dropout("dropout1d", input, p, training, inplace, (*input.shape[:-1], 1))


def dropout2d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As dropout, but zeros whole channels. input: (N, C, H, W); any (N, C, ...) works, as in PyTorch.

    Raises: ArgumentError, DtypeError, ShapeError.
    """
    if input.ndim < 2:
        raise ShapeError(f"dropout2d: input {tuple(input.shape)}: expected (N, C, H, W)")
    return _dropout("dropout2d", input, p, training, inplace, (*input.shape[:2], *(1,) * (input.ndim - 2)))


class _Dropping(Layer, shown="p= inplace="):
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ArgumentError(f"{type(self).__name__}: p is a probability, not {p}")
        self.p = p
        self.inplace = inplace


class Dropout(_Dropping):
    """In training, zeros each element with probability `p` and scales the rest by 1/(1 - p).

    Raises: ArgumentError unless 0 <= p <= 1.
    """

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training, self.inplace)


class Dropout1d(_Dropping):
    """As Dropout, but zeros whole channels. input: (N, C, L) or (C, L).

    Raises: ArgumentError unless 0 <= p <= 1; when called, ShapeError, DtypeError.
    """

    def forward(self, input: Tensor) -> Tensor:
        return dropout1d(input, self.p, self.training, self.inplace)


class Dropout2d(_Dropping):
    """As Dropout, but zeros whole channels. input: (N, C, H, W), or any other (N, C, ...).

    Raises: ArgumentError unless 0 <= p <= 1; when called, ShapeError, DtypeError.
    """

    def forward(self, input: Tensor) -> Tensor:
        return dropout2d(input, self.p, self.training, self.inplace)
