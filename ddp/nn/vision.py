"""Functions and layers that resize images, copy patches of images to columns, and rearrange channels as pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn.module import FunctionModule
from ddp.nn.validation import Size, pair, window_of
from ddp.ops import convolution, pooling

# The numbers of dimensions that the input may have, by mode.
MODES = {"nearest": (3, 4), "nearest-exact": (3, 4), "linear": (3,), "bilinear": (4,)}
SHAPES = {3: "(N, C, L)", 4: "(N, C, H, W)"}


def interpolate(
    input: Tensor,
    size: Size | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Resizes `input`. input: (N, C, L) for nearest, nearest-exact and linear; (N, C, H, W) for nearest, nearest-exact
    and bilinear.

    size: the new (L,) or (H, W). scale_factor: given instead of size; the new size is the old one times this factor,
    rounded down.
    align_corners: aligns the centres of the corner elements of both images, not their outer corners (not for nearest).
    recompute_scale_factor: computes positions from the sizes, not from scale_factor.

    Raises: ShapeError for another shape, and if the input or the result is empty; DtypeError unless floating;
    ArgumentError for another mode, for antialias, for an align_corners that is not None with nearest, for both or
    neither of size and scale_factor, for a sequence of the wrong length, or for size with recompute_scale_factor.
    """
    if mode not in MODES:
        raise ArgumentError(f"interpolate: the mode is one of {', '.join(MODES)}, not {mode!r}")
    if antialias:
        raise ArgumentError(f"interpolate: antialias=True is not supported, in mode {mode!r}")
    if align_corners is not None and mode.startswith("nearest"):
        raise ArgumentError(f"interpolate: align_corners is for linear and bilinear, not for {mode!r}")
    if input.ndim not in MODES[mode]:
        expected = " or ".join(SHAPES[n] for n in MODES[mode])
        raise ShapeError(f"interpolate: input {tuple(input.shape)}: {mode!r} expects {expected}")
    if not input.is_floating_point():
        raise DtypeError(f"interpolate: the input is {input.dtype}: convert to a floating dtype")
    old = tuple(input.shape[2:])
    new, scales = _sizes(old, size, scale_factor)
    if recompute_scale_factor:
        if size is not None:
            raise ArgumentError("interpolate: recompute_scale_factor goes with scale_factor, not with size")
        scales = [None] * len(old)
    if min(*old, *new) < 1:
        raise ShapeError(f"interpolate: images of {old} to {new}: neither may be empty")
    options = {"mode": mode, "align_corners": bool(align_corners)}
    if input.ndim == 3:
        lines = apply(pooling.interpolate, (input.unsqueeze(-2),), size=(1, *new), scales=(None, *scales), **options)
        return lines.squeeze(-2)
    return apply(pooling.interpolate, (input,), size=tuple(new), scales=tuple(scales), **options)


def _sizes(
    old: tuple[int, ...], size: Size | None, scale_factor: float | Sequence[float] | None
) -> tuple[list[int], list[float | None]]:
    if (size is None) == (scale_factor is None):
        raise ArgumentError(f"interpolate: give size or scale_factor, one of them, got {size=}, {scale_factor=}")
    values: Any = scale_factor if size is None else size
    factors = list(values) if isinstance(values, Sequence) else [values] * len(old)
    if len(factors) != len(old):
        raise ArgumentError(f"interpolate: {values} for images of {old}: expected one number or {len(old)}")
    if scale_factor is None:
        return factors, [None] * len(old)
    return [math.floor(n * float(factor)) for n, factor in zip(old, factors, strict=True)], [float(f) for f in factors]


