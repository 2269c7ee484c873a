"""Files that are not ours, or not whole: load names what is wrong with them, and raises SerializationError alone."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._tensor import dtypes
from ddp.errors import SerializationError
from ddp.serialization import safetensors
from tests.ddp.test_serialization import every_kind, values


def made(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    return file.getvalue()


def metadata(**values: Any) -> dict[str, Any]:
    return {"__metadata__": values, "x": entry()}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes is no safetensors file"),
        (pickle.dumps({"x": list(range(100))}), "a pickle, which is never loaded"),
        (zipped(), "a zip archive, as torch.save writes"),
        (b"\x93NUMPY\x01\x00v\x00" + b"x" * 99, "a header of .* bytes in a file of 109: truncated, or foreign"),
        (made({"x": entry()}, b"x" * 7), "the tensors take 8 bytes, and 7 follow the header: truncated"),
        (made({"x": entry()}, b"x" * 9), "8 bytes, and 9 follow the header: too long"),
        (made(b" {}"), "the header begins with b' {}'"),
        (made(b'{"\xff": 3}'), "the header is not UTF-8 at byte 2"),
        (made(b'{"x":' + b"[" * 100_000), "nested too deep"),
        (made(b'{"x": 1' + b"0" * 5000 + b"}"), "the header is not JSON"),
        (made({"x": 3}), "x: expected dtype, shape and data_offsets, got 3"),
        (made({"x": entry("F31")}, b"x" * 8), "x: dtype 'F31' is none of BOOL"),
        (made({"x": entry(shape=[-2])}, b"x" * 8), r"x: shape \[-2\] is none"),
        (made({"x": entry(shape=[1] * 65, offsets=(0, 4))}, b"x" * 4), "is none"),
        (made({"x": entry(shape=[0, 2**70], offsets=(0, 0))}), "x: shape"),
        (made({"x": entry(offsets=(0, 8, 9))}, b"x" * 8), "data_offsets .* are none"),
        (made({"x": entry(offsets=(8, 0))}, b"x" * 8), r"F32 of shape \[2\] does not take bytes 8 to 0"),
        (
            made({"x": entry(), "y": entry(offsets=(4, 12))}, b"x" * 12),
            "y starts at byte 4, expected 8: tensors overlap",
        ),
        (made({"x": entry(), "y": entry(offsets=(12, 20))}, b"x" * 20), "tensors leave a gap"),
        (made({"__metadata__": {"a": 3}}), "__metadata__ is no map from text to text"),
        (made(metadata(tied='{"y": 3}'), b"x" * 8), "ties {'y': 3}, which does not fit the tensors"),
        (made(metadata(tied='{"x": "x"}'), b"x" * 8), "ties {'x': 'x'}, which does not fit the tensors"),
        (made(metadata(structure='{"tensor": "y"}'), b"x" * 8), "structure holds {'tensor': 'y'}"),
        *(
            (made(metadata(structure=each), b"x" * 8), "structure holds .*, which is none")
            for each in (
                '{"frozenset": []}',
                "{}",
                '{"dict": [["a", 1, 2]]}',
                '{"tuple": [], "bytes": ""}',
                '{"array": "missing"}',
                '{"scalar": 3}',
            )
        ),
        (made(metadata(structure='{"tuple": [' * 50_000), b"x" * 8), "nested too deep"),
    ],
)
def test_what_is_no_file_of_ours(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(data)
    with pytest.raises(SerializationError, match=message) as caught:
        ddp.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(SerializationError, match=r"^<BytesIO>: "):
        ddp.load(io.BytesIO(data))


def test_a_header_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "LIMIT", 10)
    with pytest.raises(SerializationError, match="a header of 61 bytes"):
        ddp.load(io.BytesIO(made({"x": entry()}, b"x" * 8)))


def test_a_file_that_shrinks_meanwhile() -> None:
    class Shrinking(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            return 0

    file = Shrinking()
    ddp.save({"x": ddp.ones(3)}, file)
    file.seek(0)
    with pytest.raises(SerializationError, match="the file ends inside x"):
        ddp.load(file)


def test_damaged_files_load_or_raise(count: Callable[[int, int], int]) -> None:
    x = values(dtypes.float32, (3, 2))
    originals = []
    for obj in (
        every_kind(),
        {"a": x, "b": x.detach()},
        {"model": {"w": x}, "state": [{0: values(dtypes.int64, ())}, (1.5, "x", None)]},
    ):
        file = io.BytesIO()
        ddp.save(obj, file)
        originals.append(file.getvalue())
    loaded = 0
    for seed in range(count(300, 10_000)):
        random = np.random.default_rng(seed)
        data = bytearray(originals[seed % len(originals)])
        length = 8 + int.from_bytes(data[:8], "little")
        for _ in range(random.integers(1, 4)):
            if not data:
                break
            # Mostly in the header, where damage does most.
            offset = int(random.integers(0, min(length, len(data)) if random.random() < 0.8 else len(data)))
            kind = random.integers(0, 4)
            if kind == 0:
                data[offset] ^= 1 << int(random.integers(0, 8))
            elif kind == 1:
                data[offset] = int(random.integers(32, 127))
            elif kind == 2:
                del data[offset : offset + int(random.integers(1, 9))]
            else:
                data = data[: max(offset, 1)]
        try:
            ddp.load(io.BytesIO(bytes(data)))
            loaded += 1
        except SerializationError:
            pass
    assert loaded > 0
