"""Padding of sequences and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.creation import as_number
from ddp._tensor.dtypes import INTEGERS, iinfo
from ddp._tensor.operands import check_tensor, parse_sizes
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.module import Layer
from ddp.nn.validation import Size, numbers
from ddp.ops import pooling


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """`input` with elements added around it. pad: (before, after) for the last dimension, then for the second last, ...

    A negative width crops. mode: "constant" (`value`, or 0) pads any dimensions; "reflect" (mirrored without the edge),
    "replicate" (the edge) and "circular" (from the other end) pad the last 1, 2 or 3 dimensions of a sample or a batch:
    input: (C, L), (N, C, L), (C, H, W), (N, C, H, W), (C, D, H, W) or (N, C, D, H, W).

    Raises: ArgumentError for an odd number of widths, more than two widths per dimension, another mode, a `value` in a
    mode other than "constant", or a `value` that the integer dtype of `input` cannot hold; DtypeError for widths that
    are not integers; ShapeError for an input of another shape, a padding that needs more elements than the input has,
    or a result of negative size.
    """
    check_tensor("pad", input)
    pad = parse_sizes((pad,))
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        raise ArgumentError(f"pad: {tuple(pad)} for shape {input.shape}: expected pairs, last dimension first")
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    widths = [(0, 0)] * (input.ndim - len(pairs)) + pairs[::-1]
    for n, (before, after) in zip(input.shape, widths, strict=True):
        if n + min(before, 0) + min(after, 0) < 0 or n + before + after < 0:
            raise ShapeError(f"pad: {tuple(pad)} crops shape {input.shape} below nothing")
    if mode == "constant":
        value = 0 if value is None else as_number(value, "pad")
        if input.array.dtype in INTEGERS and not iinfo(input.dtype).min <= value <= iinfo(input.dtype).max:
            raise ArgumentError(f"pad: {value} does not fit {input.dtype}")
        return apply(pooling.pad, (input,), widths=tuple(widths), value=value)
    return _pad_from_input(input, widths, len(pairs), mode, value)


def _pad_from_input(input: Tensor, widths: list[tuple[int, int]], dims: int, mode: str, value: float | None) -> Tensor:
    if mode not in pooling.NAMES:
        raise ArgumentError(f"pad: the mode is 'constant', 'reflect', 'replicate' or 'circular', not {mode!r}")
    if value is not None:
        raise ArgumentError(f"pad: mode {mode!r} takes no value, got {value}")
    if not 1 <= dims <= 3 or input.ndim not in (dims + 1, dims + 2):
        raise ShapeError(f"pad: mode {mode!r} pads 1 to 3 dimensions after the channels, not {dims} of {input.shape}")
    if any(n < 0 for pair in widths for n in pair):
        # Constant padding with negative widths crops.
        cropped = tuple([(min(before, 0), min(after, 0)) for before, after in widths])
        input = apply(pooling.pad, (input,), widths=cropped, value=0)
        widths = [(max(before, 0), max(after, 0)) for before, after in widths]
    for n, pair in zip(input.shape, widths, strict=True):
        most = {"reflect": n - 1, "circular": n, "replicate": max(pair) if n else 0}[mode]
        if max(pair) > max(most, 0):
            raise ShapeError(f"pad: {pair} is too wide for mode {mode!r} in shape {input.shape}")
    return apply(pooling.continued, (input,), widths=tuple(widths), mode=mode)


class _Pad(Layer):
    """Pads the last `dims` dimensions with the `mode` of `functional.pad`."""

    _dims: ClassVar[int]
    _mode: ClassVar[str] = "constant"
    _shown = "padding"

    def __init__(self, padding: Size) -> None:
        super().__init__()
        self.padding = numbers(padding, 2 * self._dims, "padding")

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., L) or (..., H, W), padded in its last dimensions."""
        return pad(input, self.padding, self._mode)


class ConstantPad1d(_Pad, dims=1):
    """Sequences padded with `value`. padding: a number, or (left, right). input: (..., L).

    Raises: ArgumentError, DtypeError, ShapeError; see functional.pad.
    """

    _shown = "padding= value="

    def __init__(self, padding: Size, value: float) -> None:
        super().__init__(padding)
        self.value = value

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., L), or (..., H, W) in two dimensions."""
        return pad(input, self.padding, value=self.value)


class ConstantPad2d(ConstantPad1d, dims=2):
    """Images padded with `value`. padding: a number, or (left, right, top, bottom). input: (..., H, W).

    Raises: ArgumentError, DtypeError, ShapeError; see functional.pad.
    """


class ZeroPad1d(_Pad, dims=1):
    """Sequences padded with zeros. padding: a number, or (left, right).

    input: (..., L). Raises: ArgumentError, DtypeError, ShapeError; see functional.pad.
    """


class ZeroPad2d(_Pad, dims=2):
    """Images padded with zeros. padding: a number, or (left, right, top, bottom).

    input: (..., H, W). Raises: ArgumentError, DtypeError, ShapeError; see functional.pad.
    """


class ReflectionPad1d(_Pad, dims=1, mode="reflect"):
    """Sequences padded with their mirror image, without the edge. padding: a number, or (left, right).

    input: (C, L) or (N, C, L). Raises: ArgumentError, DtypeError, ShapeError; see functional.pad.
    """


class ReflectionPad2d(_Pad, dims=2, mode="reflect"):
    """Images padded with their mirror image, without the edge. padding: a number, or (left, right, top, bottom).

    input: (C, H, W) or (N, C, H, W). Raises: ArgumentError, DtypeError, ShapeError; see functional.pad.
    """


class ReplicationPad1d(_Pad, dims=1, mode="replicate"):
    """Sequences padded with their edge. padding: a number, or (left, right).

    input: (C, L) or (N, C, L). Raises: ArgumentError, DtypeError, ShapeError; see functional.pad.
    """


class ReplicationPad2d(_Pad, dims=2, mode="replicate"):
    """Images padded with their edge. padding: a number, or (left, right, top, bottom).

    input: (C, H, W) or (N, C, H, W). Raises: ArgumentError, DtypeError, ShapeError; see functional.pad.
    """


class CircularPad1d(_Pad, dims=1, mode="circular"):
    """Sequences padded with the elements at the other end. padding: a number, or (left, right).

    input: (C, L) or (N, C, L). Raises: ArgumentError, DtypeError, ShapeError; see functional.pad.
    """


class CircularPad2d(_Pad, dims=2, mode="circular"):
    """Images padded with the elements at the other end. padding: a number, or (left, right, top, bottom).

    input: (C, H, W) or (N, C, H, W). Raises: ArgumentError, DtypeError, ShapeError; see functional.pad.
    """
