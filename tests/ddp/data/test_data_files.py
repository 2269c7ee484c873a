"""Files of samples: what is in them, and that a bad one is named and takes no more memory than it has."""

from __future__ import annotations

import gzip
import io
import mmap
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

from ddp.data import CIFAR10, CIFAR100, MNIST, DataLoader, NpyDataset, TokenFile, read_cifar, read_idx
from ddp.errors import ArgumentError, DataFileError, DtypeError, RangeError
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (4, 3, 2), (1,) * 64], ids=len)
@pytest.mark.parametrize("dtype", CODES)
def test_idx_of_every_type_and_shape(dtype: str, shape: tuple[int, ...], packed: bool, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    (tmp_path / "x").write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    found = read_idx(tmp_path / "x")
    assert found.dtype.isnative
    assert found.flags.writeable
    np.testing.assert_array_equal(found, array, strict=True)


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
        (read_idx, idx_header(8, 3)[:6], "expected 1 dimensions, .*, found 6"),
        (read_idx, idx_header(8, *[1] * 65) + b"x", "maximum supported dimension"),
        (read_idx, idx_header(8, 3) + b"xx", r"expected 11 bytes, for uint8 of shape \(3,\), found 10"),
        (read_idx, GOOD + b"x", "expected 20 bytes, .*, found 21"),
        (read_idx, idx_header(14, *[2**32 - 1] * 9), "expected .* bytes"),
        (read_idx, idx_header(8, 0, *[2**32 - 1] * 3), "an array of shape"),
        (read_idx, PACKED[:-9], "it cannot be unpacked: .*ended before"),
        (read_idx, PACKED[:-8] + b"abcd" + PACKED[-4:], "it cannot be unpacked: CRC check"),
        (read_idx, gzip.compress(GOOD[:-1]), "expected 20 bytes, .*, found 19"),
        (read_idx, gzip.compress(GOOD + bytes(1 << 24)), "expected 20 bytes, .*, found 1,024"),
        (read_idx, gzip.compress(idx_header(8, 2**32 - 1, 2**10)), "expected 4,398,"),
        (read_cifar, b"", "expected records of 3073 bytes, found 0 bytes"),
        (read_cifar, cifar(TEN)[0][:-1], "expected records of 3073 bytes, found 9,218 bytes"),
        (read_cifar, cifar(TEN + 1)[0], r"expected labels below \(10,\), found \[10\]"),
        (tokens, bytes(8), "expected uint16 tokens, 5 or more, found 8 bytes"),
        (tokens, bytes(21), "expected uint16 tokens, 5 or more, found 21 bytes"),
        (NpyDataset, b"PK\x03\x04abcdefgh", "no .npy file of plain numbers or records: the magic string is not"),
        (NpyDataset, NPY[:-1], "no .npy file .*: mmap length is greater than file size"),
        (NpyDataset, NPY + b"x", "153 bytes, expected 152 for its array"),
        (NpyDataset, NPY.replace(b"{'descr'", b"[" * 8), "no .npy file"),
        (NpyDataset, b"\x93NUMPY\x03\0\0\0\0\x7f{'descr'", "no .npy file .* longer than the file"),
        (NpyDataset, npy(np.array([{}, None])), "no .npy file .*Python objects in dtype"),
    ],
    ids=range(24),
)
def test_a_bad_file_is_named(read: Callable[[Path], Any], data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(DataFileError, match=f"^{re.escape(str(path))}: .*{says}"):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20  # whatever it declares, and unpacks to
    tracemalloc.stop()


@pytest.mark.parametrize("read", [read_idx, read_cifar, tokens, NpyDataset])
def test_what_is_no_file_is_named(read: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "nothing"))):
        read(tmp_path / "nothing")
    for name, says in (("pipe", "it is a named pipe"), (".", "it is a directory")):
        with pytest.raises(DataFileError, match=f"^{re.escape(str(tmp_path / name))}: {says}"):
            read(tmp_path / name)


