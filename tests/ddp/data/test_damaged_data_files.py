"""Damaged files: refused with our error, or an array of the declared type and shape, and never more than twice the file
in memory. Of a packed file that is twice what is unpacked, which the header inside declares."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp.data import NpyDataset, read_idx
from ddp.errors import DataFileError
from tests.ddp.data import written_files as made
from tests.mutations import mutated

OVERHEAD = 32_768  # bytes: of the interpreter's own objects, such as a message and its traceback
# What headers are of, and what breaks out of them.
PIECES = [struct.pack(">I", size) for size in (0, 1, 2**16, 2**31, 2**32 - 1)]
PIECES += [bytes([0, 0, code, dimensions]) for code in made.CODES.values() for dimensions in (0, 1, 3, 255)]
TEXTS = [b"'descr'", b"(9999999999,)", b"(", b"[" * 200, b"'|O'", b"('<i4', 2)", b"True", b"1e999", b"{}", b"\0", b"PK"]

IDX = [made.idx(np.arange(shape_size, dtype=dtype).reshape(shape)) for shape, dtype, shape_size in (
    ((40, 28, 28), "u1", 31_360), ((3, 5), "f8", 15), ((9,), "i2", 9), ((), "i4", 1),
)]  # fmt: skip
TEN = made.cifar(np.arange(7)[:, None])[0]
HUNDRED = made.cifar(np.array([[3, 50], [19, 99], [0, 0]]))[0]


def damaged(files: list[bytes], count: int, path: Path, garbage: list[bytes]) -> Iterator[bytes]:
    rng = random.Random(7)
    for number in range(count):
        data = mutated(files[number % len(files)], rng, garbage)
        path.write_bytes(data)
        yield data


def measured(read: Callable[[], Any]) -> tuple[Any, int]:
    """What was read, or None if it was refused, and the most memory that took, in bytes."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        found = read()
    except DataFileError:
        found = None
    return found, tracemalloc.get_traced_memory()[1] - before


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def as_declared(data: bytes, found: Any) -> None:
    """`found` is exactly what the bytes of an IDX file say."""
    kinds = {code: np.dtype(name) for name, code in made.CODES.items()}
    assert data[:2] == b"\0\0"
    assert found.dtype == kinds[data[2]]
    assert found.shape == struct.unpack_from(f">{data[3]}I", data, 4)
    assert made.idx(found) == data


@pytest.mark.usefixtures("_traced")
def test_idx(count: Callable[[int, int], int], tmp_path: Path) -> None:
    read = 0
    for data in damaged(IDX, count(500, 10_000), tmp_path / "x", PIECES):
        found, peak = measured(lambda: read_idx(tmp_path / "x"))
        if data[:2] == b"\x1f\x8b":  # damage may even do this
            continue
        assert peak <= 2 * len(data) + OVERHEAD
        if found is not None:
            as_declared(data, found)
            read += 1
    assert read > 20


def numpys(save: Callable[..., None], *arrays: Any) -> bytes:
    file = io.BytesIO()
    save(file, *arrays)
    return file.getvalue()


def test_numpys(count: Callable[[int, int], int], tmp_path: Path) -> None:
    """More formats than were asked for: what is read has samples."""
    arrays = [np.arange(12.0).reshape(4, 3), np.zeros(4, [("a", "<i4"), ("b", "u1", (2,))])]
    files = [numpys(np.save, array) for array in arrays]
    read = 0
    for _ in damaged(files, count(500, 10_000), tmp_path / "x", TEXTS):
        try:
            dataset = NpyDataset(tmp_path / "x")
        except DataFileError:
            continue
        assert len(dataset.__getitems__(range(len(dataset)))) == len(dataset)
        read += 1
    assert read > 10
