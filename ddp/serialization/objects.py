"""Converts objects to safetensors and back. Tensors are named by their path in the object.

A file may name classes and functions. A name is looked up among the layers and functions of this package, and among
those that the program has listed by `safe_globals` or `add_safe_globals`: a file can neither import nor call anything.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import IO, Any

import numpy as np

from ddp._device import CPU, device, device_of, to_device
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, SerializationError
from ddp.nn import Module, Parameter
from ddp.serialization.safetensors import CODES, DTYPES, METADATA, Header, lay_out, read_into, short
from ddp.serialization.structure import JSON, Decoder, encode, free_name, memory_key, refuse

# The public modules by which files name classes and functions. These names stay valid when source files are renamed.
_PUBLIC = ("ddp.nn", "ddp.nn.functional", "ddp")
# Prefixes of the names of the modules that define these classes and functions.
_OURS = ("ddp.nn.", "ddp._tensor.functions", "ddp._tensor.linear_algebra")
_ROOT = "obj"

# The classes and functions of `safe_globals`, by name.
_listed: dict[str, Any] = {}


def reference(value: Any) -> str:
    """The name of a class or function in files: `package.module:Class`. For this package's own, the module is public.

    Raises: ArgumentError for other values.
    """
    if not isinstance(value, (type, FunctionType)):
        raise ArgumentError(f"safe_globals: expected classes and functions themselves, got {value!r:.80}")
    name: str = value.__qualname__
    for module in _PUBLIC:
        if getattr(sys.modules.get(module), name, None) is value:
            return f"{module}:{name}"
    return f"{value.__module__}:{name}"


def look_up(name: str) -> Any:
    """The class or function of this name; None if files may not name it."""
    module, _, attribute = name.partition(":")
    if module in _PUBLIC or module.startswith(_OURS):
        value: Any = getattr(sys.modules.get(module), attribute, None)
        known = isinstance(value, type | FunctionType) and value.__module__.startswith(_OURS)
        return value if known and reference(value) == name else None
    return _listed.get(name)


def add_safe_globals(safe_globals: Iterable[Any]) -> None:
    """Allows files that are loaded from now on to name these subclasses of `nn.Module` and these functions.

    A module in such a file may have these functions as attributes.
    Raises: ArgumentError for values that are neither classes nor Python functions, such as names.
    """
    _listed.update({reference(value): value for value in safe_globals})


@contextlib.contextmanager
def safe_globals(safe_globals: Iterable[Any]) -> Iterator[None]:
    """Has the effect of `add_safe_globals` until the block ends, in all threads.

    At the end, the list is again what it was before the block: names that were added meanwhile are removed as well.
    """
    before = dict(_listed)
    add_safe_globals(safe_globals)
    try:
        yield
    finally:
        _listed.clear()
        _listed.update(before)


class Writer:
    """Encodes an object: names all of its tensors and lays out the file."""

    def __init__(self, obj: Any) -> None:
        self._arrays: dict[str, Any] = {}
        self._tied: dict[str, str] = {}
        self._taken = {METADATA}
        self._names: dict[Any, str] = {}  # the first name of each memory, by `memory_key`
        self._modules: dict[int, int] = {}  # by id: the numbers of the modules that have been described
        metadata = {}
        if isinstance(obj, dict) and METADATA not in obj and all(_is_named_tensor(item) for item in obj.items()):
            for name, tensor in obj.items():
                self._add(name, tensor.array)
        else:
            try:
                metadata["structure"] = json.dumps(self._encoded(obj, _ROOT))
            except RecursionError:
                raise ArgumentError("save: obj is nested too deep, or a part of it holds the whole") from None
        if self._tied:
            metadata["tied"] = json.dumps(self._tied)
        self._layout = lay_out(self._arrays, metadata)

    def write(self, file: IO[bytes]) -> None:
        _write(file, self._layout.begin)
        for name in self._layout.starts:
            array = np.ascontiguousarray(to_device(self._arrays[name], CPU))
            if array.size:
                _write(file, array.reshape(-1).view(np.uint8).data)

    def _encoded(self, value: Any, name: str) -> JSON:
        return encode(value, name, self._keep, self._module)

    def _keep(self, name: str, array: Any, tensor: Any) -> str:
        name = name[len(_ROOT) + 1 :] or ("array" if tensor is None else "tensor")
        return self._add(free_name(name, self._taken), array)

    def _add(self, name: str, array: Any) -> str:
        if array.dtype not in CODES:
            raise ArgumentError(f"save: {name} is of {array.dtype}, which safetensors files have no name for")
        self._taken.add(name)
        first = self._names.setdefault(memory_key(array), name) if array.size else name
        if first == name:
            self._arrays[name] = array  # also keeps the memory alive, so that its address stays unique
        else:
            self._tied[name] = first
        return name

    def _module(self, value: Any, name: str) -> JSON:
        if not isinstance(value, Module):
            return refuse(value, name)
        if id(value) in self._modules:
            return {"same_module": self._modules[id(value)]}
        pairs = [[key, self._attribute(key, part, name)] for key, part in vars(value).items()]
        self._modules[id(value)] = len(self._modules)  # numbered after the modules inside
        return {"module": [reference(type(value)), {"dict": pairs}]}

    def _attribute(self, key: str, value: Any, name: str) -> JSON:
        """Encodes a module's attribute, which may also be parameters, a set of JSON values or a function."""
        if key == "_parameters":
            flags = {path: p is not None and p.requires_grad for path, p in value.items()}
            return {"parameters": [self._encoded(value, name), flags]}
        if isinstance(value, set):
            return {"set": self._encoded(sorted(value, key=repr), f"{name}.{key}")}
        if isinstance(value, FunctionType):
            if "<" in value.__qualname__:  # a lambda or a local function, whose name is not unique
                raise ArgumentError(
                    f"save: {name}.{key} is {value.__qualname__}, which a file cannot name: expected a function that "
                    "is defined in a module"
                )
            return {"function": reference(value)}
        return self._encoded(value, name if key in ("_buffers", "_modules") else f"{name}.{key}")


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _write(file: IO[bytes], data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        written = file.write(view)
        view = view[len(view) if written is None else written :]  # an unbuffered file may write only a part


def read(file: Any, name: str, target: device) -> Any:
    """Reads the object in a file. name: of the file, for errors; target: device of the tensors

    Raises: SerializationError if the file is not valid.
    """
    start = file.tell()
    header = Header(file, name)
    tied = header.parse(header.metadata.get("tied", "{}"))
    names = header.spans.keys()
    if not isinstance(tied, dict) or tied.keys() & names or not {*map(str, tied.values())} <= names:
        header.fail(f"the metadata ties {short(tied)}, which does not fit the tensors")
    arrays = {}
    for array_name, (dtype, shape, begin, stop) in header.spans.items():
        flat = np.empty((stop - begin) // dtype.itemsize, dtype)
        file.seek(start + begin)
        if flat.size and not read_into(file, flat.view(np.uint8).data):
            header.fail(f"the file ends inside {array_name}")
        try:
            arrays[array_name] = flat.reshape(shape)
        except (ValueError, OverflowError) as error:  # an empty array of a shape such as (0, 2**70)
            header.fail(f"{array_name}: shape {short(list(shape))}: {error}")
    decoder = _ObjectDecoder(arrays, tied, target)
    try:
        if "structure" in header.metadata:
            return decoder.decode(header.parse(header.metadata["structure"]))
        return {array_name: decoder.tensor(array_name) for array_name in [*header.names, *tied]}
    except RecursionError:
        header.fail("the header is nested too deep")
    except SerializationError as error:
        header.fail(str(error).removeprefix(f"{name}: "))


class _ObjectDecoder(Decoder):
    """Decodes what `Writer` has encoded: ties tensors again, and makes modules from their attributes."""

    def __init__(self, arrays: Mapping[str, Any], tied: Mapping[str, str], target: device) -> None:
        super().__init__(lambda name: arrays[tied.get(name, name)])
        self._tied = tied
        self._target = target
        self._tensors: dict[str, Tensor] = {}
        self._parameters: dict[int, Parameter] = {}  # by memory
        self._modules: list[Module] = []  # in the order of their numbers

    def tensor(self, name: str) -> Any:
        source = self._tied.get(name, name)
        if source not in self._tensors:
            array = self.fetch(source)
            if array.dtype not in DTYPES.values():
                raise SerializationError(f"{name}: dtype {array.dtype} is none of a tensor, {', '.join(DTYPES)}")
            placed = to_device(array, self._target)
            self._tensors[source] = wrap(placed, device_of(placed))
        tensor = self._tensors[source]
        return tensor if name == source else tensor.detach()

    def other(self, tag: str, inner: JSON) -> Any:
        if tag == "set":
            return set(self.decode(inner))
        if tag == "function":
            return self._global(inner, FunctionType)
        if tag == "same_module" and type(inner) is int and inner >= 0:
            return self._modules[inner] if inner < len(self._modules) else super().other(tag, inner)
        if tag == "parameters":
            values, flags = inner
            return {key: self._parameter(p, flags.get(key)) for key, p in dict(self.decode(values)).items()}
        if tag == "module":
            name, attributes = inner
            return self._module(self._global(name, type), self.decode(attributes))
        return super().other(tag, inner)

    def _global(self, name: str, cls: type) -> Any:
        value = look_up(name)
        if isinstance(value, cls) and (not isinstance(value, type) or issubclass(value, Module)):
            return value
        raise SerializationError(
            f"it holds {short(name)}, which is none of ddp.nn's; where the file is trusted, load it inside "
            f"ddp.serialization.safe_globals([{short(name.rpartition(':')[2])[1:-1]}])"
        )

    def _module(self, cls: type, attributes: Any) -> Any:
        if not isinstance(attributes, dict) or not all(isinstance(name, str) for name in attributes):
            raise SerializationError(
                f"the attributes of a {cls.__name__} are {short(attributes)}, expected names and values"
            )
        for name, value in vars(Module()).items():
            if type(attributes.get(name)) is not type(value):
                problem = f"{name} is {short(attributes.get(name))}, expected a {type(value).__name__}"
                raise SerializationError(f"a {cls.__name__}, whose {problem}")
        module: Any = object.__new__(cls)
        module.__dict__.update(attributes)
        self._modules.append(module)
        return module

    def _parameter(self, tensor: Any, requires_grad: Any) -> Parameter | None:
        """The parameter of a tensor. Tensors with the same memory get the same parameter: weights stay tied."""
        if tensor is None:
            return None
        if not isinstance(tensor, Tensor):
            raise SerializationError(f"a parameter is {short(tensor)}, expected a tensor")
        key = tensor.data_ptr() or id(tensor)
        return self._parameters.setdefault(key, Parameter(tensor, requires_grad is True and tensor.is_floating_point()))
