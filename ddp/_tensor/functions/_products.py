"""Matrix products as functions."""

from __future__ import annotations

from ddp._tensor.core import Tensor


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """The matrix product: (..., n, k) @ (..., k, m). Raises: ShapeError."""
    return input.matmul(other)
