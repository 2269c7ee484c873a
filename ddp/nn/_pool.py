"""Pooling layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._tensor.core import Tensor
from ddp.nn import functional
from ddp.nn._module import Module
from ddp.nn.functional._check import Size


class _MaxPool(Module):
    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.stride = kernel_size if stride is None else stride
        self.padding = padding
        self.dilation = dilation
        self.return_indices = return_indices
        self.ceil_mode = ceil_mode

    def extra_repr(self) -> str:
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, "
            f"dilation={self.dilation}, ceil_mode={self.ceil_mode}"
        )


class MaxPool1d(_MaxPool):
    """The maximum under a moving window. input: (N, C, L); stride: kernel_size unless given.

    Raises: ShapeError, ArgumentError when called; see functional.max_pool1d.
    """

    def forward(self, input: Tensor) -> Any:
        """input: (N, C, L) or (C, L)."""
        steps = self.kernel_size, self.stride, self.padding, self.dilation
        return functional.max_pool1d(input, *steps, self.ceil_mode, self.return_indices)


class MaxPool2d(_MaxPool):
    """The maximum under a moving window. input: (N, C, H, W); stride: kernel_size unless given.

    Raises: ShapeError, ArgumentError when called; see functional.max_pool2d.
    """

    def forward(self, input: Tensor) -> Any:
        """input: (N, C, H, W) or (C, H, W)."""
        steps = self.kernel_size, self.stride, self.padding, self.dilation
        return functional.max_pool2d(input, *steps, self.ceil_mode, self.return_indices)


class AvgPool1d(Module):
    """The mean under a moving window. input: (N, C, L); stride: kernel_size unless given.

    Raises: ShapeError, DtypeError, ArgumentError when called; see functional.avg_pool1d.
    """

    def __init__(
        self,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] | None = None,
        padding: int | tuple[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__()
        self.kernel_size = _one(kernel_size)
        self.stride = self.kernel_size if stride is None else _one(stride)
        self.padding = _one(padding)
        self.ceil_mode = ceil_mode
        self.count_include_pad = count_include_pad

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, L) or (C, L)."""
        steps = self.kernel_size, self.stride, self.padding
        return functional.avg_pool1d(input, *steps, self.ceil_mode, self.count_include_pad)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class AvgPool2d(Module):
    """The mean under a moving window. input: (N, C, H, W); stride: kernel_size unless given.

    Raises: ShapeError, DtypeError, ArgumentError when called; see functional.avg_pool2d.
    """

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.stride = kernel_size if stride is None else stride
        self.padding = padding
        self.ceil_mode = ceil_mode
        self.count_include_pad = count_include_pad
        self.divisor_override = divisor_override

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, H, W) or (C, H, W)."""
        steps = self.kernel_size, self.stride, self.padding
        return functional.avg_pool2d(input, *steps, self.ceil_mode, self.count_include_pad, self.divisor_override)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class _AdaptiveAvgPool(Module):
    def __init__(self, output_size: Any) -> None:
        super().__init__()
        self.output_size = output_size

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}"


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """Means over `output_size` windows of nearly equal length. input: (N, C, L); returns (N, C, output_size).

    Raises: ShapeError, DtypeError, ArgumentError when called; see functional.adaptive_avg_pool1d.
    """

    output_size: Size

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, L) or (C, L)."""
        return functional.adaptive_avg_pool1d(input, self.output_size)


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """Means over output_size = (OH, OW) windows of nearly equal size; None leaves that side as it is.

    input: (N, C, H, W); returns (N, C, OH, OW).

    Raises: ShapeError, DtypeError, ArgumentError when called; see functional.adaptive_avg_pool2d.
    """

    output_size: int | Sequence[int | None] | None

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, H, W) or (C, H, W)."""
        return functional.adaptive_avg_pool2d(input, self.output_size)


def _one(value: int | tuple[int]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)
