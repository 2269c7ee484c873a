"""IDX: every type and number of dimensions, packed or not; a bad file is named, with the byte."""

from __future__ import annotations

import gzip
import os
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp.data import MNIST, DataLoader, read_idx
from ddp.data.formats import _files
from ddp.errors import DataFileError, RangeError
from tests.ddp.data.formats import made

SHAPES = [(), (0,), (5,), (2, 3), (4, 3, 2), (2, 0, 3), (1,) * 64]


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


def test_packed_files_one_after_the_other_are_one(tmp_path: Path) -> None:
    whole = made.idx(np.arange(100_000, dtype="i4"))
    (tmp_path / "x.gz").write_bytes(
        b"".join(gzip.compress(whole[at : at + 99_999]) for at in range(0, 400_012, 99_999))
    )
    np.testing.assert_array_equal(read_idx(tmp_path / "x.gz"), np.arange(100_000))


def header(code: int, *sizes: int) -> bytes:
    return struct.pack(f">HBB{len(sizes)}I", 0, code, len(sizes), *sizes)


GOOD = made.idx(np.arange(6, dtype="i2"))
PACKED = gzip.compress(GOOD)


@pytest.mark.parametrize(
    ("data", "byte", "says"),
    [
        (b"", 0, "expected a magic number of 4 bytes, and the file ends after 0"),
        (b"\0\0\x08", 3, "expected a magic number of 4 bytes, and the file ends after 3"),
        (b"\x89PNG", 0, r"expected two zero bytes, as an IDX file begins, found b'\x89P'"),
        (header(0x0A, 3), 2, "expected a type, one of 0x08 (uint8), 0x09 (int8), 0x0b (int16)"),
        (header(0x08, 3)[:6], 6, "expected the sizes of 1 dimensions of 4 bytes, and the file ends after 2"),
        (header(0x08, *[1] * 65) + b"x", 264, "expected at most 64 dimensions, as NumPy has them, found 65"),
        (header(0x08, 3) + b"xx", 10, "expected uint8 of shape (3,), 3 bytes, and 2 are left: truncated"),
        (header(0x08, 3) + b"xxxx", 11, "expected uint8 of shape (3,), 3 bytes, and 4 are left: too long"),
        (header(0x0E, *[2**32 - 1] * 9), 40, "are left: truncated"),
        (header(0x08, 0, *[2**32 - 1] * 3), 20, "NumPy has no array of shape (0, 4294967295"),
        (PACKED[:-9], 20, "this cannot be unpacked: the packed bytes end too early"),
        (PACKED[:-8] + b"abcd" + PACKED[-4:], 8, "this cannot be unpacked: "),
        (PACKED + b"garbage", 20, "this cannot be unpacked: "),
        (b"\x1f\x8bgarbage", 0, "this cannot be unpacked: "),
        (gzip.compress(GOOD + b"x"), 20, "expected the end, after int16 of shape (6,), and more bytes follow"),
        (gzip.compress(GOOD[:-1]), 19, "expected int16 of shape (6,), 12 bytes, and the file ends after 11"),
        (gzip.compress(header(0x08, 2**31)), 8, "packed bytes are not believed to hold more than 1,048,576"),
    ],
    ids=range(17),
)  # fmt: skip
def test_a_bad_file_is_named_with_the_byte(data: bytes, byte: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(data)
    packed = " of what it unpacks to" if data[:2] == b"\x1f\x8b" else ""
    with pytest.raises(DataFileError, match=f"^{re.escape(str(path))}: byte {byte}{packed}: .*{re.escape(says)}"):
        read_idx(path)


def test_gzip_is_believed_up_to_a_ratio(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "zeros.gz").write_bytes(gzip.compress(made.idx(np.zeros(100_000, "u1"))))  # a thousandth of it
    assert not read_idx(tmp_path / "zeros.gz").any()
    monkeypatch.setattr(_files, "ALWAYS", 0)
    with pytest.raises(DataFileError, match="if they do, unpack the file first"):
        read_idx(tmp_path / "zeros.gz")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(DataFileError, match="is no regular file"):
            read_idx(path)
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "none")


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


def half(picture: Any) -> Any:
    return picture[::2]


def test_transforms(tmp_path: Path) -> None:
    pictures, labels = made.mnist(tmp_path)["train"]
    dataset = MNIST(tmp_path, transform=half, target_transform=str)
    picture, label = dataset[1]
    np.testing.assert_array_equal(picture, pictures[1, ::2])
    assert label == str(labels[1])
    assert dataset.__getitems__([1])[0][1] == label


def test_what_is_pickled_is_where_the_files_are(tmp_path: Path) -> None:
    made.mnist(tmp_path, counts=(1000, 1))
    dataset = MNIST(tmp_path)
    dataset[0]
    sent = pickle.dumps(dataset)
    assert len(sent) < 500
    again = pickle.loads(sent)
    np.testing.assert_array_equal(again[9][0], dataset[9][0])
    assert len(again) == 1000
    made.mnist(tmp_path, counts=(9, 1))
    with pytest.raises(DataFileError, match=r"MNIST\(.*had 1000 samples when it was made, and now has 9"):
        pickle.loads(sent)[0]


def test_a_worker_process_maps_the_files_itself(tmp_path: Path) -> None:
    pictures, labels = made.mnist(tmp_path, counts=(40, 1))["train"]
    batches = list(DataLoader(MNIST(tmp_path), batch_size=16, num_workers=1, timeout=30))
    np.testing.assert_array_equal(np.concatenate([batch[0].numpy() for batch in batches]), pictures)
    np.testing.assert_array_equal(np.concatenate([batch[1].numpy() for batch in batches]), labels)


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
    with pytest.raises(DataFileError, match="byte 2: expected uint8 in 1 dimensions, found int16 in 1"):
        MNIST(tmp_path)
