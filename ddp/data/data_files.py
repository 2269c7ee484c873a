"""Datasets of files: NumPy's .npy files, flat files of tokens, and MNIST and CIFAR as their authors publish them.

.npy and token files are memory-mapped, and their datasets are pickled as paths, so that a worker process maps the files
again and no sample goes through a pipe. MNIST and CIFAR are read into memory, and a loader's workers share one copy.

An IDX file, as MNIST has them, is big-endian: two zero bytes, the type (a key of `_IDX_TYPES`), the number of
dimensions, the size of each as 4 bytes, and the elements. A file of CIFAR has records of one or two label bytes and
3 x 32 x 32 bytes, and nothing else.

Source: LeCun, Cortes, Burges: The MNIST database of handwritten digits; Krizhevsky: The CIFAR-10 and CIFAR-100 datasets
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp._files import open_regular
from ddp.data.datasets import Dataset
from ddp.errors import ArgumentError, DataFileError, DtypeError

Array = np.ndarray[Any, Any]
Path = str | os.PathLike[str]

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
# For each number of classes: the number of values that each label byte of a record can have.
_CIFAR_LABELS = {10: (10,), 100: (20, 100)}


def _map(path: Path) -> Array:
    """The bytes of a file, mapped and read-only: (N) uint8.

    Raises: FileNotFoundError or another OSError, which names the path; DataFileError if it is not a regular file, or
    cannot be mapped.
    """
    try:
        with open(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
                return np.empty(0, np.uint8)
            return np.memmap(file, mode="r").view(np.ndarray)
    except OSError as error:
        if error.filename is not None:
            raise
        raise DataFileError(f"{os.fspath(path)}: {error.strerror or error}") from error


# -- one file as an array


def read_idx(path: Path) -> Array:
    """Reads an IDX file into a new array of the type and shape that the file declares, in native byte order.

    path: the file, plain or compressed by gzip, whatever its name
    Raises: DataFileError, which names the file, if it is not an IDX file; OSError if it cannot be opened.
    """
    data = _map(path)
    if bytes(data[:2]) == b"\x1f\x8b":
        try:
            data = np.frombuffer(gzip.decompress(data.data), np.uint8)
        except (EOFError, OSError, zlib.error) as error:
            raise DataFileError(f"{path}: it cannot be unpacked: {error}") from None
    begin = bytes(data[:4])
    if len(begin) < 4 or begin[:2] != b"\0\0" or begin[2] not in _IDX_TYPES:
        raise DataFileError(f"{path}: expected an IDX file, which begins with 0, 0 and a type, found {begin!r}")
    dtype = np.dtype(_IDX_TYPES[begin[2]])
    dimensions = begin[3]
    try:
        shape = np.frombuffer(data, ">u4", dimensions, 4).tolist()
        return data[4 + 4 * dimensions :].view(dtype).reshape(shape).astype(dtype.newbyteorder("="))
    except (ValueError, OverflowError) as error:
        raise DataFileError(f"{path}: not the {dtype.name} in {dimensions} dimensions that it says: {error}") from None


def read_cifar(path: Path, classes: int = 10) -> tuple[Array, Array]:
    """Reads the images and labels of one file of CIFAR-10 or CIFAR-100, as new arrays of uint8.

    classes: 10: images (N, 3, 32, 32), red first, and labels (N);
    100: images of the same shape, and labels (N, 2): the coarse one of 20, and the fine one of 100
    Raises: DataFileError, which names the file, if it does not consist of whole records, or has a label that is out of
    range; ArgumentError for another number of classes; OSError if the file cannot be opened.
    """
    if classes not in _CIFAR_LABELS:
        raise ArgumentError(f"read_cifar: expected 10 or 100 classes, got {classes}")
    limits = _CIFAR_LABELS[classes]
    data = _map(path)
    record = len(limits) + 3 * 32 * 32
    if not len(data) or len(data) % record:
        raise DataFileError(f"{path}: expected records of {record} bytes, found {len(data):,} bytes")
    records = data.reshape(-1, record)
    labels = records[:, : len(limits)]
    pictures = records[:, len(limits) :]
    if (labels >= limits).any():
        raise DataFileError(f"{path}: expected labels below {limits}, found {labels.max(axis=0).tolist()}")
    return pictures.reshape(-1, 3, 32, 32).copy(), (labels[:, 0] if len(limits) == 1 else labels).copy()


def _npy(path: Path) -> Array:
    """The array of an .npy file, mapped and read-only."""
    size = len(data := _map(path))
    begin = bytes(data[:12])
    header = int.from_bytes(begin[8 : 10 if begin[6:7] == b"\1" else 12], "little")
    # NumPy would allocate as many bytes as the file declares for its header.
    if begin[:6] == np.lib.format.MAGIC_PREFIX and header > size:
        raise DataFileError(f"{path}: no .npy file: its header of {header:,} bytes is longer than the file")
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy raises errors of many classes for a bad header
        raise DataFileError(f"{path}: no .npy file of plain numbers: {error}") from None
    if array.offset + array.nbytes != size:
        raise DataFileError(f"{path}: {size:,} bytes, expected {array.offset + array.nbytes:,} for its array")
    return array.view(np.ndarray)


# -- datasets


class _MappedDataset(Dataset[Any]):
    """A dataset that is pickled as the paths of its files. A subclass defines `_map_files`.

    A file must not be shortened while it is mapped: the system kills a process that reads past its end (SIGBUS).
    """

    _mapped: Any

    def _map_files(self) -> Any:
        """Maps the files, and returns the value of `_mapped`. Raises: DataFileError"""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_mapped"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._mapped = self._map_files()


class NpyDataset(_MappedDataset):
    """Sample i is a tuple of element i of each file, as with `TensorDataset`.

    paths: .npy files, (N, ...) each, with the same N; they are mapped, and the arrays of a sample are read-only views,
    or copies if the file's byte order is not this machine's
    Samples of an array in Fortran order are slow to read, because their elements are far apart.

    Raises: DataFileError if a file is truncated, too long or not an .npy file, if the lengths differ, for a 0-d array,
    and for arrays of Python objects, since no pickle is ever loaded; ArgumentError without a path; OSError if a file
    cannot be opened.
    """

    def __init__(self, *paths: Path) -> None:
        if not paths:
            raise ArgumentError("NpyDataset: expected one path or more")
        self.paths = tuple(os.path.abspath(path) for path in paths)
        self._mapped = self._map_files()

    def _map_files(self) -> tuple[Array, ...]:
        columns = tuple(map(_npy, self.paths))
        shapes = [column.shape for column in columns]
        if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            raise DataFileError(f"{self.paths}: expected arrays of one length in dimension 0, found shapes {shapes}")
        return columns

    def __len__(self) -> int:
        return len(self._mapped[0])

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        return tuple([_native(column[index]) for column in self._mapped])


def _native(value: Any) -> Any:
    """Converts an element to native byte order. Returns the element itself if it is native and aligned."""
    if isinstance(value, np.ndarray) and not (value.dtype.isnative and value.flags.aligned):
        return value.astype(value.dtype.newbyteorder("="))
    return value  # NumPy's scalars are native already


class TokenFile(_MappedDataset):
    """A mapped file of tokens: sample i is (input, target), (block_size) int64 each. The target begins one token later.

    path: a file that contains only tokens
    dtype: of the tokens in the file: any integers, such as "uint16", or ">u2" for big-endian ones
    block_size: tokens of an input
    stride: tokens from the beginning of a block to that of the next; None: block_size, so that no token is a target
    twice. Tokens at the end of the file that do not fill a block are left out.

    Raises: DataFileError for a file that does not hold whole tokens, or too few for one block; DtypeError for a dtype
    that is not of integers; TypeError for one that NumPy does not know; ArgumentError for a block_size or stride below
    1; OSError if the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: Any, block_size: int, stride: int | None = None) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype.kind not in "iu":
            raise DtypeError(f"TokenFile: expected a dtype of integers, got {self.dtype}")
        self.path = os.path.abspath(path)
        self.block_size = block_size
        self.stride = block_size if stride is None else stride
        if self.block_size < 1 or self.stride < 1:
            raise ArgumentError(
                f"TokenFile: expected a block_size and a stride of 1 or more, got {block_size} and {stride}"
            )
        self._mapped = self._map_files()

    def _map_files(self) -> Array:
        data = _map(self.path)
        tokens, left = divmod(len(data), self.dtype.itemsize)
        if left or tokens <= self.block_size:
            raise DataFileError(
                f"{self.path}: expected {self.dtype} tokens, {self.block_size + 1} or more, found {len(data):,} bytes"
            )
        return data.view(self.dtype)

    def __len__(self) -> int:
        return (len(self._mapped) - 1 - self.block_size) // self.stride + 1

    def __getitem__(self, index: Any) -> tuple[Array, Array]:
        begin = range(len(self))[index] * self.stride
        tokens = self._mapped[begin : begin + self.block_size + 1].astype(np.int64)
        return tokens[:-1], tokens[1:]


