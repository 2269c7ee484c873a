"""Checks of arguments before arrays reach an op: dtypes, pairs of numbers, windows that fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._engine import modes
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import bfloat16, float16, float32
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops.convolution import Pair, Window, output_size

Size = int | Sequence[int]
_CAST = {float16, bfloat16, float32}  # what autocast changes


def pair(value: Size, name: str) -> Pair:
    """(value, value) for a number, else the two of a sequence. Raises: ArgumentError for any other length."""
    h, w = numbers(value, 2, name)
    return h, w


def numbers(value: Size, n: int, name: str) -> tuple[int, ...]:
    """`n` times the number, else the `n` of a sequence. Raises: ArgumentError for any other length."""
    if not isinstance(value, Sequence):
        return (value,) * n
    if len(value) == 1:
        return (value[0],) * n
    if len(value) != n:
        raise ArgumentError(f"{name}: expected one number or {n}, got {tuple(value)}")
    return tuple(value)


def one_dtype(name: str, *tensors: Tensor | None) -> None:
    """Raises: DtypeError unless all given tensors have one dtype, or autocast is going to give them one."""
    dtypes = [x.dtype for x in tensors if x is not None]
    if any(dtype != dtypes[0] for dtype in dtypes) and not (modes.state.autocast and _CAST.issuperset(dtypes)):
        raise DtypeError(f"{name}: input, weight and bias need one dtype, got {', '.join(map(str, dtypes))}")


def walk(name: str, image: Pair, kernel: Pair, stride: Any, padding: Any, dilation: Any, ceil: bool = False) -> Window:
    """How the window walks over the image, if it fits. Raises: ArgumentError, ShapeError."""
    stride, padding, dilation = pair(stride, "stride"), pair(padding, "padding"), pair(dilation, "dilation")
    if min(*stride, *dilation, *kernel) < 1 or min(padding) < 0:
        raise ArgumentError(f"{name}: too small: {kernel=}, {stride=}, {padding=}, {dilation=}")
    h, w = (output_size(*each, ceil) for each in zip(image, kernel, stride, padding, dilation, strict=True))
    if h < 1 or w < 1:
        raise ShapeError(
            f"{name}: kernel {kernel} with dilation {dilation} does not fit images of {image} with padding {padding}"
        )
    return Window(image, kernel, stride, padding, dilation, (h, w))
