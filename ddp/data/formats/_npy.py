"""The header of an .npy file. NumPy's own reader raises whatever its parser does, and will load a pickle if it is let.

    bytes 0-5   \\x93NUMPY
    bytes 6-7   the format's version
    then        the length of the header, 2 bytes in version 1 and 4 later, little-endian
    the header  a Python dict of descr, fortran_order and shape, in latin-1, or in UTF-8 from version 3 on

Source: NumPy Enhancement Proposal 1, and `numpy.lib.format`
"""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np

from ddp.data.formats._files import DataFile

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
