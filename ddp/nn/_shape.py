"""Layers that change the shape alone."""

from __future__ import annotations

from collections.abc import Sequence

from ddp._tensor.core import Tensor
from ddp.nn._module import Module


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


class Unflatten(Module):
    """Dimension `dim` split into several: with (C, H, W), (N, C*H*W) becomes (N, C, H, W). One size may be -1.

    Raises: ShapeError when called with a dimension that is not their product.
    """

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        super().__init__()
        self.dim = dim
        self.unflattened_size = tuple(unflattened_size)

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape that has this dimension."""
        return input.unflatten(self.dim, self.unflattened_size)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"
