"""Writing: tensors are named by where they stand, and laid out so that each is aligned."""

from __future__ import annotations

import json
from types import FunctionType
from typing import IO, Any

import numpy as np

from ddp._device import CPU, device, place
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError
from ddp.nn import Module
from ddp.serialization._format import METADATA, SCALARS, STORED
from ddp.serialization._globals import reference
from ddp.serialization._layout import lay_out


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
