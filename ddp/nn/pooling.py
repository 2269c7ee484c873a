"""Pooling. In one dimension it is that of images one line high."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn.module import Module
from ddp.nn.validation import Size, numbers, pair, walk
from ddp.ops import averages, pool
from ddp.ops.windows import Walk


def max_pool1d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The maximum under a moving window. input: (N, C, L) or (C, L); stride: kernel_size unless given.

    Returns (N, C, OL) as max_pool2d does; with return_indices also where in L each maximum lies.

    Raises: ShapeError; ArgumentError for a stride or dilation below 1, or a padding beyond half the kernel.
    """
    kernel, steps, around, spread = _line(kernel_size, stride, padding, dilation)
    how = kernel, steps, around, spread, ceil_mode, return_indices
    return _as_images("max_pool1d", input, lambda x: _max_pool("max_pool1d", x, *how))


def max_pool2d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The maximum under a moving window. input: (N, C, H, W) or (C, H, W); stride: kernel_size unless given.

    ceil_mode: the last window may reach beyond the padding, if it starts before its end.
    Returns (N, C, OH, OW) with conv2d's sizes; the gradient goes to the first of equal maxima. With return_indices,
    also where each maximum lies, as h * W + w (int64).

    Raises: ShapeError; ArgumentError for a stride or dilation below 1, or a padding beyond half the kernel.
    """
    how = kernel_size, stride, padding, dilation, ceil_mode, return_indices
    return _as_batch("max_pool2d", input, lambda x: _max_pool("max_pool2d", x, *how))


def _max_pool(
    name: str,
    input: Tensor,
    kernel_size: Size,
    stride: Size | None,
    padding: Size,
    dilation: Size,
    ceil_mode: bool,
    return_indices: bool,
) -> Any:
    how = _walk(name, input, kernel_size, stride, padding, dilation, ceil_mode)
    return apply(pool.max_pool2d_with_indices if return_indices else pool.max_pool2d, (input,), walk=how)


def avg_pool1d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean under a moving window. input: (N, C, L) or (C, L); returns (N, C, OL), as avg_pool2d does.

    Raises: ShapeError, DtypeError, ArgumentError as avg_pool2d.
    """
    kernel, steps, around, _ = _line(kernel_size, stride, padding, 1)
    return _as_images(
        "avg_pool1d",
        input,
        lambda x: _avg_pool("avg_pool1d", x, kernel, steps, around, ceil_mode, count_include_pad, None),
    )


