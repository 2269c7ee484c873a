"""Headers: dtype and shape of an array, in a message of known size, sent before the array itself.

A root sends one before it scatters, with each rank's length; a sender writes one at the head of its eager message.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import as_bytes, dtype_name, dtype_of
from collectives.errors import MismatchError
from collectives.reduction import Array
from collectives.transport import EAGER_LIMIT, ROWS, Signatures, Steps, Transport, spans

_HEAD = struct.Struct("<qq")  # the user's tag, and that of the array if it follows; then what `_form` packs
_FORM = struct.Struct("<q32s")  # how many dimensions, and the dtype; then the shape
_START = struct.Struct("<qqq")  # all that and the number of dimensions
_FORM_BYTES = _FORM.size + 8 * 64  # NumPy's arrays have 64 dimensions at most


def empty(size: int) -> Array:
    """An empty header, (552 + 8 * size,) uint8."""
    return np.zeros(_FORM_BYTES + 8 * size, np.uint8)


def encode(dtype: Any, shape: tuple[int, ...], counts: Sequence[int]) -> Array:
    """The header of an array, (552 + 8 * size,) uint8."""
    header, form = empty(len(counts)), _form(dtype, shape[1:])
    header[: len(form)] = np.frombuffer(form, np.uint8)
    header[_FORM_BYTES:].view(np.int64)[:] = counts
    return header


def decode(header: Array) -> tuple[np.dtype[Any], tuple[int, ...], list[int]]:
    """dtype, shape of a row, and the ranks' lengths, as `encode` wrote them."""
    return *_unform(header[:_FORM_BYTES].tobytes()), header[_FORM_BYTES:].view(np.int64).tolist()


def exchange_numbers(transport: Transport, numbers: Sequence[int]) -> Steps[list[list[int]]]:
    """Every rank's numbers, which are as many on each, in rank order. Collective."""
    mine = np.array(numbers, np.int64)
    everyones = np.empty((transport.size, len(mine)), np.int64)
    yield transport.all_gather(as_bytes(mine), as_bytes(everyones), [mine.nbytes] * transport.size)
    return everyones.tolist()


def exchange_rows(transport: Transport, part: Any, numbers: Sequence[int]) -> Steps[list[list[int]]]:
    """Every rank's numbers about arrays whose rows have the same dtype and shape. Collective.

    part: this rank's array, on the host or a GPU
    Raises: MismatchError on every rank if dtypes or row shapes differ.
    """
    mark = zlib.crc32(repr((dtype_name(part.dtype), part.shape[1:])).encode())
    everyones = yield from exchange_numbers(transport, [mark, *numbers])
    marks = [each[0] for each in everyones]
    if len(set(marks)) > 1:
        others = spans([rank for rank, mark in enumerate(marks) if mark != marks[transport.rank]])
        raise MismatchError(
            f"rank {transport.rank} brings rows of {part.dtype} {part.shape[1:]}, rank {others} of another dtype or "
            "shape; only the length along axis 0 may differ between ranks"
        )
    return [each[1:] for each in everyones]


def exchange_lengths(
    transport: Transport, part: Any, known: list[int] | None, signatures: Signatures | None
) -> Steps[list[int]]:
    """Every rank's number of rows: out of the signatures, as the caller gave them, or exchanged. Collective.

    Raises: MismatchError as `exchange_rows`, and if the lengths that were given are not those of the arrays.
    """
    if signatures is not None:
        shown = [each[ROWS] for each in signatures]
        if known is not None and known != shown:
            raise MismatchError(f"lengths are given as {known}, but the ranks bring {shown} rows")
        return shown
    if known is not None:
        return known
    return [row[0] for row in (yield from exchange_rows(transport, part, [len(part)]))]


class EagerMessage(NamedTuple):
    """What `send` sends first.

    src: the rank that sent it; tag: as its user gave it
    rendezvous_tag: the tag under which the array follows; 0: its bytes are `body`, (nbytes,) uint8
    """

    src: int
    tag: int
    rendezvous_tag: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    body: Array


def encode_eager(array: Array, tag: int, rendezvous_tag: int) -> tuple[Array, int]:
    """The eager message of a C-contiguous array, (n,) uint8, and `rendezvous_tag`, or 0 if the array itself fits in.

    rendezvous_tag: the tag under which the array follows if it does not
    """
    form, body = _form(array.dtype, array.shape), b""
    if _HEAD.size + len(form) + array.nbytes <= EAGER_LIMIT:
        rendezvous_tag, body = 0, array.tobytes()
    return np.frombuffer(_HEAD.pack(tag, rendezvous_tag) + form + body, np.uint8), rendezvous_tag


def decode_eager(src: int, message: Array) -> EagerMessage:
    """What `encode_eager` wrote on rank src."""
    data = message.data
    tag, rendezvous_tag, ndim = _START.unpack_from(data)
    head = _HEAD.size + _FORM.size + 8 * ndim
    dtype, shape = _unform(bytes(data[_HEAD.size : head]))
    return EagerMessage(src, tag, rendezvous_tag, dtype, shape, message[head:])


@functools.lru_cache(maxsize=1024)
def _form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    return _FORM.pack(len(shape), dtype_name(dtype).encode()) + struct.pack(f"<{len(shape)}q", *shape)


@functools.lru_cache(maxsize=1024)
def _unform(form: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    ndim, name = _FORM.unpack_from(form)
    return dtype_of(name.rstrip(b"\0").decode()), struct.unpack_from(f"<{ndim}q", form, _FORM.size)
