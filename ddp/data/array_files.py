"""Datasets of NumPy's .npy files and of flat files of tokens.

The header of an .npy file is read here, as NumPy's own reader raises whatever its parser does, and loads a pickle if it
is let:

    bytes 0-5   \\x93NUMPY
    bytes 6-7   the format's version
    then        the length of the header, 2 bytes in version 1 and 4 later, little-endian
    the header  a Python dict of descr, fortran_order and shape, in latin-1, or in UTF-8 from version 3 on

Source: NumPy Enhancement Proposal 1, and `numpy.lib.format`
"""

from __future__ import annotations

import ast
import os
import re
from typing import Any

import numpy as np

from ddp.data.mapped_files import Array, DataFile, FileDataset, Path
from ddp.errors import ArgumentError, DataFileError, DtypeError

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
_LIMIT = 1 << 16  # bytes of a header: NumPy writes 118, but for dtypes of many fields
_TOO_LONG = 1 << 63  # elements along one dimension
_SIMPLE = re.compile(r"[<>|=]?[biufcSUVmM]\d*(\[\w+\])?")


def declared(file: DataFile) -> tuple[np.dtype[Any], tuple[int, ...], str]:
    """The dtype, shape and order ("C" or "F") that the header at the beginning of `file` declares.

    Raises: DataFileError if there is none, or its dtype is that of Python objects, which are pickled.
    """
    begin = file.head(8, "a magic number")
    if begin[:6] != _MAGIC:
        file.fail(f"expected {_MAGIC!r}, as an .npy file begins, found {begin[:6]!r}", 0)
    version = begin[6], begin[7]
    if version not in _LENGTH_BYTES:
        file.fail(f"expected version 1.0, 2.0 or 3.0, found {version[0]}.{version[1]}", 6)
    length = int.from_bytes(file.head(_LENGTH_BYTES[version], "the header's length"), "little")
    if length > _LIMIT:
        file.fail(f"expected a header of at most {_LIMIT:,} bytes, found {length:,}", 8)
    at = file.at
    return _checked(file, file.head(length, "a header"), version, at)


def _checked(
    file: DataFile, text: bytes, version: tuple[int, int], at: int
) -> tuple[np.dtype[Any], tuple[int, ...], str]:
    try:
        header = ast.literal_eval(text.decode("utf-8" if version >= (3, 0) else "latin-1").strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # all that is not a literal, or too deep
        header = None
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        file.fail(f"expected a dict of descr, fortran_order and shape, found {_short(text)}", at)
    shape, order = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not all(type(size) is int and 0 <= size < _TOO_LONG for size in shape):
        file.fail(f"expected a shape, found {_short(shape)}", at)
    if type(order) is not bool:
        file.fail(f"expected fortran_order to be True or False, found {_short(order)}", at)
    dtype = _dtype(header["descr"])
    if dtype is None:
        file.fail(f"expected a dtype, found {_short(header['descr'])}", at)
    if dtype.hasobject:
        file.fail("these are Python objects, which are pickled, and a pickle is never loaded", at)
    if not dtype.itemsize:
        file.fail(f"expected elements of one byte or more, found {_short(header['descr'])}", at)
    return dtype, shape, "F" if order else "C"


def _dtype(descr: Any) -> np.dtype[Any] | None:
    if isinstance(descr, str) and descr in ("O", "|O"):
        return np.dtype(object)
    if isinstance(descr, str) and not _SIMPLE.fullmatch(descr):
        return None
    try:
        return np.lib.format.descr_to_dtype(descr)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, SyntaxError):
        return None  # NumPy checks no more than it must


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python shows no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def element(column: Array, place: int) -> Any:
    """`column[place]`, a view where it can be one, in native byte order; a dict by field where the dtype has fields."""
    return _plain(column[place])


def _plain(value: Any) -> Any:
    if value.dtype.names is not None:
        return {name: _plain(value[name]) for name in value.dtype.names}
    if isinstance(value, np.ndarray) and not (value.dtype.isnative and value.flags.aligned):
        return value.astype(value.dtype.newbyteorder("="))
    return value  # NumPy's scalars are native already


class NpyDataset(FileDataset):
    """Sample i is a tuple of element i of each file, as with `TensorDataset`.

    paths: .npy files, (N, ...) each, of one N; they are mapped, and the arrays of a sample are read-only views of them
    An element of a structured dtype comes as a dict by field. An array in Fortran order has its samples' elements far
    apart, and is slow to read.

    Raises: DataFileError for a file that is anything else, also for Python objects, since no pickle is ever loaded;
    ArgumentError without a path, or for one given twice.
    """

    def __init__(self, *paths: Path) -> None:
        self.paths = tuple(os.path.abspath(path) for path in paths)
        if not paths or len(set(self.paths)) < len(paths):
            raise ArgumentError(
                f"NpyDataset: expected one path or more, each once, got {', '.join(self.paths) or 'none'}"
            )
        self._begin()

    def __repr__(self) -> str:
        return f"NpyDataset({', '.join(map(repr, self.paths))})"

    def _open(self) -> tuple[tuple[Array, ...], int]:
        columns = []
        for path in self.paths:
            file = DataFile(path)
            columns.append(file.array(*declared(file)))
        shapes = {path: column.shape for path, column in zip(self.paths, columns, strict=True)}
        if not all(shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
            raise DataFileError(f"{self!r}: expected arrays of one length in dimension 0, found shapes {shapes}")
        return tuple(columns), len(columns[0])

    def _sample(self, opened: tuple[Array, ...], place: int) -> tuple[Any, ...]:
        return tuple([element(column, place) for column in opened])


class TokenFile(FileDataset):
    """A file of tokens, mapped: sample i is (input, target), (block_size) int64 each, the target one token further on.

    path: the tokens, and nothing else
    dtype: of the tokens in the file: any integers, such as "uint16", or ">u2" for big-endian ones
    block_size: tokens of an input
    stride: tokens from the beginning of a block to that of the next; None: block_size, so that each token is a target
    once. What is left at the end of the file, less than a block, is no sample.

    Raises: DataFileError for a file that does not hold whole tokens, or none for a single block.
    """

    def __init__(self, path: Path, dtype: Any, block_size: int, stride: int | None = None) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype.kind not in "iu":
            raise DtypeError(f"TokenFile: expected a dtype of integers, got {self.dtype}")
        self.block_size = block_size
        self.stride = block_size if stride is None else stride
        if self.block_size < 1 or self.stride < 1:
            raise ArgumentError(
                f"TokenFile: expected a block_size and a stride of 1 or more, got {block_size} and {stride}"
            )
        self.path = os.path.abspath(path)
        self._begin()

    def __repr__(self) -> str:
        return f"TokenFile({self.path!r}, {str(self.dtype)!r}, {self.block_size}, {self.stride})"

    def _open(self) -> tuple[Array, int]:
        file = DataFile(self.path)
        size = len(file.data)
        count, left = divmod(size, self.dtype.itemsize)
        if left:
            file.fail(f"expected {self.dtype} of {self.dtype.itemsize} bytes, and {left} are left", size - left)
        if count <= self.block_size:
            what = f"expected {self.block_size + 1} tokens, a block and its target, and the file ends after {count}"
            file.fail(what, size)
        return file.array(self.dtype, (count,)), (count - 1 - self.block_size) // self.stride + 1

    def _sample(self, opened: Array, place: int) -> tuple[Array, Array]:
        begin = place * self.stride
        tokens = opened[begin : begin + self.block_size + 1].astype(np.int64)
        return tokens[:-1], tokens[1:]