def avg_pool2d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean under a moving window. input: (N, C, H, W) or (C, H, W); stride: kernel_size unless given.

    count_include_pad: the zeros of the padding count as elements. divisor_override: what sums are divided by instead of
    their number of elements. Returns (N, C, OH, OW), as max_pool2d.

    Raises: ShapeError; DtypeError unless floating; ArgumentError for a stride below 1, a padding beyond half the kernel
    or a divisor of 0.
    """
    if divisor_override == 0:
        raise ArgumentError("avg_pool2d: divisor_override is not 0")
    how = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    return _as_batch("avg_pool2d", input, lambda x: _avg_pool("avg_pool2d", x, *how))


def _avg_pool(
    name: str,
    input: Tensor,
    kernel_size: Size,
    stride: Size | None,
    padding: Size,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    _check_floating(name, input)
    how = _walk(name, input, kernel_size, stride, padding, 1, ceil_mode)
    return apply(
        averages.avg_pool2d,
        (input,),
        walk=how,
        count_include_pad=count_include_pad,
        divisor_override=divisor_override,
    )


def adaptive_avg_pool1d(input: Tensor, output_size: Size) -> Tensor:
    """Means over `output_size` windows of nearly equal length. input: (N, C, L) or (C, L); returns (N, C, output_size).

    Raises: ShapeError; DtypeError unless floating; ArgumentError for a negative size.
    """
    (length,) = numbers(output_size, 1, "output_size")
    return _as_images("adaptive_avg_pool1d", input, lambda x: _adaptive("adaptive_avg_pool1d", x, (1, length)))


def adaptive_avg_pool2d(input: Tensor, output_size: int | Sequence[int | None] | None) -> Tensor:
    """Means over output_size = (OH, OW) windows of nearly equal size; None leaves that side as it is.

    input: (N, C, H, W) or (C, H, W); returns (N, C, OH, OW).

    Raises: ShapeError; DtypeError unless floating; ArgumentError for a negative size.
    """
    given = numbers(output_size, 2, "output_size")  # type: ignore[arg-type]  # None is a size here
    return _as_batch("adaptive_avg_pool2d", input, lambda x: _adaptive("adaptive_avg_pool2d", x, given))


def _adaptive(name: str, input: Tensor, given: Sequence[int | None]) -> Tensor:
    _check_floating(name, input)
    size = tuple(n if want is None else want for want, n in zip(given, input.shape[2:], strict=True))
    if min(size) < 0:
        raise ArgumentError(f"{name}: output_size {tuple(given)} is negative")
    if min(input.shape[1:]) < 1:
        raise ShapeError(f"{name}: input {tuple(input.shape)} has no elements in a sample")
    return apply(averages.adaptive_avg_pool2d, (input,), size=size)


def _walk(
    name: str, input: Tensor, kernel_size: Size, stride: Size | None, padding: Size, dilation: Size, ceil: bool
) -> Walk:
    kernel = pair(kernel_size, "kernel_size")
    steps = kernel if stride is None or stride == () or stride == [] else stride
    how = walk(name, (input.shape[2], input.shape[3]), kernel, steps, padding, dilation, ceil)
    if any(2 * p > k for p, k in zip(how.padding, kernel, strict=True)):
        raise ArgumentError(f"{name}: padding {how.padding} is more than half of kernel {kernel}")
    return how


def _line(kernel_size: Size, stride: Size | None, padding: Size, dilation: Size) -> Any:
    """kernel, stride, padding and dilation of an image one line high."""
    kernel = (1, *numbers(kernel_size, 1, "kernel_size"))
    steps = kernel if stride is None or stride == () or stride == [] else (1, *numbers(stride, 1, "stride"))
    return kernel, steps, (0, *numbers(padding, 1, "padding")), (1, *numbers(dilation, 1, "dilation"))


def _check_floating(name: str, input: Tensor) -> None:
    if not input.is_floating_point():
        raise DtypeError(f"{name}: a mean of {input.dtype} is not defined: convert to a floating dtype")


def _as_batch(name: str, input: Tensor, run: Callable[[Tensor], Any]) -> Any:
    if input.ndim == 3:
        return _each(run(input.unsqueeze(0)), lambda y: y.squeeze(0))
    if input.ndim != 4:
        raise ShapeError(f"{name}: input {tuple(input.shape)}: expected (N, C, H, W) or (C, H, W)")
    return run(input)


def _as_images(name: str, input: Tensor, run: Callable[[Tensor], Any]) -> Any:
    if input.ndim == 2:
        return _each(run(input.unsqueeze(0).unsqueeze(-2)), lambda y: y.squeeze(-2).squeeze(0))
    if input.ndim != 3:
        raise ShapeError(f"{name}: input {tuple(input.shape)}: expected (N, C, L) or (C, L)")
    return _each(run(input.unsqueeze(-2)), lambda y: y.squeeze(-2))


def _each(found: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    return tuple([fn(y) for y in found]) if isinstance(found, tuple) else fn(found)


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
        return max_pool1d(input, *steps, self.ceil_mode, self.return_indices)


class MaxPool2d(_MaxPool):
    """The maximum under a moving window. input: (N, C, H, W); stride: kernel_size unless given.

    Raises: ShapeError, ArgumentError when called; see functional.max_pool2d.
    """

    def forward(self, input: Tensor) -> Any:
        """input: (N, C, H, W) or (C, H, W)."""
        steps = self.kernel_size, self.stride, self.padding, self.dilation
        return max_pool2d(input, *steps, self.ceil_mode, self.return_indices)


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
        return avg_pool1d(input, *steps, self.ceil_mode, self.count_include_pad)

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
        return avg_pool2d(input, *steps, self.ceil_mode, self.count_include_pad, self.divisor_override)

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
        return adaptive_avg_pool1d(input, self.output_size)


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """Means over output_size = (OH, OW) windows of nearly equal size; None leaves that side as it is.

    input: (N, C, H, W); returns (N, C, OH, OW).

    Raises: ShapeError, DtypeError, ArgumentError when called; see functional.adaptive_avg_pool2d.
    """

    output_size: int | Sequence[int | None] | None

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, H, W) or (C, H, W)."""
        return adaptive_avg_pool2d(input, self.output_size)


def _one(value: int | tuple[int]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)
