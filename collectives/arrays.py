"""The border of `collectives`: what a caller hands over becomes a NumPy array here, or an error that says why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.errors import ArgumentError, DtypeError
from collectives.reduction import Array

#: NumPy's kinds of numbers: bool, integers, floats, complex.
_NUMBERS = "biufc"


def as_array(x: Any, what: str = "x") -> Array:
    """x as a NumPy array that shares its memory: an ndarray, anything with the array interfaces, or DLPack on the CPU.

    Raises: DtypeError if x is no array, or does not hold numbers.
    """
    if type(x) is not np.ndarray:
        x = _convert(x, what)
    if x.dtype.kind not in _NUMBERS:
        raise DtypeError(f"{what} should hold numbers, its dtype is {x.dtype}")
    return x


def _convert(x: Any, what: str) -> Array:
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(x)
    if hasattr(x, "__cuda_array_interface__"):
        raise DtypeError(f"{what} is on a GPU ({type(x).__name__}), this communicator moves host arrays: pass x.get()")
    try:
        if hasattr(x, "__array_interface__") or hasattr(x, "__array__"):
            return np.asarray(x)
        if hasattr(x, "__dlpack__"):
            return np.from_dlpack(x)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise DtypeError(f"{what} cannot be read as a NumPy array: {error}") from error
    raise DtypeError(f"{what} should be an array, is {type(x).__name__} {x!r:.60}: np.asarray(...) makes one")


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`out` as an array that a result of this shape and dtype can be written into.

    Raises: ArgumentError if shape or dtype differ, or it is read-only.
    """
    array = as_array(out, "out")
    if array.shape != shape or array.dtype != dtype:
        raise ArgumentError(f"out should be {dtype} {shape}, is {array.dtype} {array.shape}")
    return writable(array, "out")


def writable(array: Array, what: str) -> Array:
    """The same array. Raises: ArgumentError if it is read-only."""
    if not array.flags.writeable:
        raise ArgumentError(f"{what} is read-only, and this rank's result would be written into it")
    return array


def flat(array: Array) -> Array:
    """A one-dimensional view of a C-contiguous array."""
    assert array.flags.c_contiguous
    return array.reshape(-1)


def as_bytes(array: Array) -> Array:
    """A (nbytes,) uint8 view of a C-contiguous array."""
    return flat(array).view(np.uint8)


def contiguous(array: Array) -> Array:
    """The array itself if it is C-contiguous, else a copy that is; 0-d arrays stay 0-d."""
    return array if array.flags.c_contiguous else array.copy(order="C")


def rows(array: Array) -> Array:
    """The array seen as rows along axis 0; a 0-d array is one row."""
    return array.reshape(1) if array.ndim == 0 else array


def row_bytes(array: Array) -> int:
    """Bytes of one row along axis 0, also of an array that has none."""
    count = 1
    for length in array.shape[1:]:
        count *= length
    return count * array.itemsize


def check_lengths(lengths: Sequence[int], size: int) -> list[int]:
    """One length a rank, along axis 0.

    Raises: ArgumentError unless there are `size` whole numbers of at least 0.
    """
    try:
        read = [int(length) for length in lengths]
    except (TypeError, ValueError):
        raise ArgumentError(f"lengths should be whole numbers, one a rank, are {lengths!r}") from None
    if len(read) != size or any(length < 0 for length in read):
        raise ArgumentError(f"lengths should be {size} numbers of at least 0, one a rank, are {read}")
    return read


def even_lengths(total: int, size: int) -> list[int]:
    """`np.array_split`'s rule: the first `total % size` ranks get one more. `even_lengths(7, 3) == [3, 2, 2]`"""
    return [total // size + (rank < total % size) for rank in range(size)]
