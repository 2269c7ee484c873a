"""Losses as modules."""

from __future__ import annotations

from ddp._tensor.core import Tensor
from ddp.nn import functional
from ddp.nn._module import Module


class CrossEntropyLoss(Module):
    """-log softmax(input)[target], from logits. input: (N, C) or (N, C, ...); target: (N,) or (N, ...) classes.

    reduction: "mean", "sum" or "none". Raises when called: see functional.cross_entropy.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: (N, C, ...), target: (N, ...)."""
        return functional.cross_entropy(input, target, self.reduction)
