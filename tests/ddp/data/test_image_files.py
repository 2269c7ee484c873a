"""MNIST and CIFAR: every type and number of dimensions, packed or not; a bad file is named, with the byte."""

from __future__ import annotations

import gzip
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from ddp.data import CIFAR10, CIFAR100, MNIST, read_cifar, read_idx
from ddp.errors import ArgumentError, DataFileError, RangeError
from tests.ddp.data import written_files as made

SHAPES = [(), (0,), (4, 3, 2), (1,) * 64]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", made.CODES)
def test_every_type_and_shape(dtype: str, shape: tuple[int, ...], packed: bool, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    (tmp_path / "x").write_bytes(gzip.compress(made.idx(array)) if packed else made.idx(array))
    found = read_idx(tmp_path / "x")
    assert found.dtype == np.dtype(dtype)
    assert found.dtype.isnative
    assert found.flags.writeable
    np.testing.assert_array_equal(found, array, strict=True)


def header(code: int, *sizes: int) -> bytes:
    return struct.pack(f">HBB{len(sizes)}I", 0, code, len(sizes), *sizes)


GOOD = made.idx(np.arange(6, dtype="i2"))
PACKED = gzip.compress(GOOD)


@pytest.mark.parametrize(
    ("data", "byte", "says"),
    [
        (b"", 0, "expected a magic number of 4 bytes, and the file ends after 0"),
        (b"\x89PNG", 0, r"expected two zero bytes, as an IDX file begins, found b'\x89P'"),
        (header(0x08, 3)[:6], 6, "expected the sizes of 1 dimensions of 4 bytes, and the file ends after 2"),
        (header(0x08, *[1] * 65) + b"x", 264, "expected at most 64 dimensions, as NumPy has them, found 65"),
        (header(0x08, 3) + b"xx", 10, "expected uint8 of shape (3,), 3 bytes, and 2 are left: truncated"),
        (header(0x0E, *[2**32 - 1] * 9), 40, "are left: truncated"),
        (header(0x08, 0, *[2**32 - 1] * 3), 20, "NumPy has no array of shape (0, 4294967295"),
        (PACKED[:-9], None, "this cannot be unpacked: Compressed file ended before the end-of-stream marker"),
        (PACKED[:-8] + b"abcd" + PACKED[-4:], None, "this cannot be unpacked: CRC check failed"),
        (gzip.compress(GOOD[:-1]), 19, "expected int16 of shape (6,), 12 bytes, and 11 are left: truncated"),
    ],
    ids=range(10),
)  # fmt: skip
def test_a_bad_file_is_named_with_the_byte(data: bytes, byte: int | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(data)
    place = "" if byte is None else f" byte {byte}:"
    with pytest.raises(DataFileError, match=f"^{re.escape(str(path))}:{place} .*{re.escape(says)}"):
        read_idx(path)


@pytest.mark.parametrize("below", [".", "MNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist(packed: bool, below: str, tmp_path: Path) -> None:
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    parts = made.mnist(tmp_path / below, packed)
    for part, train in (("train", True), ("t10k", False)):
        pictures, labels = parts[part]
        dataset = MNIST(tmp_path, train=train)
        assert len(dataset) == len(labels)
        for place, (picture, label) in enumerate(dataset):
            assert type(label) is int
            assert label == labels[place]
            np.testing.assert_array_equal(picture, pictures[place], strict=True)
        np.testing.assert_array_equal(dataset[-1][0], pictures[-1])
        picked = dataset.__getitems__([2, 0, -1])
        np.testing.assert_array_equal([label for _, label in picked], labels[[2, 0, -1]])
        np.testing.assert_array_equal([picture for picture, _ in picked], pictures[[2, 0, -1]])
        for index in (len(labels), -len(labels) - 1):
            with pytest.raises(RangeError, match=f"MNIST: index {index} of {len(labels)} samples"):
                dataset[index]


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(
        DataFileError, match=r"MNIST: there is no train-images-idx3-ubyte or train-images-idx3-ubyte.gz in"
    ):
        MNIST(tmp_path)
    made.mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(made.idx(np.zeros(6, "u1")))
    with pytest.raises(DataFileError, match="the files hold 7 pictures, and 6 labels"):
        MNIST(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(made.idx(np.zeros(7, "i2")))
    with pytest.raises(DataFileError, match="ubyte: expected uint8 in 1 dimensions, found >i2 in 1"):
        MNIST(tmp_path)


# -- CIFAR, the binary version

TEN = np.array([[3], [9], [0]])
HUNDRED = np.array([[19, 99], [0, 7], [3, 0]])


def test_read_cifar(tmp_path: Path) -> None:
    for classes, labels, expected in ((10, TEN, TEN[:, 0]), (100, HUNDRED, HUNDRED)):
        data, pictures = made.cifar(labels)
        (tmp_path / "x.bin").write_bytes(data)
        found = read_cifar(tmp_path / "x.bin", classes)
        np.testing.assert_array_equal(found[0], pictures, strict=True)
        np.testing.assert_array_equal(found[1], expected.astype(np.uint8), strict=True)
    with pytest.raises(ArgumentError, match="expected 10 or 100 classes, got 20"):
        read_cifar(tmp_path / "x.bin", 20)


@pytest.mark.parametrize("below", [".", "cifar-10-batches-bin"])
def test_cifar_10(below: str, tmp_path: Path) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    everything = []
    for number in range(1, 6):  # of different lengths, unlike the real ones
        data, pictures = made.cifar(np.full((number, 1), number), number)
        (tmp_path / below / f"data_batch_{number}.bin").write_bytes(data)
        everything += [(picture, number) for picture in pictures]
    (tmp_path / below / "test_batch.bin").write_bytes(made.cifar(TEN)[0])
    for dataset in (CIFAR10(tmp_path), pickle.loads(pickle.dumps(CIFAR10(tmp_path, train=True)))):
        assert len(dataset) == 15
        for (picture, label), (expected, number) in zip(dataset, everything, strict=True):
            assert type(label) is int
            assert label == number
            np.testing.assert_array_equal(picture, expected, strict=True)
        assert [label for _, label in dataset.__getitems__([-1, 0, 1, 2, 14])] == [5, 1, 2, 2, 5]
    test = CIFAR10(
        tmp_path, train=False, transform=lambda picture: picture.mean(), target_transform=lambda label: -label
    )
    assert [label for _, label in test] == [-3, -9, 0]
    assert test[1][0] == made.cifar(TEN)[1][1].mean()


def test_cifar_100(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(made.cifar(HUNDRED)[0])
    assert [label for _, label in CIFAR100(tmp_path)] == [99, 7, 0]
    assert [label for _, label in CIFAR100(tmp_path, coarse=True)] == [19, 0, 3]
    with pytest.raises(DataFileError, match=r"CIFAR100: there is no test.bin in .*, nor in cifar-100-binary there"):
        CIFAR100(tmp_path, train=False)


@pytest.mark.parametrize(
    ("data", "classes", "byte", "says"),
    [
        (b"", 10, 0, "expected records of 3073 bytes; 0 are whole, and 0 bytes are left"),
        (made.cifar(TEN)[0][:-1], 10, 6146, "expected records of 3073 bytes; 2 are whole, and 3072 bytes are left"),
        (made.cifar(TEN + 1)[0], 10, 3073, "expected a label below 10, found 10"),
        (made.cifar(HUNDRED + [1, 0])[0], 100, 0, "expected a label below 20, found 20"),
        (made.cifar(HUNDRED[::-1] + [0, 93])[0], 100, 3075, "expected a label below 100, found 100"),
    ],
)
def test_a_bad_file_of_cifar_is_named_with_the_byte(
    data: bytes, classes: int, byte: int, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(data)
    with pytest.raises(DataFileError, match=f"^{re.escape(str(path))}: byte {byte}: {says}$"):
        read_cifar(path, classes)
