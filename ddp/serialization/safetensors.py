"""The safetensors format: what both sides of a file agree on, and where each array goes in it.

Every array is aligned, and the header is known before the first byte of data is written.
Source: https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ddp._tensor.dtypes import bfloat16, bool_, float16, float32, float64, int8, int16, int32, int64, uint8

DTYPES = {
    "BOOL": bool_,
    "U8": uint8,
    "I8": int8,
    "I16": int16,
    "I32": int32,
    "I64": int64,
    "F16": float16,
    "BF16": bfloat16,
    "F32": float32,
    "F64": float64,
}
#: What files may hold that no tensor of ours does: arrays of checkpoints, such as the states of random numbers.
STORED = {**DTYPES, "U16": np.dtype("uint16"), "U32": np.dtype("uint32"), "U64": np.dtype("uint64")}
LIMIT = 100_000_000  # bytes of a header, as in the library
METADATA = "__metadata__"
SCALARS = (str, bool, int, float, type(None))  # JSON values, and the keys of dicts


CODES = {dtype: code for code, dtype in STORED.items()}


class FileHeader(NamedTuple):
    """begin: the first bytes of the file, with the length of its header; order: the names as their data follows."""

    begin: bytes
    order: list[str]


def lay_out(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> FileHeader:
    """The layout of a file. arrays: what has a dtype, a shape and nbytes, by name, in the order of the header."""
    # By size of element, so that every array is aligned; the header keeps the order that was given.
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for name, array in arrays.items():
        entries[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [0, 0]}
    start = 0
    for name in order:
        entries[name]["data_offsets"] = [start, start + arrays[name].nbytes]
        start += arrays[name].nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return FileHeader(len(header).to_bytes(8, "little") + header, order)
