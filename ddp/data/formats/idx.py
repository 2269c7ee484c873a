"""IDX, the format of MNIST and its kin: big-endian, a type and the sizes of all dimensions, then the elements.

    bytes 0-1   zero
    byte 2      the type, a key of `_TYPES`
    byte 3      the number of dimensions
    then        the size of each, 4 bytes, and the elements, the last dimension's fastest

Source: LeCun, Cortes, Burges: The MNIST database of handwritten digits, "the IDX file format"
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp.data.formats._files import Array, DataFile, Path
from ddp.data.formats._pictures import PictureDataset
from ddp.errors import DataFileError

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Array:
    """The array of an IDX file, new and in native byte order, of the type and shape that the file declares.

    path: a file, also one that gzip has packed, whatever its name
    Raises: DataFileError, which names the byte, for a file that is anything else; nothing larger than it declares, and
    than it can hold, is ever allocated.
    """
    with DataFile(path, may_be_packed=True) as file:
        return file.rest(*_declared(file))


def _declared(file: DataFile) -> tuple[np.dtype[Any], tuple[int, ...]]:
    zero, kind, dimensions = (magic := file.head(4, "a magic number"))[:2], magic[2], magic[3]
    if zero != b"\0\0":
        file.fail(f"expected two zero bytes, as an IDX file begins, found {zero!r}", 0)
    if kind not in _TYPES:
        known = ", ".join(f"{code:#04x} ({np.dtype(name).name})" for code, name in _TYPES.items())
        file.fail(f"expected a type, one of {known}; found {kind:#04x}", 2)
    sizes = np.frombuffer(file.head(4 * dimensions, f"the sizes of {dimensions} dimensions"), ">u4").tolist()
    return np.dtype(_TYPES[kind]), tuple(sizes)


class MNIST(PictureDataset):
    """MNIST, or one of its kin (Fashion-MNIST, KMNIST, ...), in its four files: sample i is (picture, label).

    folder: has train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, or
    those two that are asked for, as they are or packed (.gz); or has them in MNIST/raw. Nothing is downloaded.
    train: the first two files, or the last two
    transform, target_transform: called with the picture, (H, W) uint8, and with the label, an int; None: as they are

    A file that is not packed is mapped, a packed one is unpacked into memory by every process that reads from it.
    Raises: DataFileError for files that are not there, not IDX, or do not fit each other.
    """

    def _open(self) -> tuple[tuple[Array, Array], int]:
        part = "train" if self.train else "t10k"
        images = self._array(f"{part}-images-idx3-ubyte", 3)
        labels = self._array(f"{part}-labels-idx1-ubyte", 1)
        if len(images) != len(labels):
            raise DataFileError(f"{self!r}: the files hold {len(images)} pictures, and {len(labels)} labels")
        return (images, labels), len(images)

    def _array(self, name: str, dimensions: int) -> Array:
        with DataFile(self._found(name, "MNIST/raw", ("", ".gz")), may_be_packed=True) as file:
            dtype, shape = _declared(file)
            if dtype != np.uint8 or len(shape) != dimensions:
                file.fail(f"expected uint8 in {dimensions} dimensions, found {dtype.name} in {len(shape)}", 2)
            return file.rest(dtype, shape) if file.packed else file.mapped(dtype, shape)

    def _sample(self, opened: tuple[Array, Array], place: int) -> tuple[Any, Any]:
        images, labels = opened
        return self._made(images[place], int(labels[place]))
