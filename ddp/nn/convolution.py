"""Convolutions and their transposes.

1d convolutions run as 2d ones of height 1. conv3d runs conv2d, with the planes under the kernel as channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, ShapeError
from ddp.nn import init
from ddp.nn.module import Layer
from ddp.nn.padding import pad
from ddp.nn.validation import Size, numbers, one_dtype, positions, window_of
from ddp.ops import convolution
from ddp.ops.convolution import Pair

Padding = Size | str
_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
_SIZES = {1: ("L", "K"), 2: ("H, W", "KH, KW"), 3: ("D, H, W", "KD, KH, KW")}


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """1d convolution. input: (N, C, L) or (C, L), weight: (O, C/groups, K), bias: (O,).

    padding: a number, "valid" (none) or "same" (the output is as long as the input; stride 1 only).
    Returns (N, O, OL), OL = (L + 2*padding - dilation*(K - 1) - 1) // stride + 1.

    Raises: ShapeError; DtypeError; ArgumentError for a kernel, stride or dilation below 1, a padding that is not
    possible, or a sequence of the wrong length.
    """
    return _conv("conv1d", (input, weight, bias), stride, padding, dilation, groups)


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

    Raises: ShapeError; DtypeError; ArgumentError for a kernel, stride or dilation below 1, a padding that is not
    possible, or a sequence of the wrong length.
    """
    return _conv("conv2d", (input, weight, bias), stride, padding, dilation, groups)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """3d convolution. input: (N, C, D, H, W) or (C, D, H, W), weight: (O, C/groups, KD, KH, KW), bias: (O,).

    Computed by conv2d, with the KD planes under the kernel as channels: needs memory for KD times the input.
    padding: as in conv2d. Returns (N, O, OD, OH, OW), with conv2d's sizes.

    Raises: ShapeError; DtypeError; ArgumentError for a kernel, stride or dilation below 1, a padding that is not
    possible, or a sequence of the wrong length.
    """
    return _conv("conv3d", (input, weight, bias), stride, padding, dilation, groups)


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

    Raises: ShapeError; DtypeError; ArgumentError for a kernel, stride or dilation below 1, a negative padding, an
    output_padding that is negative or not below the larger of stride and dilation, or a sequence of the wrong length.
    """
    return _conv("conv_transpose1d", (input, weight, bias), stride, padding, dilation, groups, output_padding)


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
    """The transpose of conv2d: maps images as the backward of conv2d does. input: (N, C, H, W) or (C, H, W).

    weight: (C, O/groups, KH, KW); bias: (O,).
    Returns (N, O, OH, OW), OH = (H - 1)*stride - 2*padding + dilation*(KH - 1) + output_padding + 1.

    Raises: ShapeError; DtypeError; ArgumentError for a kernel, stride or dilation below 1, a negative padding, an
    output_padding that is negative or not below the larger of stride and dilation, or a sequence of the wrong length.
    """
    return _conv("conv_transpose2d", (input, weight, bias), stride, padding, dilation, groups, output_padding)


def _conv(
    name: str,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    stride: Size,
    padding: Padding,
    dilation: Size,
    groups: int,
    output_padding: Size | None = None,
) -> Tensor:
    """Computes a 1d to 3d convolution, or with output_padding a transposed one. tensors: input, weight, bias."""
    input, weight, bias = tensors
    dims = int(name[-2])
    transposed = output_padding is not None
    if input.ndim == dims + 1:
        batch = input.unsqueeze(0), weight, bias
        return _conv(name, batch, stride, padding, dilation, groups, output_padding).squeeze(0)
    shapes = f"{name}: input {tuple(input.shape)}, weight {tuple(weight.shape)}, groups {groups}"
    if input.ndim != dims + 2 or weight.ndim != dims + 2:
        lengths, window = _SIZES[dims]
        layout = "(C, O/groups" if transposed else "(O, C/groups"
        raise ShapeError(f"{shapes}: expected (N, C, {lengths}) and {layout}, {window})")
    one_dtype(name, input, weight, bias)
    first = weight.shape[0]
    second = weight.shape[1] * groups
    channels, out = (first, second) if transposed else (second, first)
    if groups < 1 or first % groups or input.shape[1] != channels:
        raise ShapeError(f"{shapes}: input has {input.shape[1]} channels, weight takes {channels}")
    if bias is not None and tuple(bias.shape) != (out,):
        raise ShapeError(f"{shapes}: bias {tuple(bias.shape)}, expected {(out,)}")
    if dims == 3:
        return _conv_volumes(input, weight, bias, stride, padding, dilation, groups)
    images, filters = (input, weight) if dims == 2 else (input.unsqueeze(-2), weight.unsqueeze(-2))
    kernel = (filters.shape[2], filters.shape[3])
    strides = _as_pair(dims, stride, "stride", 1)
    dilations = _as_pair(dims, dilation, "dilation", 1)
    if isinstance(padding, str) and not transposed:
        images, pads = _named_padding(name, images, kernel, strides, padding, dilations)
    else:
        pads = _as_pair(dims, padding, "padding", 0)
    options: dict[str, Any] = {"stride": strides, "padding": pads, "dilation": dilations, "groups": groups}
    if output_padding is None:
        window_of(name, (images.shape[2], images.shape[3]), kernel, strides, pads, dilations)
        result: Tensor = apply(convolution.conv2d, (images, filters, bias), **options)
    else:
        extra = _as_pair(dims, output_padding, "output_padding", 0)
        if min(*strides, *dilations, *kernel) < 1 or min(*pads, *extra) < 0:
            raise ArgumentError(f"{name}: too small: {kernel=}, {stride=}, {padding=}, {output_padding=}, {dilation=}")
        if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
            raise ArgumentError(
                f"{name}: output_padding {output_padding} is not less than stride {stride} or dilation {dilation}"
            )
        least = _transposed_size(images.shape[2:], kernel, strides, pads, dilations)
        size = tuple(n + e for n, e in zip(least, extra, strict=True))
        if min(size) < 1:
            raise ShapeError(f"{shapes}, padding {padding}: the output would be {size}")
        result = apply(convolution.conv_transpose2d, (images, filters, bias), size=size, **options)
    return result if dims == 2 else result.squeeze(-2)


def _conv_volumes(
    input: Tensor, weight: Tensor, bias: Any, stride: Size, padding: Padding, dilation: Size, groups: int
) -> Tensor:
    """Computes conv3d by conv2d: the planes under the kernel at each depth are the channels."""
    kernel = tuple(weight.shape[2:])
    strides = numbers(stride, 3, "stride")
    dilations = numbers(dilation, 3, "dilation")
    if isinstance(padding, str):
        input, pads = _named_padding("conv3d", input, kernel, strides, padding, dilations)
    else:
        pads = numbers(padding, 3, "padding")
    positions("conv3d", tuple(input.shape[2:]), kernel, strides, pads, dilations)
    volume = pad(input, (0, 0, 0, 0, pads[0], pads[0]))
    reach = dilations[0] * (kernel[0] - 1) + 1
    planes = volume.unfold(2, reach, strides[0])[..., :: dilations[0]]  # (N, C, OD, H, W, KD)
    images = planes.permute(0, 2, 1, 5, 3, 4).flatten(2, 3).flatten(0, 1)
    out = conv2d(images, weight.flatten(1, 2), bias, strides[1:], pads[1:], dilations[1:], groups)
    return out.unflatten(0, (len(input), -1)).movedim(1, 2)


def _transposed_size(image: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> tuple[int, ...]:
    """The output size of a transposed convolution without output_padding."""
    axes = zip(image, kernel, stride, padding, dilation, strict=True)
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in axes)


def _as_pair(dims: int, value: Padding, name: str, fill: int) -> Pair:
    """`value` as two numbers, one for each dimension of an image. If dims is 1, the first number is `fill`."""
    values = numbers(value, dims, name)
    return (fill, *values)[-2:]  # type: ignore[return-value]  # two numbers


def _named_padding(
    name: str, input: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: str, dilation: tuple[int, ...]
) -> tuple[Tensor, Any]:
    """Returns the input and the padding for "valid" or "same": a number for each dimension of `kernel`.

    The input itself is padded where "same" needs one element more at the end than at the beginning.
    """
    if padding == "valid":
        return input, (0,) * len(kernel)
    if padding != "same":
        raise ArgumentError(f"{name}: padding is a number, 'valid' or 'same', not {padding!r}")
    if any(step != 1 for step in stride):
        raise ArgumentError(f"{name}: padding='same' needs stride 1, got {stride}")
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(n % 2 for n in total):  # the odd element is padded at the end
        input = pad(input, [extra for n in reversed(total) for extra in (0, n % 2)])
    return input, tuple(n // 2 for n in total)


class _Conv(Layer, shown="in_channels out_channels kernel_size= stride="):
    _dims: ClassVar[int]
    _transposed: ClassVar[bool] = False
    _usual: ClassVar = {"padding": 0, "dilation": 1, "output_padding": 0, "groups": 1, "bias": True}
    _usual["padding_mode"] = "zeros"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Padding = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        _output_padding: Size = 0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ArgumentError(f"{name}: groups {groups} does not divide {in_channels} and {out_channels} channels")
        named = isinstance(padding, str) and not self._transposed
        if named and padding not in ("valid", "same"):
            raise ArgumentError(f"{name}: padding is a number, 'valid' or 'same', not {padding!r}")
        if padding_mode not in (_PADDING_MODES[:1] if self._transposed else _PADDING_MODES):
            raise ArgumentError(f"{name}: padding_mode {padding_mode!r} is not supported")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = numbers(kernel_size, self._dims, "kernel_size")
        self.stride = numbers(stride, self._dims, "stride")
        self.padding: Any = padding if named else numbers(padding, self._dims, "padding")
        if self.padding == "same" and max(self.stride) > 1:
            raise ArgumentError(f"{name}: padding='same' needs stride 1, got {self.stride}")
        self.dilation = numbers(dilation, self._dims, "dilation")
        self.output_padding = numbers(_output_padding, self._dims, "output_padding")
        self.groups = groups
        self.padding_mode = padding_mode
        first, second = (in_channels, out_channels) if self._transposed else (out_channels, in_channels)
        shape = (first, second // groups, *self.kernel_size)
        self._register_empty(device, dtype, weight=shape, bias=(out_channels,) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights and biases."""
        init.reset_affine(self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, L) or (C, L) in one dimension, (N, C, H, W) or (C, H, W) in two, and so on."""
        return self._conv_forward(input, self.weight, self.bias)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolves with the given weight and bias. The name is PyTorch's: users' layers call and override it."""
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = pad(input, self._widths(), mode=self.padding_mode)
            padding = 0
        return _conv(f"conv{self._dims}d", (input, weight, bias), self.stride, padding, self.dilation, self.groups)

    def _widths(self) -> list[int]:
        """The padding before and after each dimension, as `pad` takes it: the last dimension first."""
        widths: list[int] = []
        for axis in reversed(range(self._dims)):
            if isinstance(self.padding, str):
                total = self.dilation[axis] * (self.kernel_size[axis] - 1) if self.padding == "same" else 0
                widths += total // 2, total - total // 2
            else:
                widths += self.padding[axis], self.padding[axis]
        return widths


