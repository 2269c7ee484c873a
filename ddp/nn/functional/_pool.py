"""Pooling as functions."""

from __future__ import annotations

from collections.abc import Sequence

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.functional._check import pair, window
from ddp.ops import pool


def max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """The maximum under a moving window. input: (N, C, H, W) or (C, H, W); stride: kernel_size unless given.

    Returns (N, C, OH, OW) with conv2d's sizes; the gradient goes to the first of equal maxima.

    Raises: ShapeError; ArgumentError for a stride or dilation below 1, or a padding beyond half the kernel.
    """
    if input.ndim == 3:
        return max_pool2d(input.unsqueeze(0), kernel_size, stride, padding, dilation).squeeze(0)
    if input.ndim != 4:
        raise ShapeError(f"max_pool2d: input {input.shape}: expected (N, C, H, W) or (C, H, W)")
    kernel = pair(kernel_size, "kernel_size")
    steps = window("max_pool2d", input, kernel, kernel if stride is None else stride, padding, dilation)
    if any(2 * p > k for p, k in zip(steps[1], kernel, strict=True)):
        raise ArgumentError(f"max_pool2d: padding {steps[1]} is more than half of kernel {kernel}")
    return apply(pool.max_pool2d, (input,), kernel=kernel, stride=steps[0], padding=steps[1], dilation=steps[2])
