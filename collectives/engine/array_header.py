"""What must be told before an array can be received: dtype and shape, in a message of known size.

A root tells it before it scatters, with each rank's length; a sender writes it at the head of its eager message.
"""

from __future__ import annotations

import functools
import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import dtype_name, dtype_of
from collectives.errors import ArgumentError
from collectives.reduction import Array
from collectives.transport import EAGER_LIMIT

_TEXT_BYTES = 512
_HEAD = struct.Struct("<qq")  # the user's tag, and that of the array if it follows; then what `_form` packs
_FORM = struct.Struct("<q32s")  # how many dimensions, and the dtype; then the shape
_START = struct.Struct("<qqq")  # all that and the number of dimensions


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


class EagerMessage(NamedTuple):
    """What `send` sends first.

    src: the rank that sent it; tag: as its user gave it
    apart: the tag under which the array follows; 0: its bytes are `body`, (nbytes,) uint8
    """

    src: int
    tag: int
    apart: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    body: Array


def encode_eager(array: Array, tag: int, apart: int) -> tuple[Array, int]:
    """The eager message of a C-contiguous array, (n,) uint8, and `apart`, or 0 if the array itself fits in.

    apart: the tag under which the array follows if it does not
    """
    form = _form(array.dtype, array.shape)
    head = _HEAD.size + len(form)
    if head + array.nbytes <= EAGER_LIMIT:
        apart = 0
    parts = (_HEAD.pack(tag, apart), form) if apart else (_HEAD.pack(tag, apart), form, array.tobytes())
    return np.frombuffer(b"".join(parts), np.uint8), apart


def decode_eager(src: int, letter: Array) -> EagerMessage:
    """What `encode_eager` wrote on rank src."""
    data = letter.data
    tag, apart, ndim = _START.unpack_from(data)
    head = _HEAD.size + _FORM.size + 8 * ndim
    dtype, shape = _unform(bytes(data[_HEAD.size : head]))
    return EagerMessage(src, tag, apart, dtype, shape, letter[head:])


@functools.lru_cache(maxsize=1024)
def _form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    return _FORM.pack(len(shape), dtype_name(dtype).encode()) + struct.pack(f"<{len(shape)}q", *shape)


@functools.lru_cache(maxsize=1024)
def _unform(form: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    ndim, name = _FORM.unpack_from(form)
    return dtype_of(name.rstrip(b"\0").decode()), struct.unpack_from(f"<{ndim}q", form, _FORM.size)