class Conv1d(_Conv, dims=1):
    """1d convolution. input: (N, in_channels, L); returns (N, out_channels, OL), see functional.conv1d.

    weight: (out_channels, in_channels/groups, K); bias: (out_channels,). padding: a number, "valid" or "same";
    padding_mode: "zeros", "reflect", "replicate" or "circular".

    Raises: ArgumentError unless groups divides both channel numbers, for a padding or padding_mode that is not
    supported, and for a sequence of the wrong length. When called: ShapeError, DtypeError, ArgumentError.
    """


class Conv2d(_Conv, dims=2):
    """Convolution over images. input: (N, in_channels, H, W); returns (N, out_channels, OH, OW), see functional.conv2d.

    weight: (out_channels, in_channels/groups, KH, KW); bias: (out_channels,). padding: numbers, "valid" or "same";
    padding_mode: "zeros", "reflect", "replicate" or "circular".

    Raises: ArgumentError unless groups divides both channel numbers, for a padding or padding_mode that is not
    supported, and for a sequence of the wrong length. When called: ShapeError, DtypeError, ArgumentError.
    """


class Conv3d(_Conv, dims=3):
    """3d convolution. input: (N, in_channels, D, H, W); returns (N, out_channels, OD, OH, OW), see
    functional.conv3d.

    weight: (out_channels, in_channels/groups, KD, KH, KW); bias: (out_channels,). padding: numbers, "valid" or "same";
    padding_mode: "zeros", "reflect", "replicate" or "circular".

    Raises: ArgumentError unless groups divides both channel numbers, for a padding or padding_mode that is not
    supported, and for a sequence of the wrong length. When called: ShapeError, DtypeError, ArgumentError.
    """


