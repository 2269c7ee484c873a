"""Patches of images, as columns and as channels."""

from __future__ import annotations

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.functional._check import Size, pair, walk
from ddp.ops import patches


def unfold(input: Tensor, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1) -> Tensor:
    """The patches under a moving window as columns. input: (N, C, H, W) or (C, H, W).

    Returns (N, C * KH * KW, L), L = OH * OW with conv2d's sizes.

    Raises: ShapeError; ArgumentError for a kernel, stride or dilation below 1, or a negative padding.
    """
    if input.ndim == 3:
        return unfold(input.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    if input.ndim != 4:
        raise ShapeError(f"unfold: input {tuple(input.shape)}: expected (N, C, H, W) or (C, H, W)")
    image = (input.shape[2], input.shape[3])
    how = walk("unfold", image, pair(kernel_size, "kernel_size"), stride, padding, dilation)
    return apply(patches.im2col, (input,), walk=how)


def fold(
    input: Tensor, output_size: Size, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1
) -> Tensor:
    """Columns added up where unfold reads them. input: (N, C * KH * KW, L) or (C * KH * KW, L).

    Returns (N, C, *output_size).

    Raises: ShapeError if the columns are not those of such images; ArgumentError as unfold.
    """
    if input.ndim == 2:
        return fold(input.unsqueeze(0), output_size, kernel_size, dilation, padding, stride).squeeze(0)
    if input.ndim != 3:
        raise ShapeError(f"fold: input {tuple(input.shape)}: expected (N, C * KH * KW, L) or (C * KH * KW, L)")
    image = pair(output_size, "output_size")
    how = walk("fold", image, pair(kernel_size, "kernel_size"), stride, padding, dilation)
    if input.shape[1] % how.elements:
        raise ShapeError(f"fold: input {tuple(input.shape)}: kernel {how.kernel} does not divide {input.shape[1]}")
    if input.shape[2] != how.out[0] * how.out[1]:
        raise ShapeError(
            f"fold: input {tuple(input.shape)}: images of {image} have {how.out[0]} x {how.out[1]} patches, "
            f"not {input.shape[2]}"
        )
    return apply(patches.col2im, (input,), walk=how)


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """Channels laid out as pixels. input: (..., C * r * r, H, W), r = upscale_factor; returns (..., C, H * r, W * r).

    Raises: ShapeError unless r * r divides the channels; ArgumentError for a factor below 1.
    Source: Shi et al. 2016, arXiv:1609.05158.
    """
    r, lead = upscale_factor, tuple(input.shape[:-3])
    channels, h, w = _image("pixel_shuffle", input, r)
    if channels % (r * r):
        raise ShapeError(f"pixel_shuffle: input {tuple(input.shape)}: {r} * {r} does not divide {channels} channels")
    n = len(lead)
    x = input.reshape(*lead, channels // (r * r), r, r, h, w)
    return x.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2).reshape(*lead, channels // (r * r), h * r, w * r)


def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """The reverse of pixel_shuffle. input: (..., C, H * r, W * r); returns (..., C * r * r, H, W).

    Raises: ShapeError unless r divides height and width; ArgumentError for a factor below 1.
    """
    r, lead = downscale_factor, tuple(input.shape[:-3])
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
