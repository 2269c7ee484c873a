"""Convolutions and their transposes as functions. In one dimension they are those of images one line high."""

from __future__ import annotations

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.functional._check import Size, numbers, one_dtype, pair, walk
from ddp.nn.functional._frames import pad
from ddp.ops import conv

Padding = Size | str


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution along lines. input: (N, C, L) or (C, L), weight: (O, C/groups, K), bias: (O,).

    padding: a number, "valid" (none) or "same" (the output is as long as the input; stride 1 only).
    Returns (N, O, OL), OL = (L + 2*padding - dilation*(K - 1) - 1) // stride + 1.

    Raises: ShapeError, DtypeError; ArgumentError for a stride or dilation below 1, or a padding that is not possible.
    """
    if input.ndim == 2:
        return conv1d(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    shapes = f"conv1d: input {_sizes(input)}, weight {_sizes(weight)}, groups {groups}"
    if input.ndim != 3 or weight.ndim != 3:
        raise ShapeError(f"{shapes}: expected (N, C, L) and (O, C/groups, K)")
    if not isinstance(padding, str):
        padding = (0, *numbers(padding, 1, "padding"))
    steps = (1, *numbers(stride, 1, "stride")), padding, (1, *numbers(dilation, 1, "dilation"))
    return _conv(shapes, input.unsqueeze(-2), weight.unsqueeze(-2), bias, *steps, groups).squeeze(-2)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution (cross-correlation) over images. input: (N, C, H, W) or (C, H, W), weight: (O, C/groups, KH, KW).

    bias: (O,). padding: numbers, "valid" (none) or "same" (the output is as large as the input; stride 1 only).
    Returns (N, O, OH, OW), OH = (H + 2*padding - dilation*(KH - 1) - 1) // stride + 1.

    Raises: ShapeError, DtypeError; ArgumentError for a stride or dilation below 1, or a padding that is not possible.
    """
    if input.ndim == 3:
        return conv2d(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    shapes = f"conv2d: input {_sizes(input)}, weight {_sizes(weight)}, groups {groups}"
    if input.ndim != 4 or weight.ndim != 4:
        raise ShapeError(f"{shapes}: expected (N, C, H, W) and (O, C/groups, KH, KW)")
    return _conv(shapes, input, weight, bias, stride, padding, dilation, groups)


def _conv(
    shapes: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Padding,
    dilation: Size,
    groups: int,
) -> Tensor:
    name = shapes.partition(":")[0]
    one_dtype(name, input, weight, bias)
    out, channels = weight.shape[:2]
    if groups < 1 or out % groups or input.shape[1] != channels * groups:
        raise ShapeError(f"{shapes}: input has {input.shape[1]} channels, weight takes {channels} in each group")
    if bias is not None and tuple(bias.shape) != (out,):
        raise ShapeError(f"{shapes}: bias {_sizes(bias)}, expected {(out,)}")
    kernel = (weight.shape[2], weight.shape[3])
    if isinstance(padding, str):
        input, padding = _named_padding(name, input, kernel, stride, padding, pair(dilation, "dilation"))
    how = walk(name, (input.shape[2], input.shape[3]), kernel, stride, padding, dilation)
    return apply(
        conv.conv2d,
        (input, weight, bias),
        stride=how.stride,
        padding=how.padding,
        dilation=how.dilation,
        groups=groups,
    )


def _named_padding(
    name: str, input: Tensor, kernel: tuple[int, int], stride: Size, padding: str, dilation: tuple[int, int]
) -> tuple[Tensor, Size]:
    if padding == "valid":
        return input, 0
    if padding != "same":
        raise ArgumentError(f"{name}: padding is a number, 'valid' or 'same', not {padding!r}")
    if pair(stride, "stride") != (1, 1):
        raise ArgumentError(f"{name}: padding='same' needs stride 1, got {stride}")
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if total[0] % 2 or total[1] % 2:  # what cannot be halved goes to the end
        input = pad(input, (0, total[1] % 2, 0, total[0] % 2))
    return input, (total[0] // 2, total[1] // 2)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Tensor:
    """The transpose of conv1d. input: (N, C, L) or (C, L), weight: (C, O/groups, K), bias: (O,).

    Returns (N, O, OL), OL = (L - 1)*stride - 2*padding + dilation*(K - 1) + output_padding + 1.

    Raises: ShapeError, DtypeError; ArgumentError for steps that are too small, or too large an output_padding.
    """
    if input.ndim == 2:
        lines = input.unsqueeze(0)
        return conv_transpose1d(lines, weight, bias, stride, padding, output_padding, groups, dilation).squeeze(0)
    shapes = f"conv_transpose1d: input {_sizes(input)}, weight {_sizes(weight)}, groups {groups}"
    if input.ndim != 3 or weight.ndim != 3:
        raise ShapeError(f"{shapes}: expected (N, C, L) and (C, O/groups, K)")
    return _conv_transpose(
        shapes,
        input.unsqueeze(-2),
        weight.unsqueeze(-2),
        bias,
        (1, *numbers(stride, 1, "stride")),
        (0, *numbers(padding, 1, "padding")),
        (0, *numbers(output_padding, 1, "output_padding")),
        groups,
        (1, *numbers(dilation, 1, "dilation")),
    ).squeeze(-2)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Tensor:
    """The transpose of conv2d: what its gradient does to images. input: (N, C, H, W) or (C, H, W).

    weight: (C, O/groups, KH, KW); bias: (O,).
    Returns (N, O, OH, OW), OH = (H - 1)*stride - 2*padding + dilation*(KH - 1) + output_padding + 1.

    Raises: ShapeError, DtypeError; ArgumentError for steps that are too small, or too large an output_padding.
    """
    if input.ndim == 3:
        images = input.unsqueeze(0)
        return conv_transpose2d(images, weight, bias, stride, padding, output_padding, groups, dilation).squeeze(0)
    shapes = f"conv_transpose2d: input {_sizes(input)}, weight {_sizes(weight)}, groups {groups}"
    if input.ndim != 4 or weight.ndim != 4:
        raise ShapeError(f"{shapes}: expected (N, C, H, W) and (C, O/groups, KH, KW)")
    return _conv_transpose(shapes, input, weight, bias, stride, padding, output_padding, groups, dilation)


def _conv_transpose(
    shapes: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size,
    output_padding: Size,
    groups: int,
    dilation: Size,
) -> Tensor:
    name = shapes.partition(":")[0]
    one_dtype(name, input, weight, bias)
    channels = weight.shape[0]
    if groups < 1 or channels % groups or input.shape[1] != channels:
        raise ShapeError(f"{shapes}: input has {input.shape[1]} channels, weight takes {channels}")
    if bias is not None and tuple(bias.shape) != (weight.shape[1] * groups,):
        raise ShapeError(f"{shapes}: bias {_sizes(bias)}, expected {(weight.shape[1] * groups,)}")
    steps = pair(stride, "stride"), pair(padding, "padding"), pair(dilation, "dilation")
    extra = pair(output_padding, "output_padding")
    kernel = tuple(weight.shape[2:])
    if min(*steps[0], *steps[2], *kernel) < 1 or min(*steps[1], *extra) < 0:
        raise ArgumentError(f"{name}: too small: {kernel=}, {stride=}, {padding=}, {output_padding=}, {dilation=}")
    if any(e >= max(s, d) for e, s, d in zip(extra, steps[0], steps[2], strict=True)):
        raise ArgumentError(
            f"{name}: output_padding {output_padding} is not less than stride {stride} or dilation {dilation}"
        )
    size = tuple(
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, k, s, p, d, e in zip(input.shape[2:], kernel, *steps, extra, strict=True)
    )
    if min(size) < 1:
        raise ShapeError(f"{shapes}, padding {padding}: the output would be {size}")
    return apply(
        conv.conv_transpose2d,
        (input, weight, bias),
        size=size,
        stride=steps[0],
        padding=steps[1],
        dilation=steps[2],
        groups=groups,
    )


def _sizes(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
