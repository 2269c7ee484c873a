"""Pooling layers."""

from __future__ import annotations

from collections.abc import Sequence

from ddp._tensor.core import Tensor
from ddp.nn import functional
from ddp.nn._module import Module

Size = int | Sequence[int]


class MaxPool2d(Module):
    """The maximum under a moving window. input: (N, C, H, W); stride: kernel_size unless given.

    Raises: ShapeError, ArgumentError when called; see functional.max_pool2d.
    """

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: Size = 1) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.stride = kernel_size if stride is None else stride
        self.padding = padding
        self.dilation = dilation

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, H, W) or (C, H, W)."""
        return functional.max_pool2d(input, self.kernel_size, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}"
