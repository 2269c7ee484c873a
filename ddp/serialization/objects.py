"""Objects to safetensors and back: tensors are named by where they stand, and what a file says is checked before use.

A file holds names of classes and functions alone. They are looked up among those of `ddp.nn` and those that the reader
lists; nothing is imported or called for one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np

from ddp._device import CPU, device, device_of, place
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, SerializationError
from ddp.nn import Module, Parameter
from ddp.serialization.safetensors import DTYPES, LIMIT, METADATA, SCALARS, STORED, lay_out

#: Where classes and functions have their public names, which stay when files are renamed.
_PUBLIC = ("ddp.nn", "ddp.nn.functional", "ddp")
_OURS = ("ddp.nn.", "ddp._tensor.functions", "ddp._tensor.joining", "ddp._tensor.linear_algebra")

_listed: dict[str, Any] = {}


def reference(value: Any) -> str:
    """How a file names a class or a function: `package.module:Class`, by its public name if it is one of ours.

    Raises: ArgumentError for anything else.
    """
    if not isinstance(value, (type, FunctionType)):
        raise ArgumentError(f"safe_globals: expected classes and functions themselves, got {value!r:.80}")
    name: str = value.__qualname__
    for module in _PUBLIC:
        if getattr(sys.modules.get(module), name, None) is value:
            return f"{module}:{name}"
    return f"{value.__module__}:{name}"


def found(name: str) -> Any:
    """The class or function of that name, None if no file may name it."""
    module, _, attribute = name.partition(":")
    if module in _PUBLIC or module.startswith(_OURS):
        value: Any = getattr(sys.modules.get(module), attribute, None)
        known = isinstance(value, type | FunctionType) and value.__module__.startswith(_OURS)
        return value if known and reference(value) == name else None
    return _listed.get(name)


def add_safe_globals(safe_globals: Iterable[Any]) -> None:
    """From now on `load` also makes modules of these classes, and takes these functions for their attributes.

    Raises: ArgumentError for something else, such as a name.
    """
    _listed.update({reference(each): each for each in safe_globals})


@contextlib.contextmanager
def safe_globals(safe_globals: Iterable[Any]) -> Iterator[None]:
    """As `add_safe_globals`, inside alone; in all threads."""
    before = dict(_listed)
    add_safe_globals(safe_globals)
    try:
        yield
    finally:
        _listed.clear()
        _listed.update(before)


class Writer:
    """Names every tensor of an object, and lays them out."""

    def __init__(self, obj: Any) -> None:
        self._arrays: dict[str, Any] = {}
        self._tied: dict[str, str] = {}
        self._known: dict[Any, str] = {}  # the name of each stretch of memory
        self._modules: dict[int, int] = {}  # the number of each module that has been described, by id
        self._held: list[Any] = []  # so that no address is used again meanwhile
        metadata = {}
        if isinstance(obj, dict) and METADATA not in obj and all(_is_named_tensor(item) for item in obj.items()):
            for name, tensor in obj.items():
                self._add(name, tensor.array, tensor.device)
        else:
            try:
                metadata["structure"] = json.dumps(self._described(obj, (), "obj"))
            except RecursionError:
                raise ArgumentError("save: obj is nested too deep, or a part of it holds the whole") from None
        if self._tied:
            metadata["tied"] = json.dumps(self._tied)
        self._layout = lay_out(self._arrays, metadata)

    def write(self, file: IO[bytes]) -> None:
        _write(file, self._layout.begin)
        for name in self._layout.order:
            array = np.ascontiguousarray(place(self._arrays[name], CPU))
            if array.size:
                _write(file, array.reshape(-1).view(np.uint8).data)

    def _described(self, value: Any, path: tuple[str, ...], where: str) -> Any:
        """`value` as JSON, its tensors put aside. where: how a user would write its place."""
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Tensor):
            return {"tensor": self._add(self._free(".".join(path) or "tensor"), value.array, value.device)}
        if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
            array = value.astype(value.dtype.newbyteorder("="), copy=False)
            return {"array": self._add(self._free(".".join(path) or "array"), array, CPU)}
        if isinstance(value, SCALARS):
            return value
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self._described(v, (*path, str(i)), f"{where}[{i}]") for i, v in enumerate(value)]}
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, SCALARS):
                    raise ArgumentError(
                        f"save: {where} has a key of type {type(key).__name__}: expected str or numbers"
                    )
            pairs = [[k, self._described(v, (*path, str(k)), f"{where}[{k!r}]")] for k, v in value.items()]
            return {"dict": pairs}
        if isinstance(value, Module):
            if id(value) in self._modules:
                return {"same_module": self._modules[id(value)]}
            described = {"module": [reference(type(value)), self._described_parts(vars(value), path, where)]}
            self._modules[id(value)] = len(self._modules)  # the modules inside have come before
            return described
        raise ArgumentError(
            f"save: {where} is of type {type(value).__name__}: expected tensors, arrays, modules, dicts, lists, "
            "tuples, str, int, float, bool and None"
        )

    def _described_parts(self, attributes: dict[str, Any], path: tuple[str, ...], where: str) -> Any:
        """A module's attributes: what `_described` takes, and parameters, sets of JSON values and functions."""
        found = []
        for name, value in attributes.items():
            if name == "_parameters":
                flags = {each: p is not None and p.requires_grad for each, p in value.items()}
                found.append([name, {"parameters": [self._described(value, path, where), flags]}])
            elif name in ("_buffers", "_modules"):
                found.append([name, self._described(value, path, where)])
            elif isinstance(value, set) and all(isinstance(each, SCALARS) for each in value):
                found.append([name, {"set": sorted(value, key=repr)}])
            elif isinstance(value, FunctionType):
                if "<" in value.__qualname__:  # others may have the same name
                    raise ArgumentError(
                        f"save: {where}.{name} is {value.__qualname__}, which a file cannot name: expected a function "
                        "that is defined in a module"
                    )
                found.append([name, {"function": reference(value)}])
            else:
                found.append([name, self._described(value, (*path, name), f"{where}.{name}")])
        return {"dict": found}

    def _free(self, name: str) -> str:
        number, found = 1, name
        while found in self._arrays or found in self._tied or found == METADATA:
            number += 1
            found = f"{name}~{number}"
        return found

    def _add(self, name: str, array: Any, where: device) -> str:
        if array.dtype not in STORED.values():
            raise ArgumentError(f"save: {name} is of {array.dtype}, which safetensors files have no name for")
        self._held.append(array)
        address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
        memory = (where, address, array.shape, array.strides, array.dtype)
        first = self._known.setdefault(memory, name) if array.size else name
        if first == name:
            self._arrays[name] = array
        else:
            self._tied[name] = first
        return name


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _write(file: IO[bytes], data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        written = file.write(view)
        view = view[len(view) if written is None else written :]  # an unbuffered file may take a part of it


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
