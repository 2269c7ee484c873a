"""Convolutions as functions."""

from __future__ import annotations

from collections.abc import Sequence

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ShapeError
from ddp.nn.functional._check import one_dtype, window
from ddp.ops import conv


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
    one_dtype("conv2d", input, weight, bias)
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
    steps = window("conv2d", input, weight.shape[2:], stride, padding, dilation)
    return apply(
        conv.conv2d, (input, weight, bias), stride=steps[0], padding=steps[1], dilation=steps[2], groups=groups
    )
