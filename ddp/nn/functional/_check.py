"""What functional forms check before arrays reach an op: dtypes, pairs of numbers, windows that fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops import conv


def pair(value: int | Sequence[int], name: str) -> tuple[int, int]:
    """(value, value) for a number, else the two of a sequence. Raises: ArgumentError for any other length."""
    if isinstance(value, int):
        return value, value
    if len(value) != 2:
        raise ArgumentError(f"{name}: expected one number or two, got {value}")
    return value[0], value[1]


def one_dtype(name: str, *tensors: Tensor | None) -> None:
    """Raises: DtypeError unless the tensors that are there have one dtype."""
    dtypes = [x.dtype for x in tensors if x is not None]
    if any(dtype != dtypes[0] for dtype in dtypes):
        raise DtypeError(f"{name}: input, weight and bias need one dtype, got {', '.join(map(str, dtypes))}")


def window(name: str, input: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Any:
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
