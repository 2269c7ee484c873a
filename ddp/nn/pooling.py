"""Pooling. 1d pooling runs as 2d pooling of height 1. 3d pooling pools planes first, and then along the depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn.module import FunctionModule
from ddp.nn.validation import Size, numbers, pair, window_of
from ddp.ops import pooling


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

    Returns (N, C, OL), OL like OW in max_pool2d; with return_indices, also the position of each maximum in L.

    Raises: ShapeError; ArgumentError for a kernel, stride or dilation below 1, a padding that is negative or beyond
    half the kernel, or a sequence of the wrong length.
    """
    op = pooling.max_pool2d_with_indices if return_indices else pooling.max_pool2d
    return _pool("max_pool1d", op, input, (kernel_size, stride, padding, dilation, ceil_mode))


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

    ceil_mode: the last window may reach beyond the padding, if it starts in the input or the padding before it.
    Returns (N, C, OH, OW); without ceil_mode, OH and OW are as in conv2d. The gradient goes to the first of equal
    maxima. With return_indices, also returns the position of each maximum, as h * W + w (int64).

    Raises: ShapeError; ArgumentError for a kernel, stride or dilation below 1, a padding that is negative or beyond
    half the kernel, or a sequence of the wrong length.
    """
    op = pooling.max_pool2d_with_indices if return_indices else pooling.max_pool2d
    return _pool("max_pool2d", op, input, (kernel_size, stride, padding, dilation, ceil_mode))


def avg_pool1d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean under a moving window. input: (N, C, L) or (C, L); returns (N, C, OL), OL like OW in avg_pool2d.

    Raises: ShapeError, DtypeError, ArgumentError as in avg_pool2d.
    """
    window = kernel_size, stride, padding, 1, ceil_mode
    counting = {"count_include_pad": count_include_pad, "divisor_override": None}
    return _pool("avg_pool1d", pooling.avg_pool2d, input, window, **counting)


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

    count_include_pad: the zeros of the padding count as elements. divisor_override: divides the sums by this number,
    not by the number of elements. Returns (N, C, OH, OW), with the sizes of max_pool2d.

    Raises: ShapeError; DtypeError unless floating; ArgumentError for a kernel or stride below 1, a padding that is
    negative or beyond half the kernel, a sequence of the wrong length, or a divisor of 0.
    """
    if divisor_override == 0:
        raise ArgumentError("avg_pool2d: divisor_override is not 0")
    window = kernel_size, stride, padding, 1, ceil_mode
    counting = {"count_include_pad": count_include_pad, "divisor_override": divisor_override}
    return _pool("avg_pool2d", pooling.avg_pool2d, input, window, **counting)


def adaptive_avg_pool1d(input: Tensor, output_size: Size) -> Tensor:
    """Means over `output_size` windows of nearly equal length. input: (N, C, L) or (C, L); returns (N, C, output_size).

    Raises: ShapeError; DtypeError unless floating; ArgumentError for a negative size, or the wrong number of sizes.
    """
    return _adaptive_avg_pool(1, input, (1, *numbers(output_size, 1, "output_size")))


def adaptive_avg_pool2d(input: Tensor, output_size: int | Sequence[int | None] | None) -> Tensor:
    """Means over output_size = (OH, OW) windows of nearly equal size. None means the size of the input.

    input: (N, C, H, W) or (C, H, W); returns (N, C, OH, OW).

    Raises: ShapeError; DtypeError unless floating; ArgumentError for a negative size, or the wrong number of sizes.
    """
    sizes = numbers(output_size, 2, "output_size")  # type: ignore[arg-type]  # None is a size here
    return _adaptive_avg_pool(2, input, sizes)


def adaptive_avg_pool3d(input: Tensor, output_size: int | Sequence[int | None] | None) -> Tensor:
    """Means over output_size = (OD, OH, OW) windows of nearly equal size. None means the size of the input.

    input: (N, C, D, H, W) or (C, D, H, W); returns (N, C, OD, OH, OW).

    Raises: ShapeError; DtypeError unless floating; ArgumentError for a negative size, or the wrong number of sizes.
    """
    depth, *sizes = numbers(output_size, 3, "output_size")  # type: ignore[arg-type]  # None is a size here
    return _pool3d("adaptive_avg_pool3d", input, adaptive_avg_pool2d, [sizes], [(depth, None)])


def max_pool3d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """The maximum under a moving window, as in max_pool2d. input: (N, C, D, H, W) or (C, D, H, W).

    Raises: ShapeError; ArgumentError as in max_pool2d, and for return_indices, which is not supported.
    """
    if return_indices:
        raise ArgumentError("max_pool3d: return_indices=True is not supported")
    window = [
        numbers(n, 3, "window") for n in (kernel_size, kernel_size if stride is None else stride, padding, dilation)
    ]
    of_depth = [(n[0], alone) for n, alone in zip(window, (1, 1, 0, 1), strict=True)]
    return _pool3d("max_pool3d", input, max_pool2d, [*[n[1:] for n in window], ceil_mode], [*of_depth, ceil_mode])


def _pool3d(name: str, input: Tensor, pool: Any, of_planes: Any, of_depth: Any) -> Tensor:
    """Pools planes with pool(..., *of_planes), and then along the depth with pool(..., *of_depth)."""
    if input.ndim not in (4, 5):
        raise ShapeError(f"{name}: input {tuple(input.shape)}: expected (N, C, D, H, W) or (C, D, H, W)")
    planes = pool(input.flatten(0, -4), *of_planes)  # (N * C, D, H, W): the depth takes the place of the channels
    lines = pool(planes.flatten(2), *of_depth)
    return lines.unflatten(-1, planes.shape[2:]).unflatten(0, input.shape[:-3])


def _adaptive_avg_pool(dims: int, input: Tensor, sizes: Sequence[int | None]) -> Tensor:
    name = f"adaptive_avg_pool{dims}d"
    x = _as_images(name, dims, input)
    _check_floating(name, x)
    size = tuple(n if want is None else want for want, n in zip(sizes, x.shape[2:], strict=True))
    if min(size) < 0:
        raise ArgumentError(f"{name}: output_size {tuple(sizes)} is negative")
    if min(x.shape[1:]) < 1:
        raise ShapeError(f"{name}: input {tuple(x.shape)} has no elements in a sample")
    return _restore_ndim(apply(pooling.adaptive_avg_pool2d, (x,), size=size), dims, input)


def _pool(name: str, op: Any, input: Tensor, window: tuple[Any, ...], **counting: Any) -> Any:
    """Applies a pooling op under a moving window. window: kernel_size, stride, padding, dilation, ceil_mode."""
    dims = int(name[-2])
    images = _as_images(name, dims, input)
    if op is pooling.avg_pool2d:
        _check_floating(name, images)
    kernel, stride, padding, dilation, ceil = window
    size = numbers(kernel, dims, "kernel_size")
    strides = size if stride is None or stride == () or stride == [] else numbers(stride, dims, "stride")
    pads = numbers(padding, dims, "padding")
    dilations = numbers(dilation, dims, "dilation")
    if dims == 1:  # runs as 2d pooling of height 1
        size = (1, *size)
        strides = (1, *strides)
        pads = (0, *pads)
        dilations = (1, *dilations)
    checked = window_of(
        name, (images.shape[2], images.shape[3]), pair(size, "kernel_size"), strides, pads, dilations, ceil
    )
    if any(2 * p > k for p, k in zip(checked.padding, size, strict=True)):
        raise ArgumentError(f"{name}: padding {checked.padding} is more than half of kernel {size}")
    result = apply(op, (images,), window=checked, **counting)
    if isinstance(result, tuple):
        return tuple([_restore_ndim(output, dims, input) for output in result])
    return _restore_ndim(result, dims, input)


def _check_floating(name: str, input: Tensor) -> None:
    if not input.is_floating_point():
        raise DtypeError(f"{name}: a mean of {input.dtype} is not defined: convert to a floating dtype")


def _as_images(name: str, dims: int, input: Tensor) -> Tensor:
    """The input as (N, C, H, W). Raises: ShapeError."""
    if input.ndim not in (dims + 1, dims + 2):
        expected = "(N, C, L) or (C, L)" if dims == 1 else "(N, C, H, W) or (C, H, W)"
        raise ShapeError(f"{name}: input {tuple(input.shape)}: expected {expected}")
    images = input if input.ndim == dims + 2 else input.unsqueeze(0)
    return images.unsqueeze(-2) if dims == 1 else images


def _restore_ndim(images: Tensor, dims: int, input: Tensor) -> Tensor:
    """Removes from a result the axes that `_as_images` added to `input`."""
    y = images.squeeze(-2) if dims == 1 else images
    return y if input.ndim == dims + 2 else y.squeeze(0)


class _Pool(FunctionModule, shown="kernel_size= stride= padding="):
    def _init(self, **settings: Any) -> None:
        stride = settings["kernel_size"] if settings["stride"] is None else settings["stride"]
        super()._init(**{**settings, "stride": stride})


class _MaxPool(_Pool, shown="kernel_size= stride= padding= dilation= ceil_mode="):
    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        window = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
        self._init(**window, return_indices=return_indices, ceil_mode=ceil_mode)


class MaxPool1d(_MaxPool, function=max_pool1d):
    """The maximum under a moving window. input: (N, C, L) or (C, L); stride: kernel_size unless given.

    Raises: ShapeError, ArgumentError when called; see functional.max_pool1d.
    """


class MaxPool2d(_MaxPool, function=max_pool2d):
    """The maximum under a moving window. input: (N, C, H, W) or (C, H, W); stride: kernel_size unless given.

    Raises: ShapeError, ArgumentError when called; see functional.max_pool2d.
    """


class MaxPool3d(_MaxPool, function=max_pool3d):
    """The maximum under a moving window. input: (N, C, D, H, W) or (C, D, H, W); stride: kernel_size unless given.

    Raises: ShapeError, ArgumentError when called; see functional.max_pool3d.
    """


class AvgPool2d(_Pool, function=avg_pool2d):
    """The mean under a moving window. input: (N, C, H, W) or (C, H, W); stride: kernel_size unless given.

    Raises: ShapeError, DtypeError, ArgumentError when called; see functional.avg_pool2d.
    """


class AvgPool1d(_Pool, function=avg_pool1d):
    """The mean under a moving window. input: (N, C, L) or (C, L); stride: kernel_size unless given.

    Raises: ShapeError, DtypeError, ArgumentError when called; see functional.avg_pool1d.
    """

    def _init(self, **settings: Any) -> None:
        super()._init(**settings)
        for name in ("kernel_size", "stride", "padding"):
            setattr(self, name, numbers(getattr(self, name), 1, name))


class AdaptiveAvgPool1d(FunctionModule, function=adaptive_avg_pool1d):
    """Means over `output_size` windows of nearly equal length. input: (N, C, L) or (C, L); returns (N, C, output_size).

    Raises: ShapeError, DtypeError, ArgumentError when called; see functional.adaptive_avg_pool1d.
    """


class AdaptiveAvgPool2d(FunctionModule, function=adaptive_avg_pool2d):
    """Means over output_size = (OH, OW) windows of nearly equal size. None means the size of the input.

    input: (N, C, H, W) or (C, H, W); returns (N, C, OH, OW).

    Raises: ShapeError, DtypeError, ArgumentError when called; see functional.adaptive_avg_pool2d.
    """


class AdaptiveAvgPool3d(FunctionModule, function=adaptive_avg_pool3d):
    """Means over output_size = (OD, OH, OW) windows of nearly equal size. None means the size of the input.

    input: (N, C, D, H, W) or (C, D, H, W); returns (N, C, OD, OH, OW).

    Raises: ShapeError, DtypeError, ArgumentError when called; see functional.adaptive_avg_pool3d.
    """
