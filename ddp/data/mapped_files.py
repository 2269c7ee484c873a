"""Files of samples, mapped into memory, and datasets over them.

All that a file says is checked against its size before anything is allocated. A dataset is pickled by path: a worker
process maps the file anew, and no sample goes through a pipe."""

from __future__ import annotations

import functools
import math
import mmap
import operator
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ddp._files import open_regular
from ddp.data.datasets import Dataset
from ddp.errors import DataFileError, RangeError

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


class FileDataset(Dataset[Any]):
    """A dataset whose state is where its files are. A subclass has `_open` and `_sample`, and calls `_begin`.

    A file must not be shortened while it is mapped: the system kills a process that reads behind its end (SIGBUS).
    """

    _length: int

    def _open(self) -> tuple[Any, int]:
        """What `_sample` reads from, and how many samples there are. Raises: DataFileError"""
        raise NotImplementedError

    def _sample(self, opened: Any, place: int) -> Any:
        """Sample `place`, which is one of 0 to the length - 1, from what `_open` gave."""
        raise NotImplementedError

    def _begin(self) -> None:
        self._opened, self._length = self._open()

    @functools.cached_property
    def _opened(self) -> Any:
        opened, length = self._open()  # in another process, perhaps much later
        if length != self._length:
            raise DataFileError(f"{self!r} had {self._length} samples when it was made, and now has {length}")
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._sample(self._opened, self._place(index))

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        if type(self).__getitem__ is not FileDataset.__getitem__:
            return [self[index] for index in indices]  # a subclass says what a sample is
        opened, sample, place = self._opened, self._sample, self._place
        return [sample(opened, place(index)) for index in indices]

    def _place(self, index: Any) -> int:
        place = operator.index(index)
        if not -self._length <= place < self._length:
            raise RangeError(f"{type(self).__name__}: index {place} of {self._length} samples")
        return place % self._length
