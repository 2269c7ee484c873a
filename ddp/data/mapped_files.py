"""Datasets of files of samples, mapped into memory: NumPy's .npy files and flat files of tokens.

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
from ddp.errors import ArgumentError, DataFileError, DtypeError, RangeError

Array = np.ndarray[Any, Any]
Path = str | os.PathLike[str]

_MOST_DIMENSIONS = 64  # of a NumPy array


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
        if len(shape) > _MOST_DIMENSIONS:
            self.fail(f"expected at most {_MOST_DIMENSIONS} dimensions, as NumPy has them, found {len(shape)}", self.at)
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


class NpyDataset(FileDataset):
    """Sample i is a tuple of element i of each file, as with `TensorDataset`.

    paths: .npy files, (N, ...) each, of one N; they are mapped, and the arrays of a sample are read-only views of them
    An element of a structured dtype comes as a dict by field. An array in Fortran order has its samples' elements far
    apart, and is slow to read.

    Raises: DataFileError for a file that is truncated, too long or anything else, also for Python objects, since no
    pickle is ever loaded; ArgumentError without a path, or for one given twice.
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
        columns = tuple(_mapped_npy(path) for path in self.paths)
        shapes = {path: column.shape for path, column in zip(self.paths, columns, strict=True)}
        if not all(shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
            raise DataFileError(f"{self!r}: expected arrays of one length in dimension 0, found shapes {shapes}")
        return columns, len(columns[0])

    def _sample(self, opened: tuple[Array, ...], place: int) -> tuple[Any, ...]:
        return tuple([_native(column[place]) for column in opened])


def _mapped_npy(path: str) -> Array:
    """The array of an .npy file, mapped and read-only. Raises: DataFileError, with NumPy's reason."""
    file = DataFile(path)
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # NumPy raises many kinds for a bad header
        file.fail(f"no .npy file of plain numbers or records: {error}", None)
    left = len(file.data) - array.offset - array.nbytes
    if left:
        file.fail(f"{left} bytes follow the array of {array.dtype} {array.shape}", array.offset + array.nbytes)
    return array.view(np.ndarray)


def _native(value: Any) -> Any:
    """An element in native byte order, a view where it can be one; a dict by field where the dtype has fields."""
    if value.dtype.names is not None:
        return {name: _native(value[name]) for name in value.dtype.names}
    if isinstance(value, np.ndarray) and not (value.dtype.isnative and value.flags.aligned):
        return value.astype(value.dtype.newbyteorder("="))
    return value  # NumPy's scalars are native already


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
