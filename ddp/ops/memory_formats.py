"""Memory formats: the order of an image's elements in memory, which may differ from the order of its axes.

Channels last puts the channels of a pixel side by side: the shape is (N, C, H, W), the order in memory N, H, W, C. GPUs
convolve images in this order faster. On a GPU, the results of convolutions, pooling, normalization and activations have
the order of their input, so that the next layer need not convert them.
"""

from __future__ import annotations

import enum
import math
from typing import Any

from ddp.ops.arrays import Array, array_function


class memory_format(enum.Enum):
    """The order of elements in memory, by PyTorch's names."""

    contiguous_format = "contiguous_format"
    channels_last = "channels_last"
    preserve_format = "preserve_format"

    def __repr__(self) -> str:
        return f"ddp.{self.value}"

    __str__ = __repr__


contiguous_format = memory_format.contiguous_format
channels_last = memory_format.channels_last
preserve_format = memory_format.preserve_format


def is_channels_last(x: Array) -> bool:
    """Whether x (N, C, H, W) is dense in the order N, H, W, C. An axis of one element may have any stride."""
    if x.ndim != 4:
        return False
    step = x.itemsize
    for axis in (1, 3, 2, 0):
        if x.shape[axis] != 1 and x.strides[axis] != step and x.size:
            return False
        step *= x.shape[axis]
    return True


def prefers_channels_last(x: Array) -> bool:
    """Whether ops on x should return channels last: x is channels last, and not also C-contiguous."""
    return x.ndim == 4 and not x.flags.c_contiguous and is_channels_last(x)


def dense_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of an array without gaps. order: its axes in the order of memory, outermost first."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def inverse(order: tuple[int, ...]) -> list[int]:
    """The inverse permutation of the axes: `x.transpose(order).transpose(inverse(order))` is x."""
    return sorted(range(len(order)), key=order.__getitem__)


def empty_in_order(xp: Any, shape: tuple[int, ...], dtype: Any, order: tuple[int, ...]) -> Array:
    """An uninitialized array of `shape`. order: its axes in the order of memory, the outermost first."""
    return xp.empty([shape[axis] for axis in order], dtype).transpose(inverse(order))


def empty_image(xp: Any, shape: tuple[int, ...], dtype: Any, last: bool) -> Array:
    """An uninitialized array (N, C, H, W). last: channels last in memory, else C-contiguous."""
    return empty_in_order(xp, shape, dtype, (0, 2, 3, 1)) if last else xp.empty(shape, dtype)


@array_function
def as_format(xp: Any, x: Array, last: bool) -> Array:
    """Returns x (N, C, H, W) as channels last if `last`, else as C-contiguous: x itself if it already is."""
    if not last:
        return xp.ascontiguousarray(x)
    if is_channels_last(x):
        return x
    out = empty_image(xp, x.shape, x.dtype, True)
    out[...] = x
    return out


def order_of(x: Array) -> tuple[int, ...]:
    """The axes of x: first those of size 1, then the others by decreasing stride. Equal strides keep their order."""
    return tuple(sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]) if x.shape[axis] != 1 else -math.inf))
