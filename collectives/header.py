"""What a root must tell before it scatters: dtype, a row's shape, each rank's length, in a message of known size."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import dtype_name, dtype_of
from collectives.errors import ArgumentError
from collectives.reduction import Array

_TEXT_BYTES = 512


def empty(size: int) -> Array:
    """Room for a header, (512 + 8 * size,) uint8."""
    return np.zeros(_TEXT_BYTES + 8 * size, np.uint8)


def encode(whole: Array, counts: Sequence[int]) -> Array:
    """The header of `whole`, (512 + 8 * size,) uint8. Raises: ArgumentError if its shape is too long to describe."""
    text = json.dumps([dtype_name(whole.dtype), whole.shape[1:]]).encode()
    if len(text) > _TEXT_BYTES:
        raise ArgumentError(f"shape {whole.shape} takes {len(text)} bytes to describe, {_TEXT_BYTES} fit")
    told = empty(len(counts))
    told[: len(text)] = np.frombuffer(text, np.uint8)
    told[_TEXT_BYTES:].view(np.int64)[:] = counts
    return told


def decode(told: Array) -> tuple[np.dtype[Any], tuple[int, ...], list[int]]:
    """dtype, shape of a row, and the ranks' lengths, as `encode` wrote them."""
    dtype, shape = json.loads(told[:_TEXT_BYTES].tobytes().rstrip(b"\0"))
    return dtype_of(dtype), tuple(shape), told[_TEXT_BYTES:].view(np.int64).tolist()


def fingerprint(part: Array) -> int:
    """A number that is the same on all ranks whose rows have the same dtype and shape."""
    return zlib.crc32(repr((dtype_name(part.dtype), part.shape[1:])).encode())
