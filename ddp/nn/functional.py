"""Layers as functions: shapes are checked here, once, before arrays reach an op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._device import generator
from ddp._tensor.arithmetic import floating
from ddp._tensor.base import apply, borrowed
from ddp._tensor.core import Tensor
from ddp._tensor.functions import log_softmax, relu, sigmoid, softmax, tanh
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.ops import conv, elementwise, loss, pool, products, shape

__all__ = [
    "conv2d",
    "cross_entropy",
    "dropout",
    "linear",
    "log_softmax",
    "max_pool2d",
    "pad",
    "relu",
    "sigmoid",
    "softmax",
    "tanh",
]


def pair(value: int | Sequence[int], name: str) -> tuple[int, int]:
    """(value, value) for a number, else the two of a sequence. Raises: ArgumentError for any other length."""
    if isinstance(value, int):
        return value, value
    if len(value) != 2:
        raise ArgumentError(f"{name}: expected one number or two, got {value}")
    return value[0], value[1]


def _one_dtype(name: str, *tensors: Tensor | None) -> None:
    dtypes = [x.dtype for x in tensors if x is not None]
    if any(dtype != dtypes[0] for dtype in dtypes):
        raise DtypeError(f"{name}: input, weight and bias need one dtype, got {', '.join(map(str, dtypes))}")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias. input: (..., n), weight: (m, n), bias: (m,); returns (..., m).

    Raises: ShapeError, DtypeError.
    """
    _one_dtype("linear", input, weight, bias)
    if weight.ndim != 2 or not input.ndim or input.shape[-1] != weight.shape[1]:
        raise ShapeError(f"linear: input {input.shape} and weight {weight.shape}: expected (..., n) and (m, n)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"linear: bias {bias.shape} for weight {weight.shape}: expected {weight.shape[:1]}")
    return apply(products.linear, (input, weight, bias))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution (cross-correlation) over images. input: (N, C, H, W) or (C, H, W), weight: (O, C/groups, KH, KW).

    bias: (O,). Returns (N, O, OH, OW), OH = (H + 2*padding - dilation*(KH - 1) - 1) // stride + 1.

    Raises: ShapeError, DtypeError; ArgumentError for a stride or dilation below 1, or a negative padding.
    """
    _one_dtype("conv2d", input, weight, bias)
    if input.ndim == 3:
        return conv2d(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    shapes = f"conv2d: input {input.shape}, weight {weight.shape}, groups {groups}"
    if input.ndim != 4 or weight.ndim != 4:
        raise ShapeError(f"{shapes}: expected (N, C, H, W) and (O, C/groups, KH, KW)")
    out, channels = weight.shape[:2]
    if groups < 1 or out % groups or input.shape[1] != channels * groups:
        raise ShapeError(f"{shapes}: input has {input.shape[1]} channels, weight takes {channels} in each group")
    if bias is not None and bias.shape != (out,):
        raise ShapeError(f"{shapes}: bias {bias.shape}, expected {(out,)}")
    steps = _window("conv2d", input, weight.shape[2:], stride, padding, dilation)
    return apply(
        conv.conv2d, (input, weight, bias), stride=steps[0], padding=steps[1], dilation=steps[2], groups=groups
    )


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
    steps = _window("max_pool2d", input, kernel, kernel if stride is None else stride, padding, dilation)
    if any(2 * p > k for p, k in zip(steps[1], kernel, strict=True)):
        raise ArgumentError(f"max_pool2d: padding {steps[1]} is more than half of kernel {kernel}")
    return apply(pool.max_pool2d, (input,), kernel=kernel, stride=steps[0], padding=steps[1], dilation=steps[2])


def _window(name: str, input: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Any:
    """stride, padding and dilation as pairs, if the window fits. Raises: ArgumentError, ShapeError."""
    steps = stride, padding, dilation = pair(stride, "stride"), pair(padding, "padding"), pair(dilation, "dilation")
    if min(*stride, *dilation, *kernel) < 1 or min(padding) < 0:
        raise ArgumentError(f"{name}: too small: {kernel=}, {stride=}, {padding=}, {dilation=}")
    for i in range(2):
        if conv.output_size(input.shape[2 + i], kernel[i], stride[i], padding[i], dilation[i]) < 1:
            raise ShapeError(
                f"{name}: kernel {kernel} with dilation {dilation} does not fit input {input.shape} "
                f"with padding {padding}"
            )
    return steps


def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeros each element with probability `p` and scales the rest by 1/(1 - p); the input itself unless training.

    Raises: ArgumentError unless 0 <= p <= 1.
    """
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout: p is a probability, not {p}")
    if not training or p == 0:
        return input
    return apply(elementwise.dropout, (input,), p=p, generator=generator(input.device))


def cross_entropy(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """-log softmax(input)[target], from logits. input: (C,), (N, C) or (N, C, ...); target: (), (N,) or (N, ...).

    target: int64 classes in [0, C). reduction: "mean", "sum" or "none" (the target's shape).

    Raises: ShapeError, DtypeError, ArgumentError; RangeError naming the first target out of range.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"cross_entropy: reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    if target.dtype.kind not in "iu":
        raise DtypeError(f"cross_entropy: target holds class numbers (int64), not {target.dtype}")
    if input.ndim == 1 and target.ndim == 0:
        loss_ = cross_entropy(input.unsqueeze(0), target.unsqueeze(0), reduction)
        return loss_.squeeze(0) if reduction == "none" else loss_
    if input.ndim < 2 or target.shape != (input.shape[0], *input.shape[2:]):
        raise ShapeError(f"cross_entropy: input {input.shape}, target {target.shape}: expected (N, C, ...), (N, ...)")
    classes, array = input.shape[1], target._array
    if array.size and not (array.min() >= 0 and array.max() < classes):
        bad = array[(array < 0) | (array >= classes)][0]
        raise RangeError(f"cross_entropy: target {int(bad)} is not one of the {classes} classes 0 to {classes - 1}")
    return apply(loss.cross_entropy, (floating(input),), target=borrowed(array, input), reduction=reduction)


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """`input` in a frame of `value`. pad: (before, after) of the last dimension, then of the one before it, and so on.

    Raises: ArgumentError for an odd number of widths, more than the dimensions have, negative ones or another mode.
    """
    if mode != "constant":
        raise ArgumentError(f"pad: the mode is 'constant', not {mode!r}")
    if len(pad) % 2 or len(pad) > 2 * input.ndim or any(n < 0 for n in pad):
        raise ArgumentError(
            f"pad: {tuple(pad)} for shape {input.shape}: expected non-negative pairs, last dimension first"
        )
    given = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    widths = [(0, 0)] * (input.ndim - len(given)) + given[::-1]
    return apply(shape.pad, (input,), widths=tuple(widths), value=value)
