"""Datasets of files: NumPy's .npy files, flat files of tokens, and MNIST and CIFAR as their authors publish them.

Files are memory-mapped, and what a file declares is checked against its size before anything is allocated. A dataset is
pickled by path, so that a worker process maps its files again and no sample goes through a pipe.

An IDX file, as MNIST has them, is big-endian: two zero bytes, the type (a key of `_IDX_TYPES`), the number of
dimensions, the size of each as 4 bytes, and the elements. A file of CIFAR has records of one or two label bytes and
3 x 32 x 32 bytes, and nothing else.

Source: LeCun, Cortes, Burges: The MNIST database of handwritten digits; Krizhevsky: The CIFAR-10 and CIFAR-100 datasets
"""

from __future__ import annotations

import bisect
import functools
import gzip
import io
import math
import operator
import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp._files import open_regular
from ddp.data.datasets import Dataset
from ddp.errors import ArgumentError, DataFileError, DtypeError, RangeError

Array = np.ndarray[Any, Any]
Path = str | os.PathLike[str]

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_HEADER = 4 + 4 * 255  # bytes at most
_GZIP_RATIO = 1032  # the most that deflate packs
_CIFAR_LABELS = {10: (10,), 100: (20, 100)}  # classes of each of a record's label bytes


def _map(path: Path) -> Array:
    """The bytes of a file, mapped and read-only: (N) uint8.

    Raises: FileNotFoundError or another OSError, which names the path; DataFileError if it is not a regular file, or
    cannot be mapped.
    """
    try:
        with open(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # cannot be mapped
                return np.empty(0, np.uint8)
            return np.memmap(file, mode="r").view(np.ndarray)
    except OSError as error:
        if error.filename is not None:
            raise
        raise DataFileError(f"{os.fspath(path)}: {error.strerror or error}") from error


# -- one file as an array


def read_idx(path: Path) -> Array:
    """The array of an IDX file, new and in native byte order, of the type and shape that the file declares.

    path: a file, also one that gzip has packed, whatever its name
    Raises: DataFileError, which names the file, for anything else.
    """
    found = _idx(path)
    return found.astype(found.dtype.newbyteorder("="))


def _idx(path: Path) -> Array:
    """The array of an IDX file, read-only: mapped, or in memory if the file was packed."""
    data = _map(path)
    if bytes(data[:2]) == b"\x1f\x8b":
        packed = len(data)
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data.data)) as file:
                data = np.frombuffer(begin := file.read(_IDX_HEADER), np.uint8)
                # One byte more than is declared tells that there are too many; what cannot be true is not allocated.
                end = min(_idx_layout(path, data)[-1] + 1, _GZIP_RATIO * packed)
                data = np.frombuffer(begin + file.read(max(0, end - len(begin))), np.uint8)
        except (EOFError, OSError, zlib.error) as error:
            raise DataFileError(f"{path}: it cannot be unpacked: {error}") from None
    dtype, shape, start, end = _idx_layout(path, data)
    if len(data) != end:
        raise DataFileError(f"{path}: expected {end:,} bytes, for {dtype.name} of shape {shape}, found {len(data):,}")
    try:
        return data[start:].view(dtype).reshape(shape)
    except (ValueError, OverflowError) as error:  # (0, 2**32 - 1, 2**32 - 1, 2**32 - 1), or 65 dimensions
        raise DataFileError(f"{path}: an array of shape {shape}: {error}") from None


