"""The safetensors format: a JSON header, then the bytes of the arrays.

The header is checked before memory for arrays is allocated. In files that are written here, every array is aligned.
Source: https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ddp._tensor.dtypes import bfloat16, bool_, float16, float32, float64, int8, int16, int32, int64, uint8
from ddp.errors import SerializationError

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
#: All dtypes that files may have here. Those added to DTYPES are for NumPy arrays alone, such as states of random
#: number generators.
STORED = {
    **DTYPES,
    "U16": np.dtype("uint16"),
    "U32": np.dtype("uint32"),
    "U64": np.dtype("uint64"),
}
CODES = {dtype: code for code, dtype in STORED.items()}
#: Maximum length of a header in bytes, as in the library safetensors.
LIMIT = 100_000_000
METADATA = "__metadata__"
# Maximum number of dimensions of a NumPy array.
_MOST_DIMENSIONS = 64
# Texts for error messages about files of other formats, by the first bytes of such a file.
_FOREIGN = {
    b"PK": "a zip archive, as torch.save writes: not safetensors",
    **{bytes([0x80, protocol]): "a pickle, which is never loaded: not safetensors" for protocol in range(2, 6)},
}


class FileLayout(NamedTuple):
    """The layout of a file. begin: its first bytes, up to the end of the header

    starts: the position of each array in the file, in bytes, in the order of the data
    """

    begin: bytes
    starts: dict[str, int]


def lay_out(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> FileLayout:
    """Computes the layout of a file. arrays: by name, in the header's order; each has a dtype, a shape and nbytes"""
    # Data is sorted by element size, largest first, so every array is aligned. The header keeps the order of `arrays`.
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    offsets = {}
    end = 0
    for name in order:
        start = end
        end += arrays[name].nbytes
        offsets[name] = [start, end]
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for name, array in arrays.items():
        entries[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": offsets[name]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    begin = len(header).to_bytes(8, "little") + header
    return FileLayout(begin, {name: len(begin) + start for name, (start, _) in offsets.items()})


class Span(NamedTuple):
    """An array in a file, as bytes `start` to `stop`, counted from the position where the header begins."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


class Header:
    """Reads and checks the header of a file, from the current position on. name: of the file, for error messages

    metadata: texts by name; names: of the arrays, in the order of the header
    spans: of the arrays, in the order of their data; they cover all of the data, without gaps
    Raises: SerializationError if the header is not valid.
    """

    def __init__(self, file: Any, name: str) -> None:
        self.name = name
        begin = file.tell()
        size = file.seek(0, os.SEEK_END) - begin
        file.seek(begin)
        try:
            entries = self._parse_header(file, size)
            metadata = entries.pop(METADATA, {})
            if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
                self.fail(f"{METADATA} is no map from text to text")
            self.metadata: dict[str, str] = metadata
            self.names = list(entries)
            self.spans = self._check_spans(entries, file.tell() - begin, size)
        except RecursionError:
            self.fail("the header is nested too deep")

    def fail(self, problem: str) -> NoReturn:
        """Reports a problem. Raises: SerializationError, always, with the file's name."""
        raise SerializationError(f"{self.name}: {problem}") from None

    def parse(self, text: str) -> Any:
        """Parses a JSON text of the header. Raises: SerializationError, with the file's name, if it is not JSON."""
        try:
            return json.loads(text)
        except ValueError as error:
            self.fail(f"the header is not JSON: {error}")

    def _parse_header(self, file: Any, size: int) -> dict[str, Any]:
        begin = file.read(min(8, size))
        if len(begin) < 8:
            self.fail(f"{size} bytes is no safetensors file, which begins with 8 for the length of its header")
        length = int.from_bytes(begin, "little")
        foreign = next((description for magic, description in _FOREIGN.items() if begin.startswith(magic)), None)
        if length > size - 8 or length > LIMIT:
            self.fail(foreign or f"a header of {length:,} bytes in a file of {size:,}: truncated, or foreign")
        text = file.read(length)
        if not text.startswith(b"{"):
            self.fail(foreign or f"the header begins with {text[:8]!r}, expected a JSON object: not safetensors")
        try:
            entries: dict[str, Any] = self.parse(text.decode())
        except UnicodeDecodeError as error:
            self.fail(f"the header is not UTF-8 at byte {error.start}")
        return entries

    def _check_spans(self, entries: Mapping[str, Any], begin: int, size: int) -> dict[str, Span]:
        spans = {name: self._check_span(name, entry, begin) for name, entry in entries.items()}
        spans = dict(sorted(spans.items(), key=lambda item: item[1][2:]))
        end = begin
        for name, span in spans.items():
            if span.start != end:
                how = "overlap" if span.start < end else "leave a gap"
                self.fail(f"{name} starts at byte {span.start - begin}, expected {end - begin}: tensors {how}")
            end = span.stop
        if end != size:
            how = "truncated" if end > size else "too long"
            self.fail(f"the tensors take {end - begin:,} bytes, and {size - begin:,} follow the header: {how}")
        return spans

    def _check_span(self, name: str, entry: Any, begin: int) -> Span:
        if not isinstance(entry, dict) or sorted(entry) != ["data_offsets", "dtype", "shape"]:
            self.fail(f"{name}: expected dtype, shape and data_offsets, got {short(entry)}")
        code = entry["dtype"]
        shape = entry["shape"]
        offsets = entry["data_offsets"]
        dtype = STORED.get(code) if isinstance(code, str) else None
        if dtype is None:
            self.fail(f"{name}: dtype {short(code)} is none of {', '.join(STORED)}")
        if not are_sizes(shape):
            self.fail(f"{name}: shape {short(shape)} is none")
        if not are_sizes(offsets) or len(offsets) != 2:
            self.fail(f"{name}: data_offsets {short(offsets)} are none")
        start, stop = offsets
        if stop - start != math.prod(shape) * dtype.itemsize:
            self.fail(f"{name}: {code} of shape {short(shape)} does not take bytes {start} to {stop}")
        return Span(dtype, tuple(shape), begin + start, begin + stop)


def read_into(file: Any, view: memoryview) -> bool:
    """Fills `view` from a file, by as many reads as needed. Returns False if the file ends first."""
    while view:
        count = file.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True


def are_sizes(value: Any) -> bool:
    """Whether the value is a list of integers of at least 0, with at most as many items as NumPy allows dimensions."""
    return isinstance(value, list) and len(value) <= _MOST_DIMENSIONS and all(type(n) is int and n >= 0 for n in value)


def short(value: Any) -> str:
    """`repr(value)`, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
