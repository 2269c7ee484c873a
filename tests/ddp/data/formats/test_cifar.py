"""CIFAR, the binary version, of 10 and of 100 classes."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from ddp.data import CIFAR10, CIFAR100, read_cifar
from ddp.errors import ArgumentError, DataFileError
from tests.ddp.data.formats import made

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
def test_a_bad_file_is_named_with_the_byte(data: bytes, classes: int, byte: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(data)
    with pytest.raises(DataFileError, match=f"^{re.escape(str(path))}: byte {byte}: {says}$"):
        read_cifar(path, classes)
