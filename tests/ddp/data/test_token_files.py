"""Token files: which tokens a block has, as a table; the target is one token further on."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp.data import TokenFile
from ddp.errors import ArgumentError, DataFileError, DtypeError


@pytest.mark.parametrize(
    ("count", "block_size", "stride", "begins"),
    [
        (5, 4, None, [0]),
        (8, 4, None, [0]),
        (9, 4, None, [0, 4]),
        (9, 4, 2, [0, 2, 4]),
        (10, 4, 7, [0]),
        (12, 4, 7, [0, 7]),
        (3, 1, None, [0, 1]),
    ],
)
def test_blocks(count: int, block_size: int, stride: int | None, begins: list[int], tmp_path: Path) -> None:
    np.arange(count, dtype="u2").tofile(tmp_path / "tokens")
    dataset = TokenFile(tmp_path / "tokens", "uint16", block_size, stride)
    assert [int(source[0]) for source, _ in dataset] == begins
    for source, target in (*dataset, *dataset.__getitems__(range(len(dataset)))):
        np.testing.assert_array_equal(source, source[0] + np.arange(block_size), strict=True)
        np.testing.assert_array_equal(target, source + 1, strict=True)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "u4", "i4", "i8"])
def test_every_dtype_comes_as_int64(dtype: str, tmp_path: Path) -> None:
    tokens = np.array([0, np.iinfo(dtype).max, 0x8B1F if np.dtype(dtype).itemsize > 2 else 0x1F])
    tokens.astype(dtype).tofile(tmp_path / "tokens")
    dataset = pickle.loads(pickle.dumps(TokenFile(tmp_path / "tokens", dtype, block_size=2)))
    for found, expected in zip(dataset[0], (tokens[:2], tokens[1:]), strict=True):
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("size", "byte", "says"),
    [
        (0, 0, "expected 5 tokens, a block and its target, and the file ends after 0"),
        (8, 8, "expected 5 tokens, a block and its target, and the file ends after 4"),
        (21, 20, "expected uint16 of 2 bytes, and 1 are left"),
    ],
)
def test_a_bad_file_is_named_with_the_byte(size: int, byte: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(bytes(size))
    with pytest.raises(DataFileError, match=f"^{re.escape(str(path))}: byte {byte}: {says}$"):
        TokenFile(path, "uint16", 4)


@pytest.mark.parametrize(("dtype", "block_size", "stride", "error"), [
    ("f4", 4, None, DtypeError), ("u2", 0, None, ArgumentError), ("u2", 4, 0, ArgumentError),
])  # fmt: skip
def test_wrong_use(dtype: str, block_size: int, stride: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match="TokenFile: expected"):
        TokenFile(tmp_path / "tokens", dtype, block_size, stride)


def test_a_stride_of_its_own_pickles_and_shows(tmp_path: Path) -> None:
    np.arange(20, dtype="u4").tofile(tmp_path / "tokens")
    dataset = TokenFile(tmp_path / "tokens", "uint32", 4, 3)
    assert repr(dataset) == f"TokenFile('{tmp_path}/tokens', 'uint32', 4, 3)"
    again = pickle.loads(pickle.dumps(dataset))
    assert [x[0] for x, _ in again] == [0, 3, 6, 9, 12, 15]