class _Pictures(Dataset[Any]):
    """Sample i is (image, label): an array of uint8, and an int. data: (N, ...) uint8; targets: (N)"""

    def __init__(self, folder: Path, train: bool = True, transform: Any = None, target_transform: Any = None) -> None:
        self.folder = os.path.abspath(folder)
        self.train = train
        self.transform = transform
        self.target_transform = target_transform
        self.data, self.targets = self._read()

    def _read(self) -> tuple[Array, Array]:
        """Reads `data` and `targets`. Raises: DataFileError"""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        picture = self.data[index]
        label = int(self.targets[index])
        target = label if self.target_transform is None else self.target_transform(label)
        return picture if self.transform is None else self.transform(picture), target

    def _path(self, name: str, below: str, endings: Sequence[str] = ("",)) -> str:
        """Finds a file in the folder, or in its subfolder `below`, where archives and torchvision's downloads put it.

        endings: what may follow `name` in the file's name; tried in this order
        """
        for path in (os.path.join(self.folder, place, name + ending) for place in ("", below) for ending in endings):
            if os.path.exists(path):
                return path
        raise DataFileError(f"{type(self).__name__}: there is no {name} in {self.folder}, nor in {below} there")


class MNIST(_Pictures):
    """MNIST, or a dataset of the same format (Fashion-MNIST, KMNIST, ...): sample i is (image, label).

    folder: has the two files that `train` selects, plain or compressed (.gz), directly in it or in MNIST/raw. Nothing
    is downloaded.
    train: True: train-images-idx3-ubyte and train-labels-idx1-ubyte; False: t10k-images-idx3-ubyte and
    t10k-labels-idx1-ubyte
    transform, target_transform: called with the image, (H, W) uint8, and with the label, an int; None: unchanged

    Raises: DataFileError for files that are missing, are not IDX, or do not match each other; OSError if one cannot be
    opened.
    """

    def _read(self) -> tuple[Array, Array]:
        part = "train" if self.train else "t10k"
        names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
        pictures, labels = (read_idx(self._path(name, "MNIST/raw", ("", ".gz"))) for name in names)
        right_dtypes = pictures.dtype == labels.dtype == np.uint8
        if (pictures.ndim, labels.ndim) != (3, 1) or not right_dtypes or len(pictures) != len(labels):
            raise DataFileError(
                f"{self.folder}: expected pictures (N, H, W) and labels (N) of uint8, found {pictures.shape} of"
                f" {pictures.dtype} and {labels.shape} of {labels.dtype}"
            )
        return pictures, labels