def _idx_layout(path: Path, data: Array) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Type and shape that an IDX file declares, where its elements begin, and where they end."""
    begin = bytes(data[:_IDX_HEADER])
    if len(begin) < 4 or begin[:2] != b"\0\0" or begin[2] not in _IDX_TYPES:
        raise DataFileError(f"{path}: expected an IDX file, which begins with 0, 0 and a type, found {begin[:4]!r}")
    dtype, start = np.dtype(_IDX_TYPES[begin[2]]), 4 + 4 * begin[3]
    if len(begin) < start:
        raise DataFileError(f"{path}: expected {begin[3]} dimensions, which take {start} bytes, found {len(begin)}")
    shape = tuple(np.frombuffer(begin[4:start], ">u4").tolist())
    return dtype, shape, start, start + math.prod(shape) * dtype.itemsize


def read_cifar(path: Path, classes: int = 10) -> tuple[Array, Array]:
    """The pictures and labels of one file of CIFAR-10 or CIFAR-100, as new arrays of uint8.

    classes: 10: pictures (N, 3, 32, 32), red first, and labels (N);
    100: the same pictures, and labels (N, 2): the coarse one of 20, and the fine one of 100
    Raises: DataFileError, which names the file, for one that does not consist of whole records, or has a label that is
    out of range; ArgumentError for another number of classes.
    """
    pictures, labels = _cifar(path, classes)
    return pictures.copy(), labels.copy()


def _cifar(path: Path, classes: int) -> tuple[Array, Array]:
    if classes not in _CIFAR_LABELS:
        raise ArgumentError(f"read_cifar: expected 10 or 100 classes, got {classes}")
    limits, data = _CIFAR_LABELS[classes], _map(path)
    record = len(limits) + 3 * 32 * 32
    if not len(data) or len(data) % record:
        raise DataFileError(f"{path}: expected records of {record} bytes, found {len(data):,} bytes")
    records = data.reshape(-1, record)
    labels, pictures = records[:, : len(limits)], records[:, len(limits) :]
    if (labels >= limits).any():
        raise DataFileError(f"{path}: expected labels below {limits}, found {labels.max(axis=0).tolist()}")
    return pictures.reshape(-1, 3, 32, 32), labels[:, 0] if len(limits) == 1 else labels


def _npy(path: Path) -> Array:
    """The array of an .npy file, mapped and read-only."""
    size, begin = len(data := _map(path)), bytes(data[:12])
    header = int.from_bytes(begin[8 : 10 if begin[6:7] == b"\1" else 12], "little")
    try:
        if (
            begin[:6] == np.lib.format.MAGIC_PREFIX and header > size
        ):  # NumPy allocates as much as a header says that it takes
            raise ValueError(f"its header of {header:,} bytes is longer than the file")
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy raises many kinds for a bad header
        raise DataFileError(f"{path}: no .npy file of plain numbers or records: {error}") from None
    if array.offset + array.nbytes != size:
        raise DataFileError(f"{path}: {size:,} bytes, expected {array.offset + array.nbytes:,} for its array")
    return array.view(np.ndarray)


# -- datasets


class _FileDataset(Dataset[Any]):
    """A dataset whose pickle is where its files are. A subclass has `_open` and `_sample`, and calls `_begin`.

    A file must not be shortened while it is mapped: the system kills a process that reads behind its end (SIGBUS).
    """

    _length: int

    def _open(self) -> tuple[Any, int]:
        """What `_sample` reads from, and how many samples there are. Raises: DataFileError"""
        raise NotImplementedError

    def _sample(self, opened: Any, place: int) -> Any:
        """Sample `place`, from 0 to the length - 1, of what `_open` returned."""
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
        place = operator.index(index)
        if not -self._length <= place < self._length:
            raise RangeError(f"{type(self).__name__}: index {place} of {self._length} samples")
        return self._sample(self._opened, place % self._length)


class NpyDataset(_FileDataset):
    """Sample i is a tuple of element i of each file, as with `TensorDataset`.

    paths: .npy files, (N, ...) each, of one N; they are mapped, and the arrays of a sample are read-only views of them
    An element of a structured dtype comes as a dict by field. An array in Fortran order has its samples' elements far
    apart, and is slow to read.

    Raises: DataFileError for a file that is truncated, too long or anything else, also for Python objects, since no
    pickle is ever loaded; ArgumentError without a path.
    """

    def __init__(self, *paths: Path) -> None:
        if not paths:
            raise ArgumentError("NpyDataset: expected one path or more")
        self.paths = tuple(os.path.abspath(path) for path in paths)
        self._begin()

    def __repr__(self) -> str:
        return f"NpyDataset({', '.join(map(repr, self.paths))})"

    def _open(self) -> tuple[tuple[Array, ...], int]:
        columns = tuple(map(_npy, self.paths))
        shapes = [column.shape for column in columns]
        if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            raise DataFileError(f"{self!r}: expected arrays of one length in dimension 0, found shapes {shapes}")
        return columns, len(columns[0])

    def _sample(self, opened: tuple[Array, ...], place: int) -> tuple[Any, ...]:
        return tuple([_native(column[place]) for column in opened])


def _native(value: Any) -> Any:
    """An element in native byte order, a view where it can be one; a dict by field where the dtype has fields."""
    if value.dtype.names is not None:
        return {name: _native(value[name]) for name in value.dtype.names}
    if isinstance(value, np.ndarray) and not (value.dtype.isnative and value.flags.aligned):
        return value.astype(value.dtype.newbyteorder("="))
    return value  # NumPy's scalars are native already


class TokenFile(_FileDataset):
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
        data = _map(self.path)
        tokens, left = divmod(len(data), self.dtype.itemsize)
        if left or tokens <= self.block_size:
            raise DataFileError(
                f"{self.path}: expected {self.dtype} tokens, {self.block_size + 1} or more, found {len(data):,} bytes"
            )
        return data.view(self.dtype), (tokens - 1 - self.block_size) // self.stride + 1

    def _sample(self, opened: Array, place: int) -> tuple[Array, Array]:
        begin = place * self.stride
        tokens = opened[begin : begin + self.block_size + 1].astype(np.int64)
        return tokens[:-1], tokens[1:]


class _Pictures(_FileDataset):
    """Sample i is (picture, label): an array of uint8, a read-only view of the file, and an int."""

    def __init__(self, folder: Path, train: bool = True, transform: Any = None, target_transform: Any = None) -> None:
        self.folder = os.path.abspath(folder)
        self.train, self.transform, self.target_transform = train, transform, target_transform
        self._begin()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.folder!r}, train={self.train})"

    def _parts(self) -> list[tuple[Array, Array]]:
        """Pictures and labels of each file. Raises: DataFileError"""
        raise NotImplementedError

    def _open(self) -> tuple[tuple[list[tuple[Array, Array]], list[int]], int]:
        parts = self._parts()
        ends = np.cumsum([len(labels) for _, labels in parts]).tolist()
        return (parts, ends), ends[-1]

    def _sample(self, opened: tuple[list[tuple[Array, Array]], list[int]], place: int) -> tuple[Any, Any]:
        parts, ends = opened
        part = bisect.bisect_right(ends, place)
        pictures, labels = parts[part]
        place -= ends[part] - len(labels)
        picture, label = pictures[place], int(labels[place])
        target = label if self.target_transform is None else self.target_transform(label)
        return picture if self.transform is None else self.transform(picture), target

    def _path(self, name: str, below: str, endings: Sequence[str] = ("",)) -> str:
        """The path of a file in the folder, or in `below` in it, where archives and PyTorch's downloads put it."""
        for path in (os.path.join(self.folder, at, name + ending) for at in ("", below) for ending in endings):
            if os.path.exists(path):
                return path
        raise DataFileError(f"{type(self).__name__}: there is no {name} in {self.folder}, nor in {below} there")


