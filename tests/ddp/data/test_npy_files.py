"""NumPy's files: mapped where that can be, and everything that is no plain array refused."""

from __future__ import annotations

import io
import mmap
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp.data import DataLoader, NpyDataset
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


def numpys(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


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


GOOD = numpys(np.arange(6, dtype="i4"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no .npy file"),
        (b"PK\x03\x04abcdefgh", "no .npy file of plain numbers or records: the magic string is not correct"),
        (GOOD[:-1], "no .npy file .*: mmap length is greater than file size"),
        (GOOD[:50], "no .npy file"),
        (GOOD + b"x", "byte 152: 1 bytes follow the array of int32"),
        (GOOD.replace(b"(6,)", b"(-6)"), "no .npy file"),
        (GOOD.replace(b"'<i4'", b"'<U0'"), "."),
        (GOOD.replace(b"{'descr'", b"[" * 8), "no .npy file"),
        (numpys(np.array([{}, None])), "no .npy file .*Python objects in dtype"),
    ],
    ids=range(9),
)
def test_a_bad_file_is_named(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.npy"
    path.write_bytes(data)
    with pytest.raises(DataFileError, match=f"^{re.escape(str(path))}: {says}"):
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
