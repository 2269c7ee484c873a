"""Convolutions and their transposes. In one dimension they are those of images one line high."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.linear import reset_affine
from ddp.nn.module import Module
from ddp.nn.padding import pad
from ddp.nn.parameter import Parameter
from ddp.nn.validation import Size, numbers, one_dtype, pair, walk
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


FRAMES = ("reflect", "replicate", "circular")


class _Convolution(Module):
    """What all have: sizes per dimension, weight and bias."""

    dims: ClassVar[int]
    transposed: ClassVar[bool] = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size,
        padding: Size | str,
        output_padding: Size,
        dilation: Size,
        groups: int,
        bias: bool,
        padding_mode: str,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ArgumentError(f"{name}: groups {groups} does not divide {in_channels} and {out_channels} channels")
        if isinstance(padding, str) and padding not in ("valid", "same"):
            raise ArgumentError(f"{name}: padding is a number, 'valid' or 'same', not {padding!r}")
        if padding_mode not in ("zeros",) if self.transposed else padding_mode not in ("zeros", *FRAMES):
            raise ArgumentError(f"{name}: padding_mode {padding_mode!r} is not supported")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = numbers(kernel_size, self.dims, "kernel_size")
        self.stride = numbers(stride, self.dims, "stride")
        if padding == "same" and max(self.stride) > 1:
            raise ArgumentError(f"{name}: padding='same' needs stride 1, got {self.stride}")
        self.padding: Any = padding if isinstance(padding, str) else numbers(padding, self.dims, "padding")
        self.dilation = numbers(dilation, self.dims, "dilation")
        self.output_padding = numbers(output_padding, self.dims, "output_padding")
        self.groups = groups
        self.padding_mode = padding_mode
        first, second = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        shape = (first, second // groups, *self.kernel_size)
        self.weight = Parameter(empty(shape, device=device, dtype=dtype))
        self.register_parameter("bias", Parameter(empty(out_channels, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias anew."""
        reset_affine(self.weight, self.bias)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        zeros, ones = (0,) * self.dims, (1,) * self.dims
        if self.padding != zeros:
            text += f", padding={self.padding}"
        if self.dilation != ones:
            text += f", dilation={self.dilation}"
        if self.output_padding != zeros:
            text += f", output_padding={self.output_padding}"
        if self.groups != 1:
            text += f", groups={self.groups}"
        if self.bias is None:
            text += ", bias=False"
        return text if self.padding_mode == "zeros" else f"{text}, padding_mode={self.padding_mode}"

    def framed(self, input: Tensor) -> tuple[Tensor, tuple[int, ...] | str]:
        """`input` in its frame, and what padding is left to do."""
        if self.padding_mode == "zeros":
            return input, self.padding
        widths: list[int] = []
        for axis in reversed(range(self.dims)):
            if isinstance(self.padding, str):
                total = self.dilation[axis] * (self.kernel_size[axis] - 1) if self.padding == "same" else 0
                widths += total // 2, total - total // 2
            else:
                widths += self.padding[axis], self.padding[axis]
        return pad(input, widths, mode=self.padding_mode), (0,) * self.dims


class _Forward(_Convolution):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        steps = kernel_size, stride, padding, 0, dilation
        super().__init__(in_channels, out_channels, *steps, groups, bias, padding_mode, device, dtype)


class Conv1d(_Forward):
    """Convolution along lines. input: (N, in_channels, L); returns (N, out_channels, OL), see functional.conv1d.

    weight: (out_channels, in_channels/groups, K); bias: (out_channels,). padding: a number, "valid" or "same";
    padding_mode: "zeros", "reflect", "replicate" or "circular".

    Raises: ArgumentError unless groups divides both channel numbers; ShapeError, DtypeError when called.
    """

    dims = 1

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, L) or (C, L)."""
        input, padding = self.framed(input)
        return conv1d(input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class Conv2d(_Forward):
    """Convolution over images. input: (N, in_channels, H, W); returns (N, out_channels, OH, OW), see functional.conv2d.

    weight: (out_channels, in_channels/groups, KH, KW); bias: (out_channels,). padding: numbers, "valid" or "same";
    padding_mode: "zeros", "reflect", "replicate" or "circular".

    Raises: ArgumentError unless groups divides both channel numbers; ShapeError, DtypeError when called.
    """

    dims = 2

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, H, W) or (C, H, W)."""
        input, padding = self.framed(input)
        return conv2d(input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class _Transposed(_Convolution):
    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        steps = kernel_size, stride, padding, output_padding, dilation
        super().__init__(in_channels, out_channels, *steps, groups, bias, padding_mode, device, dtype)

    def extra(self, input: Tensor, output_size: Sequence[int] | None) -> tuple[int, ...]:
        """The output_padding that gives `output_size`. Raises: ShapeError if none does."""
        if output_size is None:
            return self.output_padding
        wanted = tuple(output_size)[-self.dims :]
        steps = self.stride, self.padding, self.dilation, self.kernel_size
        least = tuple(
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, s, p, d, k in zip(input.shape[-self.dims :], *steps, strict=True)
        )
        most = tuple(n + s - 1 for n, s in zip(least, self.stride, strict=True))
        if len(output_size) < self.dims or any(not a <= n <= b for a, n, b in zip(least, wanted, most, strict=True)):
            raise ShapeError(
                f"{type(self).__name__}: output_size {tuple(output_size)} for input {tuple(input.shape)}: "
                f"expected {least} to {most}"
            )
        return tuple(n - a for a, n in zip(least, wanted, strict=True))


class ConvTranspose1d(_Transposed):
    """The transpose of Conv1d. input: (N, in_channels, L); returns (N, out_channels, OL), see conv_transpose1d.

    weight: (in_channels, out_channels/groups, K); bias: (out_channels,).

    Raises: ArgumentError unless groups divides both channel numbers; ShapeError, DtypeError when called.
    """

    dims = 1

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """input: (N, C, L) or (C, L). output_size: (..., OL), instead of output_padding."""
        extra = self.extra(input, output_size)
        steps = self.stride, self.padding, extra, self.groups, self.dilation
        return conv_transpose1d(input, self.weight, self.bias, *steps)


class ConvTranspose2d(_Transposed):
    """The transpose of Conv2d. input: (N, in_channels, H, W); returns (N, out_channels, OH, OW), see conv_transpose2d.

    weight: (in_channels, out_channels/groups, KH, KW); bias: (out_channels,).

    Raises: ArgumentError unless groups divides both channel numbers; ShapeError, DtypeError when called.
    """

    dims = 2

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """input: (N, C, H, W) or (C, H, W). output_size: (..., OH, OW), instead of output_padding."""
        extra = self.extra(input, output_size)
        steps = self.stride, self.padding, extra, self.groups, self.dilation
        return conv_transpose2d(input, self.weight, self.bias, *steps)
