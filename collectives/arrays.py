"""Input conversion: makes a NumPy array of what a caller passes, or raises an error that says why it cannot.

Accepted without a copy: NumPy arrays, and objects in memory that the CPU can read, if they have an array interface, a
buffer (bytearray, memoryview, array.array, mmap) or DLPack. PyTorch's CPU tensors are accepted, also in bfloat16, which
`np.asarray` and `np.from_dlpack` refuse. The result is always a NumPy array.

Not accepted: Python numbers and lists, whose dtype each rank would have to guess; masked arrays, which would lose
their masks; tensors that require grad, since autograd would not see the collective.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from collectives.errors import ArgumentError, DtypeError
from collectives.native import BFLOAT16, Array

_CODES = "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
#: The scalar types of all numbers that collectives carry: NumPy's bool, integers, floats and complex, and bfloat16.
NUMBERS = frozenset(np.dtype(np.dtype(code).str).type for code in _CODES) | {BFLOAT16.type}
# NumPy has two types of 64-bit integers, as C has long and long long. MPI distinguishes them, so NUMBERS has only
# np.int64 and np.uint64. This set has the other types, whose arrays `as_array` views as the types in NUMBERS.
_TWINS = frozenset(np.dtype(code).type for code in _CODES) - NUMBERS

# The exceptions that a library may raise when it cannot share its memory.
_REFUSALS = (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError)


def as_array(x: Any, name: str = "x") -> Array:
    """Returns x as a NumPy array that shares its memory, and is read-only if x is.

    If x can only be read through a copy, the array is a read-only copy.
    name: the argument's name, for errors
    Raises: DtypeError if x is not an array in host memory, or does not hold numbers; ArgumentError if it requires grad.
    """
    if type(x) is not np.ndarray:
        x = _convert(x, name)
    if x.dtype.type not in NUMBERS:
        if x.dtype.type in _TWINS:
            return x.view(x.dtype.str)
        hint = "" if x.dtype.hasobject else f"; {name}.view(np.uint8) moves its bytes as they are"
        raise DtypeError(f"{name} should hold numbers, its dtype is {x.dtype}{hint}")
    return x


def is_device_array(x: Any) -> bool:
    """Whether x is in the memory of a GPU, so that it needs a backend for device arrays. Imports no GPU library."""
    return type(x) is not np.ndarray and not isinstance(x, (np.ndarray, np.generic)) and _device(x) in GPU


def _device(x: Any) -> int:
    """DLPack's device type of x. Without `__dlpack_device__`: CUDA if x has `__cuda_array_interface__`, else CPU."""
    locate = getattr(x, "__dlpack_device__", None)
    if locate is None:
        return CUDA if hasattr(x, "__cuda_array_interface__") else CPU
    try:
        return int(locate()[0])
    except _REFUSALS:  # A device that DLPack does not know, or a class instead of an array.
        return CPU


def _convert(x: Any, name: str) -> Array:
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(f"{name} is a masked array, and its mask would be lost: pass {name}.filled(...)")
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if isinstance(x, np.generic):
        return _read_only(np.asarray(x))
    if getattr(x, "requires_grad", None) is True:
        raise ArgumentError(
            f"{name} requires grad ({type(x).__name__}), and autograd would not see this collective: pass "
            f"{name}.detach(), which shares its memory; for ddp's tensors ddp.parallel has collectives with gradients"
        )
    if (device := _device(x)) not in HOST:
        device_name = "a GPU" if device in GPU else f"a device of DLPack's kind {device}"
        raise DtypeError(
            f"{name} is on {device_name} ({type(x).__name__}), and this communicator moves host arrays: pass "
            f"{name}.get() (CuPy) or {name}.cpu() (PyTorch), or a CuPy array to a communicator of a GPU backend"
        )
    try:
        array = _shared(x)
    except _REFUSALS as error:
        raise DtypeError(f"{name} ({type(x).__name__}) cannot be read as a NumPy array: {error}") from error
    if array is None:
        raise DtypeError(f"{name} should be an array, is {type(x).__name__} {x!r:.60}: np.asarray(...) makes one")
    return array


