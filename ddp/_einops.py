"""Makes einops take our tensors. einops looks for backends among the subclasses of its own `AbstractBackend`.

The layers `Rearrange` and `Reduce` can be imported from `einops.layers.ddp`, as PyTorch's from `einops.layers.torch`.
"""

from __future__ import annotations

import sys
from typing import Any

from einops import rearrange, reduce
from einops._backends import AbstractBackend, TorchBackend
from einops.layers import RearrangeMixin, ReduceMixin

from ddp._tensor.core import Tensor
from ddp.nn.module import Module

__all__ = ["Rearrange", "Reduce"]


class DdpBackend(TorchBackend, AbstractBackend):  # type: ignore[misc, unused-ignore]  # einops may be missing
    # `AbstractBackend` is a direct base, because older versions of einops find only direct subclasses.
    """PyTorch's backend, with this library in the place of `torch`."""

    framework_name = "ddp"

    def __init__(self) -> None:
        self.torch = sys.modules["ddp"]

    def layers(self) -> Any:
        return sys.modules[__name__]


class Rearrange(RearrangeMixin, Module):  # type: ignore[misc, unused-ignore]  # einops may be missing
    """`einops.rearrange` as a layer: Rearrange("b c h w -> b (c h w)")."""

    def forward(self, input: Tensor) -> Tensor:
        """input: of the shape that the pattern describes."""
        return rearrange(input, self.pattern, **self.axes_lengths)


class Reduce(ReduceMixin, Module):  # type: ignore[misc, unused-ignore]
    """`einops.reduce` as a layer: Reduce("b c h w -> b c", "mean")."""

    def forward(self, input: Tensor) -> Tensor:
        """input: of the shape that the pattern describes."""
        return reduce(input, self.pattern, self.reduction, **self.axes_lengths)
