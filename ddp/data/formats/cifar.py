"""CIFAR-10 and CIFAR-100, the binary version: records of one or two labels and 3 x 32 x 32 bytes, and nothing else.

Source: Krizhevsky: The CIFAR-10 and CIFAR-100 datasets, "binary version"
"""

from __future__ import annotations

import bisect
import itertools
from typing import Any

import numpy as np

from ddp.data.formats._files import Array, DataFile, Path
from ddp.data.formats._pictures import PictureDataset, Transform
from ddp.errors import ArgumentError

_PICTURE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_BYTE = np.dtype(np.uint8)
# How many classes each of a record's label bytes tells apart, by the name of the dataset's number.
_LABELS = {10: (10,), 100: (20, 100)}


def read_cifar(path: Path, classes: int = 10) -> tuple[Array, Array]:
    """The pictures and labels of one file of CIFAR-10 or CIFAR-100, as new arrays of uint8.

    classes: 10: pictures (N, 3, 32, 32), red first, and labels (N);
    100: the same pictures, and labels (N, 2): the coarse one of 20, and the fine one of 100
    Raises: DataFileError, which names the byte, for a file that does not consist of whole records, or has a label that
    is none; ArgumentError for another number of classes.
    """
    if classes not in _LABELS:
        raise ArgumentError(f"read_cifar: expected 10 or 100 classes, got {classes}")
    with DataFile(path) as file:
        return _read(file, classes, in_memory=True)


def _read(file: DataFile, classes: int, in_memory: bool) -> tuple[Array, Array]:
    most = _LABELS[classes]
    record = len(most) + _PIXELS
    if not file.size or file.size % record:
        whole = file.size // record
        file.fail(
            f"expected records of {record} bytes; {whole} are whole, and {file.size % record} bytes are left",
            whole * record,
        )
    shape = (file.size // record, record)
    records = file.rest(_BYTE, shape) if in_memory else file.mapped(_BYTE, shape)
    labels, pictures = records[:, : len(most)], records[:, len(most) :]
    for column, limit in enumerate(most):
        if (wrong := np.flatnonzero(labels[:, column] >= limit)).size:
            place = int(wrong[0])
            file.fail(f"expected a label below {limit}, found {labels[place, column]}", place * record + column)
    return pictures.reshape(-1, *_PICTURE), labels[:, 0] if len(most) == 1 else labels


class _Cifar(PictureDataset):
    """What the two have in common. Class attributes: the number of classes, the names of files, and of their folder."""

    _classes: int
    _train: tuple[str, ...]
    _test: str
    _below: str
    _column: int | None = None

    def _open(self) -> tuple[tuple[list[tuple[Array, Array]], list[int]], int]:
        parts = []
        for name in self._train if self.train else (self._test,):
            with DataFile(self._found(name, self._below)) as file:
                parts.append(_read(file, self._classes, in_memory=False))
        ends = list(itertools.accumulate(len(labels) for _, labels in parts))
        return (parts, ends), ends[-1]

    def _sample(self, opened: tuple[list[tuple[Array, Array]], list[int]], place: int) -> tuple[Any, Any]:
        parts, ends = opened
        part = bisect.bisect_right(ends, place)
        pictures, labels = parts[part]
        place -= ends[part - 1] if part else 0
        return self._made(pictures[place], int(labels[place] if self._column is None else labels[place, self._column]))


class CIFAR10(_Cifar):
    """CIFAR-10, the binary version: sample i is (picture, label), (3, 32, 32) uint8, red first, and an int.

    folder: has data_batch_1.bin to data_batch_5.bin and test_batch.bin, or those that are asked for, itself or in
    cifar-10-batches-bin; they are mapped. Nothing is downloaded.
    train: the first five files, or the last
    transform, target_transform: called with the picture, and with the label; None: as they are
    Raises: DataFileError for files that are not there, or do not hold what they should.
    """

    _classes = 10
    _train = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
    _test = "test_batch.bin"
    _below = "cifar-10-batches-bin"


class CIFAR100(_Cifar):
    """CIFAR-100, the binary version: sample i is (picture, label), (3, 32, 32) uint8, red first, and an int.

    folder: has train.bin and test.bin, or the one that is asked for, itself or in cifar-100-binary; it is mapped.
    train: the first file, or the last
    transform, target_transform: called with the picture, and with the label; None: as they are
    coarse: the label is one of the 20 coarse ones, and not of the 100 fine ones
    Raises: DataFileError for files that are not there, or do not hold what they should.
    """

    _classes = 100
    _train = ("train.bin",)
    _test = "test.bin"
    _below = "cifar-100-binary"

    def __init__(
        self,
        folder: Path,
        train: bool = True,
        transform: Transform = None,
        target_transform: Transform = None,
        coarse: bool = False,
    ) -> None:
        self._column = 0 if coarse else 1
        super().__init__(folder, train, transform, target_transform)
