"""Layers that weigh the elements along a dimension against each other: softmax and its kin."""

from __future__ import annotations

from ddp._tensor.core import Tensor
from ddp.nn import functional
from ddp.nn._module import Module


class _AlongDim(Module):
    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = dim

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Softmax(_AlongDim):
    """exp(input) / sum(exp(input)) along `dim`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.softmax(input, self.dim)


class LogSoftmax(_AlongDim):
    """log(softmax(input)) along `dim`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.log_softmax(input, self.dim)


class Softmin(_AlongDim):
    """softmax(-input) along `dim`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.softmin(input, self.dim)
