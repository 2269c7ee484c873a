"""Values come back from JSON with their types and all their bits."""

from __future__ import annotations

import io
import json
import math
import struct
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError, SerializationError
from ddp.serialization.structure import Decoder, encode, names_in


def there_and_back(value: Any) -> Any:
    kept: dict[str, Any] = {}

    def keep(name: str, array: Any, _: Any) -> str:
        assert name not in kept
        kept[name] = np.array(array)
        return name

    text = json.dumps(encode(value, "x", keep), allow_nan=False)
    assert set(names_in(json.loads(text))) == set(kept)
    return Decoder(kept.__getitem__).decode(json.loads(text))


PLAIN = [
    None,
    True,
    10**40,
    "ä\n\0",
    -0.0,
    math.inf,
    5e-324,
    b"\xff\0",
    (1, (2.5, None), [3]),
    {"a": {1: "x", None: 2, False: 3, 2.5: ()}, "": []},
    {"tensor": "a name", "dict": [["x", 1]]},
    Counter({3: 2}),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values(value: Any) -> None:
    got = there_and_back(value)
    assert (repr(got), type(got)) == (repr(value), type(value))


def test_nan_is_nan() -> None:
    assert math.isnan(there_and_back(math.nan))


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3).T,
    np.zeros((0, 4), np.float16),
    np.array([1.5, np.nan], ml_dtypes.bfloat16),
    np.array([1, 2**64 - 1], np.uint64),
    np.array([1 + 2j]),
    np.array(["a", "bcd"]),
    np.array([1.0, 2.0], ">f8"),
    np.array([(1, 2.5), (3, 4.5)], [("a", "i4"), ("b", ">f8")]),
    np.array([[(1, [[2, 3]], (4, "x"))]], [("a", "u1"), ("b", "i2", (1, 2)), ("c", [("d", "u1"), ("e", "U3")])]),
    np.zeros(2, [(("a title", "a"), "i4")]),
    np.zeros(2, [("a", "U0")]),
    np.zeros((0, 2), [("a", "i4")]),
    np.array([b"abcdefg"], "V7"),
    np.array(["2026-11-22"], "M8[h]"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays(array: Any) -> None:
    got = there_and_back(array)
    assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
    scalar = array.reshape(-1)[:1]
    if scalar.size:
        number = there_and_back(scalar[0])
        assert (type(number), number.tobytes()) == (type(scalar[0]), scalar[0].tobytes())


def test_tensors_in_depth() -> None:
    value = {"a": [ddp.ones(2), (ddp.zeros((), dtype=ddp.bfloat16),)], "b": ddp.tensor([1, 2])}
    got = there_and_back(value)
    for mine, theirs in ((got["a"][0], value["a"][0]), (got["a"][1][0], value["a"][1][0]), (got["b"], value["b"])):
        assert isinstance(mine, ddp.Tensor)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert (mine == theirs).all().item()


OVERLAPPING = np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]})


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"best": [1, object()]}, r"x\.best\.1 is of type object"),
        ({"best": {(1, 2): 3}}, r"x\.best has a key of type tuple"),
        ({"a": np.array([object()])}, r"x\.a is an array of Python objects"),
        ({"a": np.zeros(2, OVERLAPPING)}, r"x\.a is an array of dtype .*offsets.*, which a file cannot hold"),
        ({"a": np.zeros(2, ml_dtypes.int4)}, r"x\.a is an array of dtype int4, which a file cannot hold"),
        (np.zeros(2, [("b", ml_dtypes.bfloat16)]), r"x is an array of dtype .*bfloat16.*, which a file cannot"),
        ([lambda: 0], r"x\.0 is of type function"),
    ],
)
def test_what_cannot_be_held_is_named(value: Any, place: str) -> None:
    with pytest.raises(ArgumentError, match=place):
        there_and_back(value)


MALFORMED = [
    {"what": 1},
    {},
    {"dict": [[1]]},
    {"float": "x"},
    {"a": 1, "b": 2},
    {"array": "missing"},
    {"scalar": 3},
    {"npy": "pickle"},
    {"npy": "torn"},
]


@pytest.mark.parametrize("saved", MALFORMED, ids=str)
def test_what_nobody_wrote_is_an_error_of_ours(saved: Any) -> None:
    file = io.BytesIO()
    np.save(file, np.array([object()]), allow_pickle=True)
    kept = {"pickle": np.frombuffer(file.getvalue(), np.uint8), "torn": np.zeros(8, np.uint8)}
    with pytest.raises(SerializationError, match=r"the structure holds .*, which is none"):
        Decoder(kept.__getitem__).decode(saved)


def test_every_bit_of_a_float() -> None:
    for bits in (1, 0x3FF0000000000001, 0x7FEFFFFFFFFFFFFF, 0x8000000000000001):
        (value,) = struct.unpack("<d", struct.pack("<Q", bits))
        assert struct.pack("<d", there_and_back(value)) == struct.pack("<d", value)
