"""Files of samples, mapped: everything that a file says is checked against its size before anything is allocated."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ddp._files import open_regular
from ddp.errors import DataFileError

Array = np.ndarray[Any, Any]
Path = str | os.PathLike[str]

MOST_DIMENSIONS = 64  # of a NumPy array


class DataFile:
    """A file that is read from its beginning to its end, once.

    data: its bytes, which stay mapped while an array of them lives; at: offset of the next one
    Raises: DataFileError if it is no regular file; OSError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = os.path.abspath(path)
        self.at = 0
        try:
            number = open_regular(self.path)
        except OSError as error:
            if error.errno is None:
                self.fail(str(error), None)
            raise
        try:
            # An empty file cannot be mapped.
            self.data = memoryview(mmap.mmap(number, 0, access=mmap.ACCESS_READ) if os.fstat(number).st_size else b"")
        finally:
            os.close(number)

    def fail(self, what: str, at: int | None) -> NoReturn:
        """Raises: DataFileError, which names the file, and the byte at offset `at` unless that is None."""
        place = "" if at is None else f" byte {at}:"
        raise DataFileError(f"{self.path}:{place} {what}") from None

    def head(self, count: int, what: str) -> bytes:
        """The next `count` bytes of a header, which are `what`. Raises: DataFileError if they are not there."""
        found = bytes(self.data[self.at : self.at + count])
        if len(found) < count:
            self.fail(f"expected {what} of {count} bytes, and the file ends after {len(found)}", len(self.data))
        self.at += count
        return found

    def array(self, dtype: np.dtype[Any], shape: Sequence[int], order: Any = "C") -> Array:
        """All that is left, as a read-only array in the file's own memory. Raises: DataFileError if it is not this."""
        if len(shape) > MOST_DIMENSIONS:
            self.fail(f"expected at most {MOST_DIMENSIONS} dimensions, as NumPy has them, found {len(shape)}", self.at)
        count = math.prod(shape)
        nbytes, left = count * dtype.itemsize, len(self.data) - self.at
        if nbytes != left:
            what = f"{dtype.name} of shape {tuple(shape)}, {nbytes:,} bytes"
            how = "truncated" if nbytes > left else "too long"
            self.fail(f"expected {what}, and {left:,} are left: {how}", min(len(self.data), self.at + nbytes))
        flat: Array = np.frombuffer(self.data, dtype, count, self.at) if count else np.empty(0, dtype)
        flat.flags.writeable = False
        try:
            return flat.reshape(shape, order=order)
        except (ValueError, OverflowError):  # no element, and yet too many: (0, 2**40, 2**40)
            self.fail(f"NumPy has no array of shape {tuple(shape)}", self.at)