def unfold(input: Tensor, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1) -> Tensor:
    """Returns the patches under a moving window as columns. input: (N, C, H, W) or (C, H, W).

    Returns (N, C * KH * KW, L), for (C, H, W) without N; L = OH * OW, the output sizes of conv2d.
    Raises: ShapeError; ArgumentError for a kernel, stride or dilation below 1, a negative padding, or a sequence of the
    wrong length.
    """
    if input.ndim == 3:
        return unfold(input.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    if input.ndim != 4:
        raise ShapeError(f"unfold: input {tuple(input.shape)}: expected (N, C, H, W) or (C, H, W)")
    image = (input.shape[2], input.shape[3])
    window = window_of("unfold", image, pair(kernel_size, "kernel_size"), stride, padding, dilation)
    return apply(convolution.im2col, (input,), window=window)


def fold(
    input: Tensor, output_size: Size, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1
) -> Tensor:
    """Adds up columns at the positions where unfold reads. input: (N, C * KH * KW, L) or (C * KH * KW, L).

    Returns (N, C, *output_size), or without N if the input has no N.

    Raises: ShapeError if input does not have the shape that unfold returns for images of output_size; ArgumentError as
    in unfold.
    """
    if input.ndim == 2:
        return fold(input.unsqueeze(0), output_size, kernel_size, dilation, padding, stride).squeeze(0)
    if input.ndim != 3:
        raise ShapeError(f"fold: input {tuple(input.shape)}: expected (N, C * KH * KW, L) or (C * KH * KW, L)")
    image = pair(output_size, "output_size")
    window = window_of("fold", image, pair(kernel_size, "kernel_size"), stride, padding, dilation)
    if input.shape[1] % window.elements:
        raise ShapeError(f"fold: input {tuple(input.shape)}: kernel {window.kernel} does not divide {input.shape[1]}")
    if input.shape[2] != window.out[0] * window.out[1]:
        raise ShapeError(
            f"fold: input {tuple(input.shape)}: images of {image} have {window.out[0]} x {window.out[1]} patches, "
            f"not {input.shape[2]}"
        )
    return apply(convolution.col2im, (input,), window=window)


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """Rearranges channels as pixels. input: (..., C * r * r, H, W), r = upscale_factor; returns (..., C, H * r, W * r).

    Raises: ShapeError unless r * r divides the channels, or below three dimensions; ArgumentError for a factor below 1.
    Source: Shi et al. 2016, arXiv:1609.05158.
    """
    r = upscale_factor
    lead = tuple(input.shape[:-3])
    channels, h, w = _image("pixel_shuffle", input, r)
    if channels % (r * r):
        raise ShapeError(f"pixel_shuffle: input {tuple(input.shape)}: {r} * {r} does not divide {channels} channels")
    n = len(lead)
    x = input.reshape(*lead, channels // (r * r), r, r, h, w)
    return x.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2).reshape(*lead, channels // (r * r), h * r, w * r)


def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """The reverse of pixel_shuffle. input: (..., C, H * r, W * r); returns (..., C * r * r, H, W).

    Raises: ShapeError unless r divides height and width, or below three dimensions; ArgumentError for a factor below 1.
    """
    r = downscale_factor
    lead = tuple(input.shape[:-3])
    channels, h, w = _image("pixel_unshuffle", input, r)
    if h % r or w % r:
        raise ShapeError(f"pixel_unshuffle: input {tuple(input.shape)}: {r} does not divide {(h, w)}")
    n = len(lead)
    x = input.reshape(*lead, channels, h // r, r, w // r, r)
    return x.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3).reshape(*lead, channels * r * r, h // r, w // r)


def _image(name: str, input: Tensor, factor: int) -> tuple[int, int, int]:
    if input.ndim < 3:
        raise ShapeError(f"{name}: input {tuple(input.shape)}: expected (..., C, H, W)")
    if factor < 1:
        raise ArgumentError(f"{name}: the factor is at least 1, not {factor}")
    channels, h, w = input.shape[-3:]
    return channels, h, w


Factor = float | Sequence[float]


class Upsample(FunctionModule, function=interpolate, omitted=("antialias",)):
    """Resizes the input. input: (N, C, L) or (N, C, H, W); see functional.interpolate.

    Raises: ShapeError, DtypeError, ArgumentError when called.
    """

    def _init(self, **settings: Any) -> None:
        factor = settings["scale_factor"]
        if factor is not None:
            factor = tuple([float(number) for number in factor]) if isinstance(factor, Sequence) else float(factor)
        super()._init(**{**settings, "scale_factor": factor})

    def extra_repr(self) -> str:
        size = f"size={self.size}" if self.scale_factor is None else f"scale_factor={self.scale_factor}"
        return f"{size}, mode={self.mode!r}"


class UpsamplingNearest2d(Upsample):
    """Upsample with mode="nearest". input: (N, C, H, W)."""

    def __init__(self, size: Size | None = None, scale_factor: Factor | None = None) -> None:
        super().__init__(size, scale_factor, mode="nearest")


class UpsamplingBilinear2d(Upsample):
    """Upsample with mode="bilinear" and align_corners=True. input: (N, C, H, W)."""

    def __init__(self, size: Size | None = None, scale_factor: Factor | None = None) -> None:
        super().__init__(size, scale_factor, mode="bilinear", align_corners=True)


class Unfold(FunctionModule, function=unfold):
    """Returns the patches under a moving window as columns. input: (N, C, H, W); returns (N, C * KH * KW, L).

    Raises: ShapeError, ArgumentError when called; see functional.unfold.
    """


class Fold(FunctionModule, function=fold):
    """Adds up columns at the positions where Unfold reads. input: (N, C * KH * KW, L); returns (N, C, *output_size).

    Raises: ShapeError, ArgumentError when called; see functional.fold.
    """


class PixelShuffle(FunctionModule, function=pixel_shuffle):
    """Rearranges channels as pixels. input: (..., C * r * r, H, W); returns (..., C, H * r, W * r).

    Raises: ShapeError, ArgumentError when called; see functional.pixel_shuffle.
    """


class PixelUnshuffle(FunctionModule, function=pixel_unshuffle):
    """The reverse of PixelShuffle. input: (..., C, H * r, W * r); returns (..., C * r * r, H, W).

    Raises: ShapeError, ArgumentError when called; see functional.pixel_unshuffle.
    """
