"""Reading: everything that a file says is checked before it is believed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np

from ddp._device import device, device_of, place
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp.errors import SerializationError
from ddp.nn import Module, Parameter
from ddp.serialization._format import DTYPES, LIMIT, METADATA, SCALARS
from ddp.serialization._globals import found

_MOST_DIMENSIONS = 64  # of a NumPy array


class Span(NamedTuple):
    """An array in a file: its bytes from start to stop, counted from the file's first."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


class Reader:
    """Checks a file before it believes it. name: what errors call it; dtypes: by their names in files."""

    def __init__(self, file: IO[bytes], name: str, dtypes: Mapping[str, np.dtype[Any]] = DTYPES) -> None:
        self._file = file
        self._name = name
        self._dtypes = dtypes
        self._parameters: dict[int, Parameter] = {}  # by memory
        self._modules: list[Module] = []  # in the order in which they were made
        self._start = file.tell()
        self._size = file.seek(0, os.SEEK_END) - self._start

    def read(self, where: device) -> Any:
        try:
            entries = self._header()
            metadata = self._metadata(entries.pop(METADATA, {}))
            spans = self._spans(entries)
            tied = self._json("tied", metadata) if "tied" in metadata else {}
            for alias, name in tied.items():
                if alias in spans or name not in spans:
                    self._fail(f"the metadata ties {alias!r} to {name!r}, which does not fit the tensors")
            structure = self._json("structure", metadata, any_value=True) if "structure" in metadata else None
            lone = {tied.get(name, name) for name in _arrays_in(structure)}
            for name, (dtype, *_) in spans.items():
                if name not in lone and dtype not in DTYPES.values():
                    self._fail(f"{name}: dtype {dtype} is none of a tensor, {', '.join(DTYPES)}")
            arrays = dict(self._arrays(spans))
            placed = {name: place(arrays[name], where) for name in entries if arrays[name].dtype in DTYPES.values()}
            tensors = {name: wrap(array, device_of(array)) for name, array in placed.items()}
            tensors.update({alias: tensors[name].detach() for alias, name in tied.items() if name in tensors})
            if "structure" not in metadata:
                return tensors
            return self._built(structure, tensors, {**arrays, **{alias: arrays[name] for alias, name in tied.items()}})
        except RecursionError:
            self._fail("the header is nested too deep")

    def spans(self) -> dict[str, Span]:
        """Where the arrays are, in the order of the file. Nothing but the header is read."""
        try:
            entries = self._header()
            self._metadata(entries.pop(METADATA, {}))
            begin = self._file.tell() - self._start
            return {
                name: Span(dtype, shape, begin + start, begin + stop)
                for name, (dtype, shape, start, stop) in self._spans(entries).items()
            }
        except RecursionError:
            self._fail("the header is nested too deep")

    def _fail(self, what: str) -> NoReturn:
        raise SerializationError(f"{self._name}: {what}") from None

    def _header(self) -> dict[str, Any]:
        self._file.seek(self._start)
        begin = self._file.read(min(8, self._size))
        if len(begin) < 8:
            self._fail(f"{self._size} bytes is no safetensors file, which begins with 8 for the length of its header")
        length = int.from_bytes(begin, "little")
        if length > self._size - 8 or length > LIMIT:
            self._fail(
                _foreign(begin) or f"a header of {length:,} bytes in a file of {self._size:,}: truncated, or foreign"
            )
        text = self._file.read(length)
        if not text.startswith(b"{"):
            self._fail(
                _foreign(begin) or f"the header begins with {text[:8]!r}, expected a JSON object: not safetensors"
            )
        try:
            return self._parsed(text.decode())
        except UnicodeDecodeError as error:
            self._fail(f"the header is not UTF-8 at byte {error.start}")

    def _parsed(self, text: str) -> Any:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for key, value in pairs:
                if key in found:
                    self._fail(f"the header has {_short(key)} twice")
                found[key] = value
            return found

        try:
            return json.loads(text, object_pairs_hook=unique)
        except SerializationError:
            raise
        except ValueError as error:
            self._fail(f"the header is not JSON: {error}")

    def _json(self, key: str, metadata: dict[str, str], any_value: bool = False) -> Any:
        value = self._parsed(metadata[key])
        if any_value:
            return value
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()):
            self._fail(f"the metadata's {key!r} is no map of names")
        return value

    def _metadata(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            self._fail(f"{METADATA} is no map from text to text")
        return value

    def _spans(self, entries: dict[str, Any]) -> dict[str, tuple[Any, tuple[int, ...], int, int]]:
        """(dtype, shape, start, stop) of each tensor, in the order of the file; every byte belongs to one of them."""
        spans = {name: self._span(name, entry) for name, entry in entries.items()}
        spans = dict(sorted(spans.items(), key=lambda item: item[1][2:]))
        data = self._size - self._file.tell() + self._start
        at = 0
        for name, (_, _, start, stop) in spans.items():
            if start != at:
                how = "overlap" if start < at else "leave a gap"
                self._fail(f"{name} starts at byte {start}, expected {at}: tensors {how}")
            at = stop
        if at != data:
            how = "truncated" if at > data else "too long"
            self._fail(f"the tensors take {at:,} bytes, and {data:,} follow the header: {how}")
        return spans

    def _span(self, name: str, entry: Any) -> tuple[Any, tuple[int, ...], int, int]:
        if not isinstance(entry, dict) or sorted(entry) != ["data_offsets", "dtype", "shape"]:
            self._fail(f"{name}: expected dtype, shape and data_offsets, got {_short(entry)}")
        dtype = self._dtypes.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            self._fail(f"{name}: dtype {_short(entry['dtype'])} is none of {', '.join(self._dtypes)}")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
            self._fail(f"{name}: shape {_short(shape)} is none")
        if not _are_sizes(offsets) or len(offsets) != 2:
            self._fail(f"{name}: data_offsets {_short(offsets)} are none")
        start, stop = offsets
        if stop - start != math.prod(shape) * dtype.itemsize:
            self._fail(f"{name}: {entry['dtype']} of shape {_short(shape)} does not take bytes {start} to {stop}")
        return dtype, tuple(shape), start, stop

    def _arrays(self, spans: dict[str, tuple[Any, tuple[int, ...], int, int]]) -> Iterator[tuple[str, Any]]:
        for name, (dtype, shape, start, stop) in spans.items():
            flat = np.empty((stop - start) // dtype.itemsize, dtype)
            if flat.size and not _fill(self._file, flat.view(np.uint8).data):
                self._fail(f"the file ends inside {name}")
            try:
                yield name, flat.reshape(shape)
            except (ValueError, OverflowError) as error:
                self._fail(f"{name}: shape {_short(list(shape))}: {error}")

    def _built(self, value: Any, tensors: dict[str, Tensor], arrays: dict[str, Any]) -> Any:
        if not isinstance(value, dict | list):
            return value
        if isinstance(value, dict) and len(value) == 1:
            [(kind, inner)] = value.items()
            if kind == "tensor" and isinstance(inner, str) and inner in tensors:
                return tensors[inner]
            if kind == "array" and isinstance(inner, str) and inner in arrays:
                return arrays[inner]
            if kind in ("list", "tuple") and isinstance(inner, list):
                items = [self._built(each, tensors, arrays) for each in inner]
                return items if kind == "list" else tuple(items)
            if kind == "dict" and isinstance(inner, list) and all(map(_is_pair, inner)):
                return {key: self._built(each, tensors, arrays) for key, each in inner}
            if kind == "set" and isinstance(inner, list) and all(isinstance(each, SCALARS) for each in inner):
                return set(inner)
            if kind == "function" and isinstance(inner, str):
                return self._global(inner, FunctionType)
            if kind == "module" and isinstance(inner, list) and len(inner) == 2 and isinstance(inner[0], str):
                return self._module(self._global(inner[0], type), self._built(inner[1], tensors, arrays))
            if kind == "same_module" and type(inner) is int and 0 <= inner < len(self._modules):
                return self._modules[inner]
            if kind == "parameters" and isinstance(inner, list) and len(inner) == 2 and isinstance(inner[1], dict):
                parts = self._built(inner[0], tensors, arrays)
                if isinstance(parts, dict):
                    return {name: self._parameter(tensor, inner[1].get(name)) for name, tensor in parts.items()}
        return self._fail(f"the metadata's structure holds {_short(value)}, which is none")

    def _global(self, name: str, kind: type) -> Any:
        value = found(name)
        if isinstance(value, kind) and (not isinstance(value, type) or issubclass(value, Module)):
            return value
        return self._fail(
            f"it holds {_short(name)}, which is none of ddp.nn's; where the file is trusted, load it inside "
            f"ddp.serialization.safe_globals([{_short(name.rpartition(':')[2])[1:-1]}])"
        )

    def _module(self, kind: type, attributes: Any) -> Any:
        plain = Module().__dict__
        if not isinstance(attributes, dict) or not all(isinstance(name, str) for name in attributes):
            self._fail(f"the attributes of a {kind.__name__} are {_short(attributes)}, expected names and values")
        for name, value in plain.items():
            if type(attributes.get(name)) is not type(value):
                what = f"{name} is {_short(attributes.get(name))}, expected a {type(value).__name__}"
                self._fail(f"a {kind.__name__}, whose {what}")
        module: Any = object.__new__(kind)
        module.__dict__.update(attributes)
        self._modules.append(module)
        return module

    def _parameter(self, tensor: Any, requires_grad: Any) -> Parameter | None:
        """One object for one memory: tied weights stay one parameter."""
        if tensor is None:
            return None
        if not isinstance(tensor, Tensor):
            self._fail(f"a parameter is {_short(tensor)}, expected a tensor")
        key = tensor.data_ptr() or id(tensor)
        return self._parameters.setdefault(key, Parameter(tensor, requires_grad is True and tensor.is_floating_point()))


def _arrays_in(structure: Any) -> Iterator[str]:
    """The names of the NumPy arrays in a structure, which may have dtypes that no tensor has."""
    if isinstance(structure, dict):
        name = structure.get("array")
        if len(structure) == 1 and isinstance(name, str):
            yield name
        structure = list(structure.values())
    if isinstance(structure, list):
        for each in structure:
            yield from _arrays_in(each)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], SCALARS)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _foreign(begin: bytes) -> str | None:
    """What a file that begins so is, where that is known."""
    if begin.startswith(b"PK"):
        return "a zip archive, as torch.save writes: not safetensors"
    if begin.startswith(b"\x80") and begin[1] in range(2, 6):
        return "a pickle, which is never loaded: not safetensors"
    if begin.startswith(b"\x89HDF"):
        return "an HDF5 file: not safetensors"
    return None


def _fill(file: Any, view: memoryview) -> bool:
    while view:
        got = file.readinto(view)
        if not got:
            return False
        view = view[got:]
    return True