def _shared(x: Any) -> Array | None:
    """x as an array that shares its memory, or as a read-only copy; None if x has none of the array interfaces."""
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    if str(getattr(x, "dtype", "")) == "torch.bfloat16":  # NumPy's DLPack reader does not support it.
        bits = _shared(x.view(sys.modules["torch"].int16))
        return None if bits is None else bits.view(BFLOAT16)
    # DLPack is tried before __array__: once __array__ was called, PyTorch no longer lets the storage be resized, and
    # FSDP resizes storages. If a DLPack producer does not say that its memory is writable, NumPy makes a read-only
    # array; then __array__ is used.
    readers: list[Callable[[Any], Array]] = [np.from_dlpack] if hasattr(x, "__dlpack__") else []
    readers += [np.asarray] if hasattr(x, "__array__") else []
    array: Array | None = None
    refusals = []
    for read in readers:
        try:
            array = _read_by(read, x)
        except _REFUSALS as error:
            refusals.append(str(error))
            continue
        if array.flags.writeable:
            return array
    if array is not None:
        return array
    if refusals:
        raise DtypeError("; ".join(dict.fromkeys(refusals)))
    try:
        return np.asarray(memoryview(x))
    except TypeError:
        return None


def _read_by(read: Callable[[Any], Array], x: Any) -> Array:
    array = read(x)
    # Neither protocol says whether it copied. If two reads return the same memory, it is x's own.
    return array if not array.size or np.may_share_memory(array, read(x)) else _read_only(array)


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The dtype as text that `dtype_of` reads: "<f4"; "<bfloat16", which NumPy would write as "<V2"."""
    return f"{dtype.str[0]}bfloat16" if dtype.type is BFLOAT16.type else dtype.str


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype that `dtype_name` wrote as text."""
    return BFLOAT16.newbyteorder(name[0]) if name[1:] == "bfloat16" else np.dtype(name)


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`out` as an array into which a result of this shape and dtype can be written.

    Raises: ArgumentError if the shape or the dtype of `out` differs, or `out` is read-only; what `as_array` raises.
    """
    return writable(check_shape(as_array(out, "out"), shape, dtype), "out")


def check_shape(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns `array`, on the host or a GPU. Raises: ArgumentError if it does not have this shape and dtype."""
    if array.shape != shape or array.dtype != dtype:
        raise ArgumentError(f"out should be {dtype} {shape}, is {array.dtype} {array.shape}")
    return array


def writable(array: Array, name: str) -> Array:
    """Returns `array`. Raises: ArgumentError if it is read-only, like a NumPy scalar or a copy that `as_array` made."""
    if not array.flags.writeable:
        raise ArgumentError(
            f"{name} is read-only, or could only be read by a copy, and this rank's result would be written into it: "
            "pass an array that can be written to"
        )
    return array


def flat(array: Array) -> Array:
    """A one-dimensional view of a C-contiguous array."""
    assert array.flags.c_contiguous
    return array.reshape(-1)


def as_bytes(array: Array) -> Array:
    """A (nbytes,) uint8 view of a C-contiguous array."""
    return flat(array).view(np.uint8)


def is_plain(array: Array) -> bool:
    """True if the array is C-contiguous and aligned, so that a C library can use its memory without a copy."""
    return array.flags.c_contiguous and array.flags.aligned


def contiguous(array: Array) -> Array:
    """The array itself if it is C-contiguous and aligned, else a copy that is; 0-d arrays stay 0-d."""
    return array if is_plain(array) else array.copy(order="C")


def rows(array: Array) -> Array:
    """The array as rows along axis 0; a 0-d array becomes one row."""
    return array.reshape(1) if array.ndim == 0 else array


def row_bytes(array: Array) -> int:
    """Bytes of one row along axis 0, also for an array without rows."""
    count = 1
    for length in array.shape[1:]:
        count *= length
    return count * array.itemsize


# DLPack's device types.
CPU = 1
CUDA = 2
#: Device types that count as host memory: the CPU's own, and memory pinned for CUDA or ROCm.
HOST = frozenset({CPU, 3, 11})
#: Device types that count as the memory of a GPU: CUDA, ROCm, and CUDA's managed memory.
GPU = frozenset({CUDA, 10, 13})


# Lengths along axis 0: how many rows each rank contributes, receives or sends.

#: Rows of each rank. "equal": every rank has as many as this one. None: the ranks exchange their lengths.
Lengths = Sequence[int] | Literal["equal"] | None


