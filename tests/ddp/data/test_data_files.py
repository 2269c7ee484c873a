"""Files of samples: what is in them, and that a bad one is named and takes no more memory than it has."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ddp.data import CIFAR10, CIFAR100, MNIST, DataLoader, NpyDataset, TokenFile, read_cifar, read_idx
from ddp.errors import ArgumentError, DataFileError, DtypeError
from tests.mutations import mutated

Array = np.ndarray[Any, Any]
CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array: Array) -> bytes:
    header = bytes([0, 0, CODES[array.dtype.str[1:]], array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def idx_header(code: int, *sizes: int) -> bytes:
    return struct.pack(f">HBB{len(sizes)}I", 0, code, len(sizes), *sizes)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def cifar(labels: Any, seed: int = 0) -> tuple[bytes, Array]:
    """The bytes of a file of CIFAR with these labels, (N, 1) or (N, 2), and its pictures."""
    pictures = np.random.default_rng(seed).integers(0, 256, (len(labels), 3, 32, 32), np.uint8)
    return np.hstack([np.asarray(labels, np.uint8), pictures.reshape(len(labels), -1)]).tobytes(), pictures


@pytest.mark.parametrize("shape", [(), (0,), (4, 3, 2), (1,) * 64], ids=len)
def test_idx_of_every_type_and_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    for dtype in CODES:
        array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
        for data in (idx(array), gzip.compress(idx(array))):
            (tmp_path / "x").write_bytes(data)
            result = read_idx(tmp_path / "x")
            assert result.dtype.isnative
            assert result.flags.writeable
            assert_array_equal(result, array, strict=True)


GOOD = idx(np.arange(6, dtype="i2"))
PACKED = gzip.compress(GOOD)
NPY = npy(np.arange(6, dtype="i4"))
TEN, HUNDRED = np.array([[3], [9], [0]]), np.array([[19, 99], [0, 7], [3, 0]])


def tokens(path: Path) -> Any:
    return TokenFile(path, "uint16", 4)


@pytest.mark.parametrize(
    ("read", "data", "says"),
    [
        (read_idx, b"", "expected an IDX file, .*, found b''"),
        (read_idx, b"\x89PNG", "expected an IDX file"),
        (read_idx, idx_header(8, 3)[:6], "not the uint8 in 1 dimensions that it says"),
        (read_idx, idx_header(8, *[1] * 65) + b"x", "maximum supported dimension"),
        (read_idx, idx_header(8, 3) + b"xx", "not the uint8 in 1 dimensions that it says: cannot reshape"),
        (read_idx, GOOD + b"x", "not the >?i(nt)?16"),
        (read_idx, idx_header(14, *[2**32 - 1] * 9), "not the .*float64 in 9 dimensions"),
        (read_idx, idx_header(8, 0, *[2**32 - 1] * 3), "not the uint8 in 4 dimensions"),
        (read_idx, PACKED[:-9], "it cannot be unpacked: .*ended before"),
        (read_idx, PACKED[:-8] + b"abcd" + PACKED[-4:], "it cannot be unpacked: CRC check"),
        (read_idx, gzip.compress(idx_header(8, 2**32 - 1, 2**10)), "not the uint8 in 2 dimensions"),
        (read_cifar, cifar(TEN)[0][:-1], "expected records of 3073 bytes, found 9,218 bytes"),
        (read_cifar, cifar(TEN + 1)[0], r"expected labels below \(10,\), found \[10\]"),
        (tokens, bytes(8), "expected uint16 tokens, 5 or more, found 8 bytes"),
        (tokens, bytes(21), "expected uint16 tokens, 5 or more, found 21 bytes"),
        (NpyDataset, b"PK\x03\x04abcdefgh", "no .npy file of plain numbers: the magic string is not"),
        (NpyDataset, NPY[:-1], "no .npy file .*: mmap length is greater than file size"),
        (NpyDataset, NPY + b"x", "153 bytes, expected 152 for its array"),
        (NpyDataset, b"\x93NUMPY\x03\0\0\0\0\x7f{'descr'", "no .npy file: .* longer than the file"),
        (NpyDataset, npy(np.array([{}, None])), "no .npy file .*Python objects in dtype"),
    ],
    ids=range(20),
)
def test_a_bad_file_is_named(read: Callable[[Path], Any], data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(DataFileError, match=f"^{re.escape(str(path))}: .*{says}"):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20  # whatever it declares
    tracemalloc.stop()


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_idx, read_cifar, tokens, NpyDataset):
        with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "nothing"))):
            read(tmp_path / "nothing")
        for name, says in (("pipe", "it is a named pipe"), (".", "it is a directory")):
            with pytest.raises(DataFileError, match=f"^{re.escape(str(tmp_path / name))}: {says}"):
                read(tmp_path / name)


# What headers are of, and what breaks out of them.
PIECES = [struct.pack(">I", size) for size in (0, 1, 2**16, 2**31, 2**32 - 1)]
PIECES += [bytes([0, 0, code, dimensions]) for code in CODES.values() for dimensions in (0, 1, 3, 255)]
TEXTS = [b"'descr'", b"(9999999999,)", b"(", b"[" * 200, b"'|O'", b"('<i4', 2)", b"True", b"1e999", b"{}", b"\0", b"PK"]


@pytest.mark.parametrize(
    ("read", "files", "pieces"),
    [
        (read_idx, [idx(np.zeros((40, 28, 28), "u1")), idx(np.zeros((3, 5), "f8")), idx(np.array(1, "i4"))], PIECES),
        (NpyDataset, [npy(np.arange(12.0).reshape(4, 3)), npy(np.zeros(3, ">f4"))], TEXTS),
    ],
)
def test_damaged_files(read: Any, files: list[bytes], pieces: list[bytes], count: Any, tmp_path: Path) -> None:
    """Refused with our error, or read: never killed, and nothing else is raised. Memory is bounded by the file."""
    rng = random.Random(7)
    path = tmp_path / "x"
    whole = 0
    for number in range(count(300, 10_000)):
        path.write_bytes(data := mutated(files[number % len(files)], rng, pieces))
        tracemalloc.start()
        try:
            result = read(path)
        except DataFileError:
            continue
        finally:
            assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + (1 << 18)
            tracemalloc.stop()
        whole += 1
        if read is NpyDataset:
            assert len([result[i] for i in range(len(result))]) == len(result)
    assert whole > 5


# -- NumPy's files

ARRAYS = {
    "plain": np.arange(24.0).reshape(4, 3, 2),
    "scalars": np.arange(5, dtype="u2"),
    "big": np.arange(12, dtype=">i4").reshape(4, 3),
    "fortran": np.asfortranarray(np.arange(12).reshape(4, 3)),
    "text": np.array(["a", "bcd"]),
    "empty": np.zeros((0, 3)),
    "hollow": np.zeros((3, 0)),
}


def test_npy_files_are_mapped(tmp_path: Path) -> None:
    x = tmp_path / "x.npy"
    for array in ARRAYS.values():
        np.save(x, array)
        np.save(tmp_path / "y.npy", np.arange(len(array)))
        dataset = NpyDataset(x, tmp_path / "y.npy")
        copy = pickle.dumps(dataset)
        assert len(copy) < 500
        for each in (dataset, pickle.loads(copy)):
            rows = [actual for actual, _ in each]
            assert all(row.dtype.isnative for row in rows)
            assert_array_equal(rows, [*array])
            assert [number for _, number in each] == [*range(len(array))]
            with pytest.raises(IndexError):
                each[len(array)]
    assert not NpyDataset(x)[0][0].flags.writeable
    np.save(tmp_path / "z.npy", np.zeros(4))
    with pytest.raises(DataFileError, match="expected arrays of one length in dimension 0, found shapes"):
        NpyDataset(x, tmp_path / "z.npy")
    with pytest.raises(ArgumentError, match="NpyDataset: expected one path or more"):
        NpyDataset()


class Halved(NpyDataset):
    def __getitem__(self, index: Any) -> Any:
        (row,) = super().__getitem__(index)
        return (row / 2,)


def test_a_batch_of_a_subclass_is_of_its_own_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))
    ((batch,),) = DataLoader(Halved(tmp_path / "x.npy"), batch_size=3)
    assert batch.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]


# -- tokens


@pytest.mark.parametrize(
    ("count", "block_size", "stride", "begins"),
    [(5, 4, None, [0]), (8, 4, None, [0]), (9, 4, None, [0, 4]), (9, 4, 2, [0, 2, 4]), (12, 4, 7, [0, 7])],
)
def test_blocks_of_tokens(count: int, block_size: int, stride: int | None, begins: list[int], tmp_path: Path) -> None:
    for dtype in ("u1", "<u2", ">u2", "i8"):
        np.arange(count, dtype=dtype).tofile(tmp_path / "tokens")
        dataset = TokenFile(tmp_path / "tokens", dtype, block_size, stride)
        for each in (dataset, pickle.loads(pickle.dumps(dataset))):
            assert [int(source[0]) for source, _ in each] == begins
            for source, target in each:
                assert_array_equal(source, source[0] + np.arange(block_size), strict=True)
                assert_array_equal(target, source + 1, strict=True)


@pytest.mark.parametrize("args", [("f4", 4), ("u2", 0), ("u2", 4, 0)])
def test_wrong_use_of_tokens(args: Any, tmp_path: Path) -> None:
    with pytest.raises((DtypeError, ArgumentError), match="TokenFile: expected"):
        TokenFile(tmp_path / "tokens", *args)


# -- pictures


def put_mnist(path: Path, name: str, array: Array) -> None:
    data = idx(array)
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


@pytest.mark.parametrize(("below", "ending"), [(".", ""), ("MNIST/raw", ".gz")])
@pytest.mark.parametrize(("train", "part"), [(True, "train"), (False, "t10k")])
def test_mnist(below: str, ending: str, train: bool, part: str, tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=rf"MNIST: there is no {part}-images-idx3-ubyte in"):
        MNIST(tmp_path, train=train)
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (7, 28, 28), np.uint8)
    labels = rng.integers(0, 10, 7, np.uint8)
    put_mnist(tmp_path / below, f"{part}-images-idx3-ubyte{ending}", pictures)
    put_mnist(tmp_path / below, f"{part}-labels-idx1-ubyte{ending}", labels)
    dataset = MNIST(tmp_path, train=train)
    assert_array_equal([picture for picture, _ in dataset], pictures, strict=True)
    assert [label for _, label in dataset] == labels.tolist()
    assert type(dataset[0][1]) is int
    with pytest.raises(IndexError):
        dataset[7]


@pytest.mark.parametrize(
    ("pictures", "labels"),
    [
        (np.zeros((3, 28, 28), "f4"), np.zeros(3, "u1")),
        (np.zeros((3, 28, 28), "u1"), np.zeros(2, "u1")),
        (np.zeros((3, 28, 28), "u1"), np.zeros(3, "i2")),
    ],
    ids=["dtype of pictures", "number of labels", "dtype of labels"],
)
def test_what_is_no_mnist(pictures: Array, labels: Array, tmp_path: Path) -> None:
    put_mnist(tmp_path, "train-images-idx3-ubyte", pictures)
    put_mnist(tmp_path, "train-labels-idx1-ubyte", labels)
    with pytest.raises(DataFileError, match=r"expected pictures \(N, H, W\) and labels \(N\) of uint8"):
        MNIST(tmp_path)


def test_read_cifar_of_another_number_of_classes(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="expected 10 or 100 classes, got 20"):
        read_cifar(tmp_path, 20)


@pytest.mark.parametrize("below", [".", "cifar-10-batches-bin"])
def test_cifar(below: str, tmp_path: Path) -> None:
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    expected = []
    for number in range(1, 6):  # of different lengths, unlike the real ones
        data, pictures = cifar(np.full((number, 1), number), number)
        (folder / f"data_batch_{number}.bin").write_bytes(data)
        expected += [(picture, number) for picture in pictures]
    for (picture, label), (expected_picture, number) in zip(CIFAR10(tmp_path), expected, strict=True):
        assert type(label) is int
        assert label == number
        assert_array_equal(picture, expected_picture, strict=True)
    data, pictures = cifar(TEN)
    (folder / "test_batch.bin").write_bytes(data)
    test = CIFAR10(tmp_path, train=False, transform=np.mean, target_transform=lambda label: -label)
    assert list(test) == [(picture.mean(), -label) for picture, (label,) in zip(pictures, TEN, strict=True)]
    (tmp_path / "train.bin").write_bytes(cifar(HUNDRED)[0])
    assert_array_equal(read_cifar(tmp_path / "train.bin", 100)[1], HUNDRED.astype(np.uint8), strict=True)
    assert [label for _, label in CIFAR100(tmp_path)] == [99, 7, 0]
    with pytest.raises(DataFileError, match=r"CIFAR100: there is no test.bin in .*, nor in cifar-100-binary there"):
        CIFAR100(tmp_path, train=False)
