"""Describes where each gradient is in the flat buckets of the reducer.

A bucket is one array of one dtype. Each gradient starts at a multiple of 64 bytes. So no two gradients share a cache
line, if the bucket itself is aligned to 64 bytes. The gaps stay zero, and are summed along with the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Array = Any  # numpy.ndarray or cupy.ndarray
_LINE = 64  # a cache line (bytes)


@dataclass(frozen=True, kw_only=True)
class BucketSlice:
    """Where one gradient is: elements [start, stop) of the bucket with the index `bucket`. shape: of the gradient"""

    bucket: int
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The slices of all gradients, in their order, and the dtype and the length in elements of each bucket."""

    slices: tuple[BucketSlice, ...]
    buckets: tuple[tuple[Any, int], ...]


def lay_out(plan: Sequence[Sequence[int]], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]) -> Layout:
    """Gives each gradient its slice of a bucket.

    plan: the indices of each bucket's gradients, which must have the same dtype; shapes, dtypes: of each gradient
    """
    slices: dict[int, BucketSlice] = {}
    buckets = []
    for bucket, members in enumerate(plan):
        dtype = dtypes[members[0]]
        assert all(dtypes[index] == dtype for index in members), "a bucket has one dtype"
        step = max(1, _LINE // dtype.itemsize)
        length = 0
        for index in members:
            stop = length + math.prod(shapes[index])
            slices[index] = BucketSlice(bucket=bucket, start=length, stop=stop, shape=shapes[index])
            length = -(-stop // step) * step
        buckets.append((dtype, length))
    assert sorted(slices) == list(range(len(shapes))), "every gradient has one slice"
    return Layout(slices=tuple(slices[index] for index in range(len(shapes))), buckets=tuple(buckets))


class FlatBuckets:
    """The memory of a layout.

    buffers: one (length,) array per bucket; views: each gradient's part, in its shape
    zeros: makes a buffer of a length and dtype, as `numpy.zeros` does
    """

    def __init__(self, layout: Layout, zeros: Callable[[int, Any], Array]) -> None:
        self.layout = layout
        self.buffers: list[Array] = [zeros(length, dtype) for dtype, length in layout.buckets]
        self.views: list[Array] = [
            self.buffers[part.bucket][part.start : part.stop].reshape(part.shape) for part in layout.slices
        ]
