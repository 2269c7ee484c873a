"""The store's decisions: names, what is removed, who writes what, what a manifest may say, how a failure is told."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from ddp.checkpoint.checkpoint_files import (
    Manifest,
    ShardInfo,
    TensorEntry,
    TensorPiece,
    assemble_tensors,
    decode_manifest,
    encode_manifest,
)
from ddp.checkpoint.checkpoint_reader import folder_order, newest_first, next_name
from ddp.checkpoint.state import split_evenly
from ddp.checkpoint.store import check_tensors
from ddp.errors import CheckpointError


def test_names_say_what_is_newest() -> None:
    names = ["step-0000000009", "step-0000000120", "step-0000000110.2", "step-0000000100.10", "step-12345678901"]
    newest = ["step-0000000100.10", "step-0000000110.2", "step-12345678901", "step-0000000120", "step-0000000009"]
    assert newest_first([*names, ".lock", "step-120", "step-0000000120.0", ".step-0000000120.12345678.tmp"]) == newest


@pytest.mark.parametrize(
    ("step", "names", "name"),
    [
        (0, [], "step-0000000000"),
        (5, ["step-0000000004", "notes"], "step-0000000005"),
        (4, ["step-0000000004"], "step-0000000004.2"),
        (3, ["step-0000000004", "step-0000000003.2"], "step-0000000003.3"),
        (10**12, ["step-0000000004"], "step-1000000000000"),
    ],
)
def test_the_next_one_is_the_newest(step: int, names: list[str], name: str) -> None:
    assert next_name(step, names) == name
    assert newest_first([*names, name])[0] == name
    key = folder_order(name)
    assert key[1] == step


@pytest.mark.parametrize(
    ("sizes", "ranks", "parts"),
    [
        ({"a": (100_000, 4), "b": (100_000, 4)}, 2, [{"a": (0, 100_000)}, {"b": (0, 100_000)}]),
        ({"a": (100_000, 4)}, 2, [{"a": (0, 50_000)}, {"a": (50_000, 100_000)}]),
        ({"a": (100_001, 8)}, 2, [{"a": (0, 50_001)}, {"a": (50_001, 100_001)}]),
        ({"a": (10, 4)}, 3, [{"a": (0, 4)}, {"a": (4, 7)}, {"a": (7, 10)}]),
        ({"a": (0, 4), "b": (1, 8)}, 2, [{"a": (0, 0), "b": (0, 1)}, {}]),
        ({}, 2, [{}, {}]),
    ],
)
def test_spread(sizes: dict[str, tuple[int, int]], ranks: int, parts: Any) -> None:
    assert split_evenly(sizes, ranks) == parts


def part(rank: int, start: int, stop: int, at: int = 8, shape: tuple[int, ...] = (4, 3)) -> TensorEntry:
    """What one rank has of a tensor."""
    return TensorEntry("F32", shape, (TensorPiece(rank, start, stop, at, ""),))


def test_pieces_are_put_together_in_order() -> None:
    parts = [{"x": part(0, 5, 12, 56), "y": part(0, 0, 12)}, {"x": part(1, 0, 5)}, {"e": part(2, 0, 0, shape=(0,))}]
    assert assemble_tensors(parts) == {
        "e": TensorEntry("F32", (0,), (TensorPiece(2, 0, 0, 8, ""),)),
        "x": TensorEntry("F32", (4, 3), (TensorPiece(1, 0, 5, 8, ""), TensorPiece(0, 5, 12, 56, ""))),
        "y": TensorEntry("F32", (4, 3), (TensorPiece(0, 0, 12, 8, ""),)),
    }


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(0, 0, 12), part(1, 0, 12)], "x: element 0 is written by several ranks"),
        ([part(0, 0, 12), part(1, 0, 12, shape=(3, 4))], r"F32 \(4, 3\) on rank 0 and F32 \(3, 4\) on rank 1"),
        ([part(0, 0, 11)], "of its 12 elements only 11 are written"),
        ([part(0, 0, 5), part(1, 6, 12)], "element 5 is written by no rank"),
        ([part(0, 0, 7), part(1, 6, 12)], "element 6 is written by several"),
    ],
)
def test_pieces_that_do_not_fit(parts: list[TensorEntry], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        assemble_tensors({"x": each} for each in parts)


def manifest() -> Manifest:
    files = [ShardInfo(10, 0, "0"), ShardInfo(0, 0, "0")]
    tensors = {
        "x": TensorEntry("F32", (2,), (TensorPiece(0, 0, 2, 0, "1"),)),
        "ü": TensorEntry("BF16", (), (TensorPiece(0, 0, 1, 8, "2"),)),
    }
    return Manifest(7, files, tensors, {"a": [1, None, "ü"]}, [1, {}])


def signed(fields: Any) -> bytes:
    """A manifest of somebody who knows how to compute its checksum."""
    rest = json.dumps(fields)[1:].encode()
    return b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + b'",' + rest


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other"),
        (("version",), 1),
        (("step",), -1),
        (("files",), []),
        (("files", 0), 3),
        (("files", 0, 0), 7),
        (("tensors", "x", 0), "F31"),
        (("tensors", "x", 1), [3]),
        (("tensors", "x", 2), []),
        (("tensors", "x", 2), [[2, 0, 2, 0, "1"]]),
        (("tensors", "x", 2), [[0, 1, 2, 0, "1"]]),
        (("tensors", "x", 2), [[0, 0, 2, 3, "1"]]),
        (("own_state",), [1]),
    ],
)
def test_a_manifest_says_nothing_that_cannot_be(path: tuple[Any, ...], value: Any) -> None:
    fields = json.loads(encode_manifest(manifest()))
    del fields["sha256"]
    assert decode_manifest(signed(fields)) == manifest()
    inner = fields
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(CheckpointError):
        decode_manifest(signed(fields))


@pytest.mark.parametrize(
    ("tensors", "pieces", "message"),
    [
        ({"x": [1.0]}, {}, "x should be a NumPy array of .*, is of list"),
        ({"x": np.zeros(2, np.complex64)}, {}, "is of complex64"),
        ({"__metadata__": np.zeros(2)}, {}, "is no name"),
        ({"\ud800": np.zeros(2)}, {}, "is no name"),
        ({"x": np.zeros(2)}, {"y": (0, 2, (2,))}, "y: no array is not elements 0 to 2"),
        ({"x": np.zeros(2)}, {"x": (0, 3, (4,))}, r"x: an array of shape \(2,\) is not elements 0 to 3 of \(4,\)"),
    ],
)
def test_what_cannot_be_saved(tensors: Any, pieces: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_tensors(tensors, pieces)
