"""NumPy's files: mapped where that can be, and everything that is no plain array refused."""

from __future__ import annotations

import io
import mmap
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp.data import DataLoader, NpyDataset, TensorDataset
from ddp.errors import ArgumentError, DataFileError, RangeError

RECORDS = np.array([(1, [2, 3], (4,)), (5, [6, 7], (8,))], [("a", ">f4"), ("b", "i2", (2,)), ("c", [("d", "u1")])])
ARRAYS = {
    "plain": np.arange(24.0).reshape(4, 3, 2),
    "scalars": np.arange(5, dtype="u2"),
    "big": np.arange(12, dtype=">i4").reshape(4, 3),
    "fortran": np.asfortranarray(np.arange(12).reshape(4, 3)),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "times": np.array(["2026-11-21", "1970-01-01"], "M8[s]"),
    "complex": np.ones((2, 3), "c8"),
    "bools": np.array([True, False]),
    "empty": np.zeros((0, 3)),
    "hollow": np.zeros((3, 0)),
}


def on_a_mapping(value: Any) -> bool:
    while isinstance(value, np.ndarray):
        value = value.base
    return isinstance(value.obj if isinstance(value, memoryview) else value, mmap.mmap)


@pytest.mark.parametrize("name", ARRAYS)
def test_every_kind_of_array(name: str, tmp_path: Path) -> None:
    array = ARRAYS[name]
    np.save(tmp_path / "x.npy", array)
    dataset = NpyDataset(tmp_path / "x.npy")
    assert len(dataset) == len(array)
    for (found,), expected in zip(dataset, array, strict=True):
        assert found.dtype.isnative
        np.testing.assert_array_equal(found, expected)
    everything = dataset.__getitems__(range(len(array)))
    assert len(everything) == len(array)
    with pytest.raises(RangeError):
        dataset[len(array)]
    with pytest.raises(TypeError, match="'float' object"):
        dataset[0.5]


class Halved(NpyDataset):
    def __getitem__(self, index: Any) -> Any:
        (row,) = super().__getitem__(index)
        return (row / 2,)


def test_a_batch_of_a_subclass_is_of_its_own_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))
    ((batch,),) = DataLoader(Halved(tmp_path / "x.npy"), batch_size=3)
    assert batch.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]


