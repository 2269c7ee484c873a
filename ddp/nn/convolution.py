"""Convolutions and their transposes. In one dimension they are those of images one line high."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty
from ddp.errors import ArgumentError, ShapeError
from ddp.nn import init
from ddp.nn.module import Module
from ddp.nn.padding import pad
from ddp.nn.parameter import Parameter
from ddp.nn.validation import Size, numbers, one_dtype, pair, walk
from ddp.ops import convolution

Padding = Size | str
_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
_SIZES = {1: ("L", "K"), 2: ("H, W", "KH, KW")}


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
    return _conv(1, input, weight, bias, stride, padding, dilation, groups)


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
    return _conv(2, input, weight, bias, stride, padding, dilation, groups)


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
    return _conv_transpose(1, input, weight, bias, stride, padding, output_padding, groups, dilation)


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
    return _conv_transpose(2, input, weight, bias, stride, padding, output_padding, groups, dilation)


def _conv(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Padding,
    dilation: Size,
    groups: int,
) -> Tensor:
    if input.ndim == dims + 1:
        return _conv(dims, input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    name = f"conv{dims}d"
    shapes = f"{name}: input {tuple(input.shape)}, weight {tuple(weight.shape)}, groups {groups}"
    if input.ndim != dims + 2 or weight.ndim != dims + 2:
        lengths, window = _SIZES[dims]
        raise ShapeError(f"{shapes}: expected (N, C, {lengths}) and (O, C/groups, {window})")
    one_dtype(name, input, weight, bias)
    out, channels = weight.shape[:2]
    if groups < 1 or out % groups or input.shape[1] != channels * groups:
        raise ShapeError(f"{shapes}: input has {input.shape[1]} channels, weight takes {channels} in each group")
    if bias is not None and tuple(bias.shape) != (out,):
        raise ShapeError(f"{shapes}: bias {tuple(bias.shape)}, expected {(out,)}")
    step, spread = _as_pair(dims, stride, "stride", 1), _as_pair(dims, dilation, "dilation", 1)
    images, filters = (input, weight) if dims == 2 else (input.unsqueeze(-2), weight.unsqueeze(-2))
    kernel = (filters.shape[2], filters.shape[3])
    if isinstance(padding, str):
        images, padding = _named_padding(name, images, kernel, step, padding, spread)
    else:
        padding = _as_pair(dims, padding, "padding", 0)
    how = walk(name, (images.shape[2], images.shape[3]), kernel, step, padding, spread)
    steps = {"stride": how.stride, "padding": how.padding, "dilation": how.dilation}
    result: Tensor = apply(convolution.conv2d, (images, filters, bias), **steps, groups=groups)
    return result if dims == 2 else result.squeeze(-2)


def _conv_transpose(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size,
    output_padding: Size,
    groups: int,
    dilation: Size,
) -> Tensor:
    if input.ndim == dims + 1:
        options = stride, padding, output_padding, groups, dilation
        return _conv_transpose(dims, input.unsqueeze(0), weight, bias, *options).squeeze(0)
    name = f"conv_transpose{dims}d"
    shapes = f"{name}: input {tuple(input.shape)}, weight {tuple(weight.shape)}, groups {groups}"
    if input.ndim != dims + 2 or weight.ndim != dims + 2:
        lengths, window = _SIZES[dims]
        raise ShapeError(f"{shapes}: expected (N, C, {lengths}) and (C, O/groups, {window})")
    one_dtype(name, input, weight, bias)
    channels, out = weight.shape[0], weight.shape[1] * groups
    if groups < 1 or channels % groups or input.shape[1] != channels:
        raise ShapeError(f"{shapes}: input has {input.shape[1]} channels, weight takes {channels}")
    if bias is not None and tuple(bias.shape) != (out,):
        raise ShapeError(f"{shapes}: bias {tuple(bias.shape)}, expected {(out,)}")
    steps = (
        _as_pair(dims, stride, "stride", 1),
        _as_pair(dims, padding, "padding", 0),
        _as_pair(dims, dilation, "dilation", 1),
    )
    extra = _as_pair(dims, output_padding, "output_padding", 0)
    images, filters = (input, weight) if dims == 2 else (input.unsqueeze(-2), weight.unsqueeze(-2))
    kernel = tuple(filters.shape[2:])
    if min(*steps[0], *steps[2], *kernel) < 1 or min(*steps[1], *extra) < 0:
        raise ArgumentError(f"{name}: too small: {kernel=}, {stride=}, {padding=}, {output_padding=}, {dilation=}")
    if any(e >= max(s, d) for e, s, d in zip(extra, steps[0], steps[2], strict=True)):
        raise ArgumentError(
            f"{name}: output_padding {output_padding} is not less than stride {stride} or dilation {dilation}"
        )
    size = tuple(
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, k, s, p, d, e in zip(images.shape[2:], kernel, *steps, extra, strict=True)
    )
    if min(size) < 1:
        raise ShapeError(f"{shapes}, padding {padding}: the output would be {size}")
    how: dict[str, Any] = dict(zip(("stride", "padding", "dilation"), steps, strict=True))
    result: Tensor = apply(convolution.conv_transpose2d, (images, filters, bias), size=size, **how, groups=groups)
    return result if dims == 2 else result.squeeze(-2)


def _as_pair(dims: int, value: Size, name: str, fill: int) -> tuple[int, int]:
    """The numbers of both dimensions of an image; those of lines after `fill`."""
    values = numbers(value, dims, name)
    return (values[0], values[1]) if dims == 2 else (fill, values[0])


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
        if padding_mode not in (_PADDING_MODES[:1] if self.transposed else _PADDING_MODES):
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
        init.reset_affine(self.weight, self.bias)

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

    def _pad_input(self, input: Tensor) -> tuple[Tensor, tuple[int, ...] | str]:
        """`input` padded by `padding_mode` unless that is zeros, and the padding that is left to the convolution."""
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


class _Conv(_Convolution):
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

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, L) or (C, L) in one dimension, (N, C, H, W) or (C, H, W) in two."""
        input, padding = self._pad_input(input)
        return _conv(self.dims, input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class Conv1d(_Conv):
    """Convolution along lines. input: (N, in_channels, L); returns (N, out_channels, OL), see functional.conv1d.

    weight: (out_channels, in_channels/groups, K); bias: (out_channels,). padding: a number, "valid" or "same";
    padding_mode: "zeros", "reflect", "replicate" or "circular".

    Raises: ArgumentError unless groups divides both channel numbers; ShapeError, DtypeError when called.
    """

    dims = 1


class Conv2d(_Conv):
    """Convolution over images. input: (N, in_channels, H, W); returns (N, out_channels, OH, OW), see functional.conv2d.

    weight: (out_channels, in_channels/groups, KH, KW); bias: (out_channels,). padding: numbers, "valid" or "same";
    padding_mode: "zeros", "reflect", "replicate" or "circular".

    Raises: ArgumentError unless groups divides both channel numbers; ShapeError, DtypeError when called.
    """

    dims = 2


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

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """input: as Conv1d or Conv2d. output_size: (..., OL) or (..., OH, OW), instead of output_padding."""
        extra = self._extra_padding(input, output_size)
        steps = self.stride, self.padding, extra, self.groups, self.dilation
        return _conv_transpose(self.dims, input, self.weight, self.bias, *steps)

    def _extra_padding(self, input: Tensor, output_size: Sequence[int] | None) -> tuple[int, ...]:
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


class ConvTranspose2d(_Transposed):
    """The transpose of Conv2d. input: (N, in_channels, H, W); returns (N, out_channels, OH, OW), see conv_transpose2d.

    weight: (in_channels, out_channels/groups, KH, KW); bias: (out_channels,).

    Raises: ArgumentError unless groups divides both channel numbers; ShapeError, DtypeError when called.
    """

    dims = 2
