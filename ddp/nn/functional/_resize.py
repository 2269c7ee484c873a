"""Images at another size as a function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.nn.functional._check import Size
from ddp.ops import resize

# Dimensions of the input.
MODES = {"nearest": (3, 4, 5), "nearest-exact": (3, 4, 5), "linear": (3,), "bilinear": (4,), "trilinear": (5,)}
SHAPES = {3: "(N, C, L)", 4: "(N, C, H, W)", 5: "(N, C, D, H, W)"}


def interpolate(
    input: Tensor,
    size: Size | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """`input` at another size. input: (N, C, L), (N, C, H, W) or (N, C, D, H, W) for nearest and nearest-exact; the
    first for linear, the second for bilinear, the third for trilinear.

    size: the new (L,), (H, W) or (D, H, W); or scale_factor: what the old is multiplied by, rounded down.
    align_corners: the centres of the corner elements stay where they are, not their corners (not for nearest). With
    recompute_scale_factor positions are computed from the sizes, not from scale_factor.

    Raises: ShapeError; DtypeError unless floating; ArgumentError for another mode, antialias, both or neither of size
    and scale_factor, or an empty size.
    """
    if mode not in MODES:
        raise ArgumentError(f"interpolate: the mode is one of {', '.join(MODES)}, not {mode!r}")
    if antialias:
        raise ArgumentError(f"interpolate: antialias=True is not supported, in mode {mode!r}")
    if align_corners is not None and mode.startswith("nearest"):
        raise ArgumentError(f"interpolate: align_corners is for linear, bilinear and trilinear, not for {mode!r}")
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
    how = {"mode": mode, "align_corners": bool(align_corners)}
    if input.ndim == 3:
        lines = apply(resize.interpolate, (input.unsqueeze(-2),), size=(1, *new), scales=(None, *scales), **how)
        return lines.squeeze(-2)
    if input.ndim == 4:
        return apply(resize.interpolate, (input,), size=tuple(new), scales=tuple(scales), **how)
    # Axes are independent: first images of (H, W), then of (D, H * W).
    n, channels, depth, height, width = input.shape
    images = input.reshape(n, channels * depth, height, width)
    images = apply(resize.interpolate, (images,), size=tuple(new[1:]), scales=tuple(scales[1:]), **how)
    plane = new[1] * new[2]
    images = images.reshape(n, channels, depth, plane)
    result = apply(resize.interpolate, (images,), size=(new[0], plane), scales=(scales[0], None), **how)
    return result.reshape(n, channels, *new)


def _sizes(
    old: tuple[int, ...], size: Size | None, scale_factor: float | Sequence[float] | None
) -> tuple[list[int], list[float | None]]:
    if (size is None) == (scale_factor is None):
        raise ArgumentError(f"interpolate: give size or scale_factor, one of them, got {size=}, {scale_factor=}")
    given: Any = scale_factor if size is None else size
    each = list(given) if isinstance(given, Sequence) else [given] * len(old)
    if len(each) != len(old):
        raise ArgumentError(f"interpolate: {given} for images of {old}: expected one number or {len(old)}")
    if scale_factor is None:
        return each, [None] * len(old)
    return [math.floor(n * float(factor)) for n, factor in zip(old, each, strict=True)], [float(f) for f in each]