def test_records_are_dicts(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", RECORDS)
    (sample,) = NpyDataset(tmp_path / "x.npy")[1]
    assert sample["a"] == 5
    assert sample["a"].dtype.isnative
    np.testing.assert_array_equal(sample["b"], [6, 7])
    assert sample["c"] == {"d": 8}


def test_files_are_mapped(tmp_path: Path) -> None:
    x, y = np.arange(600.0).reshape(100, 6), np.arange(100)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    dataset = NpyDataset(tmp_path / "x.npy", tmp_path / "y.npy")
    assert len(pickle.dumps(dataset)) < 500
    for each in (dataset, pickle.loads(pickle.dumps(dataset))):
        row, number = each[7]
        np.testing.assert_array_equal(row, x[7])
        assert row.flags.aligned
        assert number == 7
        assert all(on_a_mapping(column) for column in each._opened)
    row, _ = dataset[7]
    assert on_a_mapping(row)
    assert not row.flags.writeable


def test_versions_of_the_format(tmp_path: Path) -> None:
    for version in ((1, 0), (2, 0), (3, 0)):
        with open(tmp_path / "x.npy", "wb") as file:
            np.lib.format.write_array(file, np.arange(3), version=version)
        assert [int(x) for (x,) in NpyDataset(tmp_path / "x.npy")] == [0, 1, 2]


def npy(header: str | bytes, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    text = header if isinstance(header, bytes) else header.encode("latin-1")
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + data


def said(descr: str = "'<i4'", order: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


HOLLOW, DEEP = npy(said(shape=f"(0, {1 << 40}, {1 << 40})")), npy(said(shape=str((1,) * 65)))


def of_objects() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{}, None]), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "byte", "says"),
    [
        (b"", 0, "expected a magic number of 8 bytes"),
        (b"PK\x03\x04abcdefgh", 0, "expected b'\\x93NUMPY', as an .npy file begins"),
        (npy("", version=b"\4\0"), 6, "expected version 1.0, 2.0 or 3.0, found 4.0"),
        (npy(said())[:-1], len(npy(said())) - 1, "expected a header of "),
        (b"\x93NUMPY\2\0" + b"\xff" * 20, 8, "expected a header of at most 65,536 bytes, found 4,294,967,295"),
        (npy("[" * 9999), 10, "expected a dict of descr, fortran_order and shape, found b'[[["),
        (npy("-" * 60000 + "1"), 10, "expected a dict of descr"),
        (npy(b"{'a': \0}"), 10, "expected a dict of descr"),
        (b"\x93NUMPY\3\0\2\0\0\0\xff{", 12, "expected a dict of descr"),
        (npy("open('x')"), 10, "expected a dict of descr"),
        (npy("{'descr': '<i4'}"), 10, "expected a dict of descr"),
        (npy("{[]: 1}"), 10, "expected a dict of descr"),
        (npy(said(shape="2")), 10, "expected a shape, found 2"),
        (npy(said(shape="(-2,)")), 10, "expected a shape, found (-2,)"),
        (npy(said(shape="(True,)")), 10, "expected a shape, found (True,)"),
        (npy(said(shape=f"({1 << 63},)")), 10, "expected a shape, found (9223372036854775808,)"),
        (npy(said(shape=f"(0x{'f' * 5000},)")), 10, "expected a shape, found "),
        (npy(said(order=f"0x{'f' * 5000}")), 10, "expected fortran_order to be True or False, found "),
        (npy(said(descr=f"0x{'f' * 5000}")), 10, "expected a dtype, found "),
        (npy(said(descr=f"('<i4', (0x{'f' * 5000},))")), 10, "expected a dtype, found "),
        (npy(said(order="1")), 10, "expected fortran_order to be True or False, found 1"),
        (npy(said(descr="'<i5'")), 10, "expected a dtype, found '<i5'"),
        (npy(said(descr="'i4,i4'")), 10, "expected a dtype, found 'i4,i4'"),
        (npy(said(descr="3")), 10, "expected a dtype, found 3"),
        (npy(said(descr="None")), 10, "expected a dtype, found None"),
        (npy(said(descr="[('a',)]")), 10, "expected a dtype, found [('a',)]"),
        (npy(said(descr="[('a', '<i4'), ('a', '<i4')]")), 10, "expected a dtype"),
        (npy(said(descr="('<i4', (10**20,))")), 10, "expected a dict of descr"),
        (npy(said(descr="('<i4', (100000000000000000000,))")), 10, "expected a dtype"),
        (npy(said(descr="'<U0'")), 10, "expected elements of one byte or more, found '<U0'"),
        (npy(said(descr="'O'"), b"x" * 16), 10, "Python objects, which are pickled, and a pickle is never loaded"),
        (npy(said(descr="[('a', '|O')]"), b"x" * 16), 10, "Python objects"),
        (of_objects(), 10, "Python objects"),
        (npy(said(), b"x" * 7), len(npy(said())) + 7, "8 bytes, and 7 are left: truncated"),
        (npy(said(), b"x" * 9), len(npy(said())) + 8, "8 bytes, and 9 are left: too long"),
        (HOLLOW, len(HOLLOW), "NumPy has no array of shape (0, "),
        (DEEP, len(DEEP), "expected at most 64 dimensions"),
    ],
    ids=range(37),
)  # fmt: skip
def test_a_bad_file_is_named_with_the_byte(data: bytes, byte: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.npy"
    path.write_bytes(data)
    with pytest.raises(DataFileError, match=f"^{re.escape(str(path))}: byte {byte}: .*{re.escape(says)}"):
        NpyDataset(path)


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    for name, shape in (("x", (3, 2)), ("y", (4,)), ("z", ())):
        np.save(tmp_path / f"{name}.npy", np.zeros(shape))
    for names in (("x", "y"), ("z",)):
        with pytest.raises(DataFileError, match="expected arrays of one length in dimension 0, found shapes"):
            NpyDataset(*(tmp_path / f"{name}.npy" for name in names))
    for paths in ((), ("x.npy", "./x.npy")):
        with pytest.raises(ArgumentError, match="NpyDataset: expected one path or more, each once"):
            NpyDataset(*paths)


def test_an_archive_is_read_by_numpy(tmp_path: Path) -> None:
    """As docs/data.md has it: by the names of its arrays, and with the archive's checksums."""
    path = tmp_path / "x.npz"
    np.savez(path, x=np.arange(6.0).reshape(3, 2), y=np.arange(3))
    with np.load(path) as arrays:
        dataset = TensorDataset(arrays["x"], arrays["y"])
    assert dataset[1][0].tolist() == [2, 3]
    data = bytearray(path.read_bytes())
    data[data.index(np.float64(5).tobytes()) + 3] ^= 1
    path.write_bytes(data)
    with np.load(path) as arrays, pytest.raises(zipfile.BadZipFile, match="CRC"):
        TensorDataset(arrays["x"], arrays["y"])
