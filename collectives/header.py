"""What must be told before an array can be received: dtype and shape, in a message of known size.

A root tells it before it scatters, with each rank's length; a sender writes it at the head of its letter.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import dtype_name, dtype_of
from collectives.errors import ArgumentError
from collectives.reduction import Array
from collectives.transport import LETTER

_TEXT_BYTES = 512
_HEAD = struct.Struct("<qq32s")  # how many dimensions, where the array follows, dtype; then the shape


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


def encode_letter(array: Array, apart: int) -> tuple[Array, int]:
    """What `send` sends first: (n,) uint8, and `apart`, or 0 if the C-contiguous array itself fits in.

    apart: the tag under which the array follows if it does not
    """
    head = _HEAD.size + 8 * array.ndim
    if head + array.nbytes <= LETTER:
        apart = 0
    letter = np.empty(head if apart else head + array.nbytes, np.uint8)
    _HEAD.pack_into(letter.data, 0, array.ndim, apart, dtype_name(array.dtype).encode())
    letter[_HEAD.size : head].view(np.int64)[:] = array.shape
    if not apart:
        letter[head:] = array.reshape(-1).view(np.uint8)
    return letter, apart


def decode_letter(letter: Array) -> tuple[np.dtype[Any], tuple[int, ...], int, Array]:
    """dtype, shape, `apart`, and what follows the head, as `encode_letter` wrote them."""
    ndim, apart, name = _HEAD.unpack_from(letter.data)
    head = _HEAD.size + 8 * ndim
    shape = tuple(letter[_HEAD.size : head].view(np.int64).tolist())
    return dtype_of(name.rstrip(b"\0").decode()), shape, apart, letter[head:]
