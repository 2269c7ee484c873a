"""Layers without parameters that act on each element, or on the shape."""

from __future__ import annotations

from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError
from ddp.nn import functional
from ddp.nn._module import Module


class ReLU(Module):
    """max(input, 0). input: any shape."""

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape."""
        return functional.relu(input)


class Tanh(Module):
    """The hyperbolic tangent. input: any shape."""

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape."""
        return functional.tanh(input)


class Sigmoid(Module):
    """1 / (1 + exp(-input)). input: any shape."""

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape."""
        return functional.sigmoid(input)


class Dropout(Module):
    """In training, zeros each element with probability `p` and scales the rest by 1/(1 - p). input: any shape.

    Raises: ArgumentError unless 0 <= p <= 1.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ArgumentError(f"Dropout: p is a probability, not {p}")
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape."""
        return functional.dropout(input, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Flatten(Module):
    """Dimensions start_dim to end_dim (inclusive) joined into one: (N, C, H, W) becomes (N, C*H*W)."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim = start_dim
        self.end_dim = end_dim

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape that has these dimensions."""
        return input.flatten(self.start_dim, self.end_dim)

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"