class CIFAR10(_Pictures):
    """CIFAR-10, the binary version: sample i is (image, label).

    image: (3, 32, 32) uint8, the red channel first; label: an int from 0 to 9

    folder: has the files that `train` selects, directly in it or in cifar-10-batches-bin. Nothing is downloaded.
    train: True: data_batch_1.bin to data_batch_5.bin; False: test_batch.bin
    transform, target_transform: called with the image, and with the label; None: unchanged
    Raises: DataFileError for files that are missing or are not in this format; OSError if one cannot be opened.
    """

    def _read(self) -> tuple[Array, Array]:
        names = [f"data_batch_{number}.bin" for number in range(1, 6)] if self.train else ["test_batch.bin"]
        parts = [read_cifar(self._path(name, "cifar-10-batches-bin")) for name in names]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


class CIFAR100(_Pictures):
    """CIFAR-100, the binary version: sample i is (image, label).

    image: (3, 32, 32) uint8, the red channel first; label: the fine label, an int from 0 to 99

    folder: has the file that `train` selects, directly in it or in cifar-100-binary
    train: True: train.bin; False: test.bin
    transform, target_transform: called with the image and with the label; None: unchanged
    Raises: DataFileError for a file that is missing or is not in this format; OSError if it cannot be opened.
    """

    def _read(self) -> tuple[Array, Array]:
        pictures, labels = read_cifar(self._path("train.bin" if self.train else "test.bin", "cifar-100-binary"), 100)
        return pictures, labels[:, 1]
