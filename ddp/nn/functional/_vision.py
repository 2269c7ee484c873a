"""Frames, patches and sizes of images as functions."""

from __future__ import annotations

from collections.abc import Sequence

from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError
from ddp.ops import shape


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """`input` in a frame of `value`. pad: (before, after) of the last dimension, then of the one before it, and so on.

    Raises: ArgumentError for an odd number of widths, more than the dimensions have, negative ones or another mode.
    """
    if mode != "constant":
        raise ArgumentError(f"pad: the mode is 'constant', not {mode!r}")
    if len(pad) % 2 or len(pad) > 2 * input.ndim or any(n < 0 for n in pad):
        raise ArgumentError(
            f"pad: {tuple(pad)} for shape {input.shape}: expected non-negative pairs, last dimension first"
        )
    given = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    widths = [(0, 0)] * (input.ndim - len(given)) + given[::-1]
    return apply(shape.pad, (input,), widths=tuple(widths), value=value)
