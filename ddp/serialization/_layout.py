"""Where each array goes in a file: every one aligned, and the header told before the first byte of data is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ddp.serialization._format import METADATA, STORED

CODES = {dtype: code for code, dtype in STORED.items()}


class Layout(NamedTuple):
    """begin: the first bytes of the file, with the length of its header; order: the names as their data follows."""

    begin: bytes
    order: list[str]


def lay_out(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> Layout:
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
    return Layout(len(header).to_bytes(8, "little") + header, order)