class _Transposed(_Conv, transposed=True):
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
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
            _output_padding=output_padding,
        )

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """input: as in Conv1d or Conv2d. output_size: (..., OL) or (..., OH, OW), instead of output_padding.

        Raises: ShapeError if no output_padding below the stride gives that size.
        """
        extra = self.output_padding
        if output_size is not None:
            steps = self.kernel_size, self.stride, self.padding, self.dilation
            least = _transposed_size(input.shape[-self._dims :], *steps)
            most = tuple(n + s - 1 for n, s in zip(least, self.stride, strict=True))
            extra = tuple(n - a for a, n in zip(least, tuple(output_size)[-self._dims :], strict=False))
            if len(extra) < self._dims or any(not 0 <= e < s for e, s in zip(extra, self.stride, strict=True)):
                raise ShapeError(
                    f"{type(self).__name__}: output_size {tuple(output_size)} for input {tuple(input.shape)}: "
                    f"expected {least} to {most}"
                )
        tensors = (input, self.weight, self.bias)
        name = f"conv_transpose{self._dims}d"
        return _conv(name, tensors, self.stride, self.padding, self.dilation, self.groups, extra)


class ConvTranspose1d(_Transposed, dims=1):
    """The transpose of Conv1d. input: (N, in_channels, L); returns (N, out_channels, OL), see conv_transpose1d.

    weight: (in_channels, out_channels/groups, K); bias: (out_channels,).

    Raises: ArgumentError unless groups divides both channel numbers, for a padding_mode other than "zeros", and for a
    sequence of the wrong length; DtypeError for a padding that is not made of numbers. When called: ShapeError,
    DtypeError, ArgumentError.
    """


class ConvTranspose2d(_Transposed, dims=2):
    """The transpose of Conv2d. input: (N, in_channels, H, W); returns (N, out_channels, OH, OW), see conv_transpose2d.

    weight: (in_channels, out_channels/groups, KH, KW); bias: (out_channels,).

    Raises: ArgumentError unless groups divides both channel numbers, for a padding_mode other than "zeros", and for a
    sequence of the wrong length; DtypeError for a padding that is not made of numbers. When called: ShapeError,
    DtypeError, ArgumentError.
    """
