"""Initialisation of parameters, in place and outside the graph. Source: He et al. 2015, arXiv:1502.01852."""

from __future__ import annotations

import math

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, ShapeError

__all__ = [
    "constant_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]


@no_grad()
def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Uniform in [a, b)."""
    return tensor.uniform_(a, b)


@no_grad()
def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Normally distributed."""
    return tensor.normal_(mean, std)


@no_grad()
def constant_(tensor: Tensor, val: float) -> Tensor:
    """`val` everywhere."""
    return tensor.fill_(val)


def zeros_(tensor: Tensor) -> Tensor:
    """0 everywhere."""
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """1 everywhere."""
    return constant_(tensor, 1.0)


def fans(tensor: Tensor) -> tuple[int, int]:
    """How many inputs an output of this weight (out, in, ...) has, and how many outputs an input.

    Raises: ShapeError below two dimensions.
    """
    if tensor.ndim < 2:
        raise ShapeError(f"fan in and out of shape {tensor.shape}: expected a weight of at least two dimensions")
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


def gain(nonlinearity: str, a: float = 0.0) -> float:
    """By how much a nonlinearity shrinks a signal: "linear", "sigmoid", "tanh", "relu", "leaky_relu" (of slope `a`).

    Raises: ArgumentError for another.
    """
    gains = {
        "linear": 1.0,
        "conv2d": 1.0,
        "sigmoid": 1.0,
        "tanh": 5.0 / 3,
        "relu": math.sqrt(2.0),
        "leaky_relu": math.sqrt(2.0 / (1 + a * a)),
    }
    if nonlinearity not in gains:
        raise ArgumentError(f"nonlinearity {nonlinearity!r}: expected one of {', '.join(gains)}")
    return gains[nonlinearity]


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ArgumentError(f"mode {mode!r}: expected 'fan_in' or 'fan_out'")
    fan = fans(tensor)[mode == "fan_out"]
    return gain(nonlinearity, a) / math.sqrt(max(fan, 1))


def kaiming_uniform_(tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
    """Uniform, with the variance that keeps a signal's through layers of `nonlinearity`. tensor: (out, in, ...)."""
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
    """Normally distributed, with the variance that keeps a signal's. tensor: (out, in, ...)."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity))


def _xavier_std(tensor: Tensor, gain: float) -> float:
    return gain * math.sqrt(2.0 / max(sum(fans(tensor)), 1))


def xavier_uniform_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Uniform, balancing fan in and fan out. tensor: (out, in, ...). Source: Glorot and Bengio 2010."""
    bound = math.sqrt(3.0) * _xavier_std(tensor, gain)
    return uniform_(tensor, -bound, bound)


def xavier_normal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Normally distributed, balancing fan in and fan out. tensor: (out, in, ...). Source: Glorot and Bengio 2010."""
    return normal_(tensor, 0.0, _xavier_std(tensor, gain))
