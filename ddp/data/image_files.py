"""MNIST, its kin, and CIFAR: labelled pictures, in the files that their authors publish. Nothing is downloaded.

An IDX file, as MNIST has them, is big-endian:

    bytes 0-1   zero
    byte 2      the type, a key of `_TYPES`
    byte 3      the number of dimensions
    then        the size of each, 4 bytes, and the elements, the last dimension's fastest

A file of CIFAR, in its binary version, has records of one or two labels and 3 x 32 x 32 bytes, and nothing else.

Source: LeCun, Cortes, Burges: The MNIST database of handwritten digits; Krizhevsky: The CIFAR-10 and CIFAR-100 datasets
"""

from __future__ import annotations

import bisect
import gzip
import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp.data.mapped_files import Array, DataFile, FileDataset, Path
from ddp.errors import ArgumentError, DataFileError

Part = tuple[Array, Array]  # pictures, labels

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CIFAR_LABELS = {10: (10,), 100: (20, 100)}  # how many classes each of a record's label bytes tells apart


def read_idx(path: Path) -> Array:
    """The array of an IDX file, new and in native byte order, of the type and shape that the file declares.

    path: a file, also one that gzip has packed, whatever its name
    Raises: DataFileError, which names the byte, for a file that is anything else.
    """
    return (found := _idx(path)).astype(found.dtype.newbyteorder("="))


def _idx(path: Path) -> Array:
    """The array of an IDX file, read-only and mapped, or in memory if it was packed."""
    file = DataFile(path)
    if bytes(file.data[:2]) == b"\x1f\x8b":  # gzip
        try:
            file.data = memoryview(gzip.decompress(file.data))  # checks length and CRC
        except (OSError, EOFError, zlib.error) as error:
            file.fail(f"this cannot be unpacked: {error}", None)
    return file.array(*_declared(file))


def _declared(file: DataFile) -> tuple[np.dtype[Any], tuple[int, ...]]:
    magic = file.head(4, "a magic number")
    if magic[:2] != b"\0\0":
        file.fail(f"expected two zero bytes, as an IDX file begins, found {magic[:2]!r}", 0)
    if magic[2] not in _TYPES:
        file.fail(f"expected a type, one of {', '.join(map(hex, _TYPES))}; found {magic[2]:#x}", 2)
    sizes = np.frombuffer(file.head(4 * magic[3], f"the sizes of {magic[3]} dimensions"), ">u4").tolist()
    return np.dtype(_TYPES[magic[2]]), tuple(sizes)


def read_cifar(path: Path, classes: int = 10) -> Part:
    """The pictures and labels of one file of CIFAR-10 or CIFAR-100, as new arrays of uint8.

    classes: 10: pictures (N, 3, 32, 32), red first, and labels (N);
    100: the same pictures, and labels (N, 2): the coarse one of 20, and the fine one of 100
    Raises: DataFileError, which names the byte, for a file that does not consist of whole records, or has a label that
    is none; ArgumentError for another number of classes.
    """
    pictures, labels = _cifar(path, classes)
    return pictures.copy(), labels.copy()


def _cifar(path: Path, classes: int) -> Part:
    if classes not in _CIFAR_LABELS:
        raise ArgumentError(f"read_cifar: expected 10 or 100 classes, got {classes}")
    most, file = _CIFAR_LABELS[classes], DataFile(path)
    record = len(most) + 3 * 32 * 32
    whole, left = divmod(len(file.data), record)
    if left or not whole:
        file.fail(f"expected records of {record} bytes; {whole} are whole, and {left} bytes are left", whole * record)
    records = file.array(np.dtype(np.uint8), (whole, record))
    labels, pictures = records[:, : len(most)], records[:, len(most) :]
    for column, limit in enumerate(most):
        if (wrong := np.flatnonzero(labels[:, column] >= limit)).size:
            place = int(wrong[0])
            file.fail(f"expected a label below {limit}, found {labels[place, column]}", place * record + column)
    return pictures.reshape(-1, 3, 32, 32), labels[:, 0] if len(most) == 1 else labels


class _Pictures(FileDataset):
    """Sample i is (picture, label): an array of uint8, a read-only view of the file, and an int."""

    def __init__(self, folder: Path, train: bool = True, transform: Any = None, target_transform: Any = None) -> None:
        self.folder = os.path.abspath(folder)
        self.train, self.transform, self.target_transform = train, transform, target_transform
        self._begin()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.folder!r}, train={self.train})"

    def _parts(self) -> list[Part]:
        """Pictures and labels of each file. Raises: DataFileError"""
        raise NotImplementedError

    def _open(self) -> tuple[tuple[list[Part], list[int]], int]:
        parts = self._parts()
        ends = np.cumsum([len(labels) for _, labels in parts]).tolist()
        return (parts, ends), ends[-1]

    def _sample(self, opened: tuple[list[Part], list[int]], place: int) -> tuple[Any, Any]:
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
        names = " or ".join(name + ending for ending in endings)
        raise DataFileError(f"{type(self).__name__}: there is no {names} in {self.folder}, nor in {below} there")


class MNIST(_Pictures):
    """MNIST, or one of its kin (Fashion-MNIST, KMNIST, ...), in its four files: sample i is (picture, label).

    folder: has train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, or
    those two that are asked for, as they are or packed (.gz); or has them in MNIST/raw. Nothing is downloaded.
    train: the first two files, or the last two
    transform, target_transform: called with the picture, (H, W) uint8, and with the label, an int; None: as they are

    A file that is not packed is mapped, a packed one is unpacked into memory by every process that reads from it.
    Raises: DataFileError for files that are not there, not IDX, or do not fit each other.
    """

    def _parts(self) -> list[Part]:
        part = "train" if self.train else "t10k"
        pictures = self._array(f"{part}-images-idx3-ubyte", 3)
        labels = self._array(f"{part}-labels-idx1-ubyte", 1)
        if len(pictures) != len(labels):
            raise DataFileError(f"{self!r}: the files hold {len(pictures)} pictures, and {len(labels)} labels")
        return [(pictures, labels)]

    def _array(self, name: str, dimensions: int) -> Array:
        path = self._path(name, "MNIST/raw", ("", ".gz"))
        found = _idx(path)
        if found.dtype != np.uint8 or found.ndim != dimensions:
            what = f"{found.dtype} in {found.ndim}"
            raise DataFileError(f"{path}: expected uint8 in {dimensions} dimensions, found {what}")
        return found


class CIFAR10(_Pictures):
    """CIFAR-10, the binary version: sample i is (picture, label), (3, 32, 32) uint8, red first, and an int.

    folder: has data_batch_1.bin to data_batch_5.bin and test_batch.bin, or those that are asked for, itself or in
    cifar-10-batches-bin; they are mapped. Nothing is downloaded.
    train: the first five files, or the last
    transform, target_transform: called with the picture, and with the label; None: as they are
    Raises: DataFileError for files that are not there, or do not hold what they should.
    """

    def _parts(self) -> list[Part]:
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

    def _parts(self) -> list[Part]:
        pictures, labels = _cifar(self._path("train.bin" if self.train else "test.bin", "cifar-100-binary"), 100)
        return [(pictures, labels[:, self._column])]