def check_lengths(lengths: Sequence[int], size: int, name: str = "lengths") -> list[int]:
    """Returns lengths along axis 0, one per rank, as a list of int. name: the argument's name, for errors

    Raises: ArgumentError unless `lengths` are `size` integers of at least 0.
    """
    try:
        read = [operator.index(length) for length in lengths]  # int() would truncate 4.5 to 4.
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} should be whole numbers, one a rank, are {lengths!r}") from None
    if len(read) != size or any(length < 0 for length in read):
        raise ArgumentError(f"{name} should be {size} numbers of at least 0, one a rank, are {read}")
    return read


def even_lengths(total: int, size: int) -> list[int]:
    """The ranks' lengths if `total` is split as by `np.array_split`: `even_lengths(7, 3) == [3, 2, 2]`."""
    return [total // size + (rank < total % size) for rank in range(size)]


def split_rows(rows: int, lengths: Sequence[int] | None, size: int) -> list[int]:
    """How many rows each rank gets if `rows` rows are split by `lengths`, or, for None, as evenly as possible.

    Raises: ArgumentError if the lengths are invalid, or do not add up to `rows`.
    """
    parts = even_lengths(rows, size) if lengths is None else check_lengths(lengths, size)
    if sum(parts) != rows:
        raise ArgumentError(f"lengths {parts} add up to {sum(parts)}, x has {rows} rows")
    return parts


def joined_rows(rows: int, lengths: Lengths, rank: int, size: int) -> list[int] | None:
    """The number of rows that each rank contributes; None if they must exchange it. rows: this rank's number

    Raises: ArgumentError if `lengths` is invalid, or contradicts `rows`.
    """
    if lengths is None:
        return [rows] if size == 1 else None
    if isinstance(lengths, str):
        if lengths != "equal":
            raise ArgumentError(f'lengths should be a list, "equal" or None, is {lengths!r}')
        return [rows] * size
    known = check_lengths(lengths, size)
    if known[rank] != rows:
        raise ArgumentError(f"lengths[{rank}] is {known[rank]}, but x has {rows} rows on this rank")
    return known


def exchanged_rows(rows: int, lengths: Any, rank: int, size: int) -> tuple[list[int], list[list[int]] | None]:
    """The number of rows that this rank sends to each rank; and the table of all ranks' numbers, None if unknown yet.

    Raises: ArgumentError for invalid lengths, or if they do not add up to `rows`.
    """
    table = None
    if isinstance(lengths, str):
        if lengths != "equal":
            raise ArgumentError(f'lengths should be a list, a table, "equal" or None, is {lengths!r}')
        if rows % size:
            raise ArgumentError(f'lengths="equal" needs a multiple of {size} rows, x has {rows} on rank {rank}')
        table = [[rows // size] * size] * size
    elif _is_table(lengths):
        table = [check_lengths(row, size) for row in lengths]
        if len(table) != size:
            raise ArgumentError(f"lengths should be a table of {size} rows, one a source, has {len(table)}")
    if table is not None:
        sends = table[rank]
    else:
        sends = even_lengths(rows, size) if lengths is None else check_lengths(lengths, size)
    if sum(sends) != rows:
        raise ArgumentError(f"lengths {sends} add up to {sum(sends)}, x has {rows} rows on rank {rank}")
    return sends, [sends] if size == 1 else table


def _is_table(lengths: Any) -> bool:
    """Whether `lengths` is a table, one list for each rank. Raises: ArgumentError if the lists differ in length."""
    try:
        return np.ndim(lengths) == 2
    except ValueError:
        raise ArgumentError(f"lengths should be a list, or a table of rows of one length, is {lengths!r}") from None


def as_tuples(lengths: Any, size: int) -> tuple[Any, ...]:
    """Lengths as a tuple, or a table as a tuple of tuples, for `exchanged_rows`. Raises: ArgumentError if invalid."""
    if _is_table(lengths):
        return tuple(tuple(check_lengths(row, size)) for row in lengths)
    return tuple(check_lengths(lengths, size))


def describe_lengths(lengths: object, known: object) -> str:
    """The text " lengths [...]", equal for all types of sequences; "" for None. known: the lengths as lists of int"""
    if lengths is None:
        return ""
    return f" lengths {lengths if isinstance(lengths, str) else known}"