class MNIST(_Pictures):
    """MNIST, or one of its kin (Fashion-MNIST, KMNIST, ...), in its four files: sample i is (picture, label).

    folder: has train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, or
    those two that are asked for, as they are or packed (.gz); or has them in MNIST/raw. Nothing is downloaded.
    train: the first two files, or the last two
    transform, target_transform: called with the picture, (H, W) uint8, and with the label, an int; None: as they are

    A file that is not packed is mapped, a packed one is unpacked into memory by every process that reads from it.
    Raises: DataFileError for files that are not there, not IDX, or do not fit each other.
    """

    def _parts(self) -> list[tuple[Array, Array]]:
        part = "train" if self.train else "t10k"
        names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
        pictures, labels = (_idx(self._path(name, "MNIST/raw", ("", ".gz"))) for name in names)
        if (pictures.ndim, labels.ndim) != (3, 1) or labels.dtype != np.uint8 or len(pictures) != len(labels):
            raise DataFileError(
                f"{self!r}: expected pictures (N, H, W) and labels (N) of uint8, found {pictures.shape} and"
                f" {labels.shape} of {labels.dtype}"
            )
        return [(pictures, labels)]


class CIFAR10(_Pictures):
    """CIFAR-10, the binary version: sample i is (picture, label), (3, 32, 32) uint8, red first, and an int.

    folder: has data_batch_1.bin to data_batch_5.bin and test_batch.bin, or those that are asked for, itself or in
    cifar-10-batches-bin; they are mapped. Nothing is downloaded.
    train: the first five files, or the last
    transform, target_transform: called with the picture, and with the label; None: as they are
    Raises: DataFileError for files that are not there, or do not hold what they should.
    """

    def _parts(self) -> list[tuple[Array, Array]]:
        names = [f"data_batch_{number}.bin" for number in range(1, 6)] if self.train else ["test_batch.bin"]
        return [_cifar(self._path(name, "cifar-10-batches-bin"), 10) for name in names]


class CIFAR100(_Pictures):
    """CIFAR-100, the binary version: sample i is (picture, label), (3, 32, 32) uint8, red first, and an int.

    folder: has train.bin and test.bin, or the one that is asked for, itself or in cifar-100-binary; it is mapped.
    train: the first file, or the last
    transform, target_transform: called with the picture, and with the label; None: as they are
    coarse: the label is one of the 20 coarse ones, and not of the 100 fine ones
    Raises: DataFileError for files that are not there, or do not hold what they should.
    """

    def __init__(
        self,
        folder: Path,
        train: bool = True,
        transform: Any = None,
        target_transform: Any = None,
        coarse: bool = False,
    ) -> None:
        self._column = 0 if coarse else 1
        super().__init__(folder, train, transform, target_transform)

    def _parts(self) -> list[tuple[Array, Array]]:
        pictures, labels = _cifar(self._path("train.bin" if self.train else "test.bin", "cifar-100-binary"), 100)
        return [(pictures, labels[:, self._column])]