# What headers are of, and what breaks out of them.
PIECES = [struct.pack(">I", size) for size in (0, 1, 2**16, 2**31, 2**32 - 1)]
PIECES += [bytes([0, 0, code, dimensions]) for code in CODES.values() for dimensions in (0, 1, 3, 255)]
TEXTS = [b"'descr'", b"(9999999999,)", b"(", b"[" * 200, b"'|O'", b"('<i4', 2)", b"True", b"1e999", b"{}", b"\0", b"PK"]
RECORDS = np.array([(1, [2, 3], (4,)), (5, [6, 7], (8,))], [("a", ">f4"), ("b", "i2", (2,)), ("c", [("d", "u1")])])


@pytest.mark.parametrize(
    ("read", "files", "pieces"),
    [
        (read_idx, [idx(np.zeros((40, 28, 28), "u1")), idx(np.zeros((3, 5), "f8")), idx(np.array(1, "i4"))], PIECES),
        (NpyDataset, [npy(np.arange(12.0).reshape(4, 3)), npy(RECORDS)], TEXTS),
    ],
)
def test_damaged_files(
    read: Callable[[Path], Any],
    files: list[bytes],
    pieces: list[bytes],
    count: Callable[[int, int], int],
    tmp_path: Path,
) -> None:
    """Refused with our error, or read: never killed, and nothing else is raised. Memory is bounded by the file."""
    rng, path, whole = random.Random(7), tmp_path / "x", 0
    for number in range(count(500, 10_000)):
        path.write_bytes(data := mutated(files[number % len(files)], rng, pieces))
        tracemalloc.start()
        try:
            found = read(path)
        except DataFileError:
            continue
        finally:
            assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + (1 << 17)
            tracemalloc.stop()
        whole += 1
        if read is NpyDataset:
            assert len(list(found)) == len(found)
    assert whole > 10


# -- NumPy's files

ARRAYS = {
    "plain": np.arange(24.0).reshape(4, 3, 2),
    "scalars": np.arange(5, dtype="u2"),
    "big": np.arange(12, dtype=">i4").reshape(4, 3),
    "fortran": np.asfortranarray(np.arange(12).reshape(4, 3)),
    "text": np.array(["a", "bcd"]),
    "times": np.array(["2026-11-21", "1970-01-01"], "M8[s]"),
    "empty": np.zeros((0, 3)),
    "hollow": np.zeros((3, 0)),
}


def on_a_mapping(value: Any) -> bool:
    while isinstance(value, np.ndarray):
        value = value.base
    return isinstance(value.obj if isinstance(value, memoryview) else value, mmap.mmap)


@pytest.mark.parametrize("name", ARRAYS)
def test_npy_of_every_kind(name: str, tmp_path: Path) -> None:
    array = ARRAYS[name]
    np.save(tmp_path / "x.npy", array)
    dataset = NpyDataset(tmp_path / "x.npy")
    for (found,), expected in zip(dataset, array, strict=True):
        assert found.dtype.isnative
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(RangeError):
        dataset[len(array)]
    with pytest.raises(TypeError, match="'float' object"):
        dataset[0.5]


def test_npy_records_are_dicts(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", RECORDS)
    (sample,) = NpyDataset(tmp_path / "x.npy")[1]
    assert sample["a"] == 5
    np.testing.assert_array_equal(sample["b"], [6, 7])
    assert sample["c"] == {"d": 8}


def test_npy_files_are_mapped(tmp_path: Path) -> None:
    x, y = np.arange(600.0).reshape(100, 6), np.arange(100)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    dataset = NpyDataset(tmp_path / "x.npy", tmp_path / "y.npy")
    assert len(pickle.dumps(dataset)) < 500
    for each in (dataset, pickle.loads(pickle.dumps(dataset))):
        row, number = each[7]
        np.testing.assert_array_equal(row, x[7])
        assert number == 7
        assert on_a_mapping(row)
        assert not row.flags.writeable
    np.save(tmp_path / "z.npy", np.zeros(4))
    with pytest.raises(DataFileError, match="expected arrays of one length in dimension 0, found shapes"):
        NpyDataset(tmp_path / "x.npy", tmp_path / "z.npy")
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
    [
        (5, 4, None, [0]),
        (8, 4, None, [0]),
        (9, 4, None, [0, 4]),
        (9, 4, 2, [0, 2, 4]),
        (12, 4, 7, [0, 7]),
        (3, 1, None, [0, 1]),
    ],
)
def test_blocks_of_tokens(count: int, block_size: int, stride: int | None, begins: list[int], tmp_path: Path) -> None:
    np.arange(count, dtype="u2").tofile(tmp_path / "tokens")
    dataset = TokenFile(tmp_path / "tokens", "uint16", block_size, stride)
    for each in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert [int(source[0]) for source, _ in each] == begins
        for source, target in each:
            np.testing.assert_array_equal(source, source[0] + np.arange(block_size), strict=True)
            np.testing.assert_array_equal(target, source + 1, strict=True)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "u4", "i4", "i8"])
