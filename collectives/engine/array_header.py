"""Array headers, and exchanges of lengths. A header holds the dtype and the shape of the array that follows it.

Before a scatter the root sends a header of known size, with each rank's length. In an eager message the header follows
two tags.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import as_bytes, dtype_name, dtype_of
from collectives.errors import MismatchError, name_ranks
from collectives.reduction import Array
from collectives.transport import EAGER_LIMIT, ROWS, Signatures, Steps, Transport

# Head of an eager message: the user's tag, and the tag of the array if it is sent separately. `_pack`'s bytes follow.
_HEAD = struct.Struct("<qq")
# Number of dimensions, and the dtype. The shape follows.
_DTYPE = struct.Struct("<q32s")
# The head and the number of dimensions.
_START = struct.Struct("<qqq")
# NumPy's arrays have at most 64 dimensions.
_DTYPE_BYTES = _DTYPE.size + 8 * 64


def empty(size: int) -> Array:
    """An empty header, (552 + 8 * size,) uint8."""
    return np.zeros(_DTYPE_BYTES + 8 * size, np.uint8)


def encode(dtype: Any, shape: tuple[int, ...], counts: Sequence[int]) -> Array:
    """The header of an array that is scattered, (552 + 8 * size,) uint8. counts: the ranks' lengths"""
    header = empty(len(counts))
    packed = _pack(dtype, shape[1:])
    header[: len(packed)] = np.frombuffer(packed, np.uint8)
    header[_DTYPE_BYTES:].view(np.int64)[:] = counts
    return header


def decode(header: Array) -> tuple[np.dtype[Any], tuple[int, ...], list[int]]:
    """dtype, shape of a row, and the ranks' lengths, as `encode` wrote them."""
    return *_unpack(header[:_DTYPE_BYTES].tobytes()), header[_DTYPE_BYTES:].view(np.int64).tolist()


def exchange_numbers(transport: Transport, numbers: Sequence[int]) -> Steps[list[list[int]]]:
    """Every rank's numbers, in rank order. Each rank passes equally many. Collective."""
    own_row = np.array(numbers, np.int64)
    table = np.empty((transport.size, len(own_row)), np.int64)
    yield transport.all_gather(as_bytes(own_row), as_bytes(table), [own_row.nbytes] * transport.size)
    return table.tolist()


def exchange_rows(transport: Transport, part: Any, numbers: Sequence[int]) -> Steps[list[list[int]]]:
    """Every rank's numbers about arrays whose rows must have the same dtype and shape on all ranks. Collective.

    part: this rank's array, on the host or a GPU
    Raises: MismatchError on every rank if dtypes or row shapes differ.
    """
    checksum = zlib.crc32(repr((dtype_name(part.dtype), part.shape[1:])).encode())
    table = yield from exchange_numbers(transport, [checksum, *numbers])
    different = [rank for rank, row in enumerate(table) if row[0] != checksum]
    if different:
        raise MismatchError(
            f"rank {transport.rank} brings rows of {part.dtype} {part.shape[1:]}, {name_ranks(different)} of another "
            "dtype or shape; only the length along axis 0 may differ between ranks"
        )
    return [row[1:] for row in table]


def exchange_lengths(
    transport: Transport, part: Any, known_lengths: list[int] | None, signatures: Signatures | None
) -> Steps[list[int]]:
    """Every rank's number of rows: from the signatures, else `known_lengths`, else by an exchange. Collective.

    Raises: what `exchange_rows` raises; MismatchError if `known_lengths` are not the lengths in the signatures.
    """
    if signatures is not None:
        lengths = [signature[ROWS] for signature in signatures]
        if known_lengths is not None and known_lengths != lengths:
            raise MismatchError(f"lengths are given as {known_lengths}, but the ranks bring {lengths} rows")
        return lengths
    if known_lengths is not None:
        return known_lengths
    return [row[0] for row in (yield from exchange_rows(transport, part, [len(part)]))]


class EagerMessage(NamedTuple):
    """The first message of a send.

    src: the sender's rank; tag: as passed to `send`
    rendezvous_tag: the tag with which the array follows; 0: the array's bytes are in `body`, (nbytes,) uint8
    """

    src: int
    tag: int
    rendezvous_tag: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    body: Array


def encode_eager(array: Array, tag: int, rendezvous_tag: int) -> tuple[Array, int]:
    """The eager message of a C-contiguous array, (n,) uint8; and `rendezvous_tag`, or 0 if the array is in the message.

    rendezvous_tag: the tag with which the array follows if it does not fit into the message
    """
    packed = _pack(array.dtype, array.shape)
    if _HEAD.size + len(packed) + array.nbytes <= EAGER_LIMIT:
        rendezvous_tag = 0
        packed += array.tobytes()
    return np.frombuffer(_HEAD.pack(tag, rendezvous_tag) + packed, np.uint8), rendezvous_tag


def decode_eager(src: int, message: Array) -> EagerMessage:
    """Reads what `encode_eager` wrote on rank src."""
    data = message.data
    tag, rendezvous_tag, ndim = _START.unpack_from(data)
    head = _HEAD.size + _DTYPE.size + 8 * ndim
    dtype, shape = _unpack(bytes(data[_HEAD.size : head]))
    return EagerMessage(src, tag, rendezvous_tag, dtype, shape, message[head:])


@functools.lru_cache(maxsize=1024)
def _pack(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    return _DTYPE.pack(len(shape), dtype_name(dtype).encode()) + struct.pack(f"<{len(shape)}q", *shape)


@functools.lru_cache(maxsize=1024)
def _unpack(packed: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    ndim, name = _DTYPE.unpack_from(packed)
    return dtype_of(name.rstrip(b"\0").decode()), struct.unpack_from(f"<{ndim}q", packed, _DTYPE.size)
