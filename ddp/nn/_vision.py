"""Layers that move pixels: other sizes, patches."""

from __future__ import annotations

from collections.abc import Sequence

from ddp._tensor.core import Tensor
from ddp.nn import functional
from ddp.nn._module import Module
from ddp.nn.functional._check import Size

Factor = float | Sequence[float]


class Upsample(Module):
    """The input at another size. input: (N, C, L), (N, C, H, W) or (N, C, D, H, W); see functional.interpolate.

    Raises: ShapeError, DtypeError, ArgumentError when called.
    """

    def __init__(
        self,
        size: Size | None = None,
        scale_factor: Factor | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.scale_factor: float | tuple[float, ...] | None
        if isinstance(scale_factor, Sequence):
            self.scale_factor = tuple(float(factor) for factor in scale_factor)
        else:
            self.scale_factor = None if scale_factor is None else float(scale_factor)
        self.mode = mode
        self.align_corners = align_corners
        self.recompute_scale_factor = recompute_scale_factor

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, L), (N, C, H, W) or (N, C, D, H, W)."""
        return functional.interpolate(
            input, self.size, self.scale_factor, self.mode, self.align_corners, self.recompute_scale_factor
        )

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


class Unfold(Module):
    """The patches under a moving window as columns. input: (N, C, H, W); returns (N, C * KH * KW, L).

    Raises: ShapeError, ArgumentError when called; see functional.unfold.
    """

    def __init__(self, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.dilation = dilation
        self.padding = padding
        self.stride = stride

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, H, W) or (C, H, W)."""
        return functional.unfold(input, self.kernel_size, self.dilation, self.padding, self.stride)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, dilation={self.dilation}, padding={self.padding}, stride={self.stride}"


class Fold(Module):
    """Columns added up where Unfold reads them. input: (N, C * KH * KW, L); returns (N, C, *output_size).

    Raises: ShapeError, ArgumentError when called; see functional.fold.
    """

    def __init__(
        self, output_size: Size, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.kernel_size = kernel_size
        self.dilation = dilation
        self.padding = padding
        self.stride = stride

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C * KH * KW, L) or (C * KH * KW, L)."""
        steps = self.kernel_size, self.dilation, self.padding, self.stride
        return functional.fold(input, self.output_size, *steps)

    def extra_repr(self) -> str:
        return (
            f"output_size={self.output_size}, kernel_size={self.kernel_size}, dilation={self.dilation}, "
            f"padding={self.padding}, stride={self.stride}"
        )


class PixelShuffle(Module):
    """Channels laid out as pixels. input: (..., C * r * r, H, W); returns (..., C, H * r, W * r).

    Raises: ShapeError, ArgumentError when called; see functional.pixel_shuffle.
    """

    def __init__(self, upscale_factor: int) -> None:
        super().__init__()
        self.upscale_factor = upscale_factor

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., C * r * r, H, W)."""
        return functional.pixel_shuffle(input, self.upscale_factor)

    def extra_repr(self) -> str:
        return f"upscale_factor={self.upscale_factor}"


class PixelUnshuffle(Module):
    """The reverse of PixelShuffle. input: (..., C, H * r, W * r); returns (..., C * r * r, H, W).

    Raises: ShapeError, ArgumentError when called; see functional.pixel_unshuffle.
    """

    def __init__(self, downscale_factor: int) -> None:
        super().__init__()
        self.downscale_factor = downscale_factor

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., C, H * r, W * r)."""
        return functional.pixel_unshuffle(input, self.downscale_factor)

    def extra_repr(self) -> str:
        return f"downscale_factor={self.downscale_factor}"