def test_every_dtype_of_tokens_comes_as_int64(dtype: str, tmp_path: Path) -> None:
    values = np.array([0, np.iinfo(dtype).max, 0x1F])
    values.astype(dtype).tofile(tmp_path / "tokens")
    for found, expected in zip(TokenFile(tmp_path / "tokens", dtype, 2)[0], (values[:2], values[1:]), strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize(("dtype", "block_size", "stride", "error"), [
    ("f4", 4, None, DtypeError), ("u2", 0, None, ArgumentError), ("u2", 4, 0, ArgumentError),
])  # fmt: skip
def test_wrong_use_of_tokens(dtype: str, block_size: int, stride: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match="TokenFile: expected"):
        TokenFile(tmp_path / "tokens", dtype, block_size, stride)


# -- pictures


@pytest.mark.parametrize(("packed", "below"), [(False, "."), (True, "MNIST/raw")])
def test_mnist(packed: bool, below: str, tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"MNIST: there is no train-images-idx3-ubyte in"):
        MNIST(tmp_path)
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 7), ("t10k", 3)):
        pictures = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = rng.integers(0, 10, count, np.uint8)
        for name, array in (("images-idx3", pictures), ("labels-idx1", labels)):
            path = tmp_path / below / (f"{part}-{name}-ubyte" + (".gz" if packed else ""))
            path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
        dataset = MNIST(tmp_path, train=part == "train")
        for (picture, label), expected, number in zip(dataset, pictures, labels, strict=True):
            assert type(label) is int
            assert label == number
            np.testing.assert_array_equal(picture, expected, strict=True)
        np.testing.assert_array_equal(dataset[-1][0], pictures[-1])
        for index in (count, -count - 1):
            with pytest.raises(RangeError, match=f"MNIST: index {index} of {count} samples"):
                dataset[index]
    for wrong in (np.zeros(6, "u1"), np.zeros(7, "i2")):
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(wrong))
        with pytest.raises(DataFileError, match=r"expected pictures \(N, H, W\) and labels \(N\) of uint8"):
            MNIST(tmp_path)


def test_read_cifar(tmp_path: Path) -> None:
    for classes, labels, expected in ((10, TEN, TEN[:, 0]), (100, HUNDRED, HUNDRED)):
        data, pictures = cifar(labels)
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
        data, pictures = cifar(np.full((number, 1), number), number)
        (tmp_path / below / f"data_batch_{number}.bin").write_bytes(data)
        everything += [(picture, number) for picture in pictures]
    (tmp_path / below / "test_batch.bin").write_bytes(cifar(TEN)[0])
    for dataset in (CIFAR10(tmp_path), pickle.loads(pickle.dumps(CIFAR10(tmp_path, train=True)))):
        for (picture, label), (expected, number) in zip(dataset, everything, strict=True):
            assert type(label) is int
            assert label == number
            np.testing.assert_array_equal(picture, expected, strict=True)
    test = CIFAR10(tmp_path, train=False, transform=np.mean, target_transform=lambda label: -label)
    assert [label for _, label in test] == [-3, -9, 0]
    assert test[1][0] == cifar(TEN)[1][1].mean()


def test_cifar_100(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(cifar(HUNDRED)[0])
    assert [label for _, label in CIFAR100(tmp_path)] == [99, 7, 0]
    assert [label for _, label in CIFAR100(tmp_path, coarse=True)] == [19, 0, 3]
    with pytest.raises(DataFileError, match=r"CIFAR100: there is no test.bin in .*, nor in cifar-100-binary there"):
        CIFAR100(tmp_path, train=False)
