"""Activations that write their result into the input, and return it. Raises: as in-place methods do."""

from __future__ import annotations

from ddp._tensor.core import Tensor
from ddp.nn.functional._activation import celu, elu, hardtanh, leaky_relu, selu, threshold

_threshold = threshold  # where an argument has its name


def elu_(input: Tensor, alpha: float = 1.0) -> Tensor:
    """elu, written into the input."""
    return elu(input, alpha, inplace=True)


def selu_(input: Tensor) -> Tensor:
    """selu, written into the input."""
    return selu(input, inplace=True)


def celu_(input: Tensor, alpha: float = 1.0) -> Tensor:
    """celu, written into the input."""
    return celu(input, alpha, inplace=True)


def hardtanh_(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """hardtanh, written into the input."""
    return hardtanh(input, min_val, max_val, inplace=True)


def leaky_relu_(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """leaky_relu, written into the input."""
    return leaky_relu(input, negative_slope, inplace=True)


def threshold_(input: Tensor, threshold: float, value: float) -> Tensor:
    """threshold, written into the input."""
    return _threshold(input, threshold, value, inplace=True)
