"""Saves and loads objects in the safetensors format: a JSON header and the raw bytes of tensors. No code is loaded.

The library `safetensors` is not used: for NumPy it has no bfloat16, and its errors do not name the file. The tests
compare its files with ours. An object that is not a plain dict of tensors is described by JSON in the header's
metadata:

    "structure"   as `ddp.serialization.structure` encodes it. A module is
                  {"module": ["package.module:Class", {"dict": its attributes}]}. Attributes may also be {"set": [...]},
                  {"function": "package.module:name"}, {"parameters": [{"dict": ...}, {name: requires_grad}]}.
                  {"same_module": n} is a module that appears again: n is its number, from 0, in the order in which the
                  descriptions of modules end
    "tied"        {name: the name under which the same memory is written}

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import io
import os
from typing import IO, Any

from ddp._device import CPU, device
from ddp._files import atomic_write
from ddp.errors import ArgumentError
from ddp.serialization.objects import Writer, add_safe_globals, read, safe_globals

__all__ = ["add_safe_globals", "load", "safe_globals", "save"]

File = str | os.PathLike[str] | IO[bytes]


def save(obj: Any, f: File) -> None:
    """Writes an object to `f` in safetensors: a state dict, or dicts, lists and tuples of tensors, arrays, JSON values,
    bytes and modules.

    f: a path or an open binary file. A file is replaced atomically; a device, pipe or terminal is written to directly
    A dict of tensors by name becomes an ordinary safetensors file, which `safetensors.torch.load_file` reads.
    A tensor that appears twice (the same memory, shape, strides and dtype) is written once, under its first name. NumPy
    arrays are loaded as arrays. For a module, the file has the name of its class, and its attributes: values of the
    same kinds, sets of JSON values, and functions. A state dict can be loaded without the class. Tensors and
    arrays keep their dtype: bool, integers of 8 to 64 bits, float16, bfloat16, float32 and float64, in this machine's
    byte order.

    Raises: ArgumentError for anything else in `obj`, for arrays of other dtypes, and for another `f`; OSError if the
    file cannot be written.
    """
    writer = Writer(obj)
    if not isinstance(f, str | os.PathLike):
        _check("save", f, "write")
        writer.write(f)
        return
    with atomic_write(f) as file:
        writer.write(file)


def load(
    f: File, map_location: device | str | None = None, *, weights_only: bool = True, mmap: bool | None = None
) -> Any:
    """Loads what `save` wrote, or another safetensors file as a dict of tensors. All memory is new and writable.

    Modules must be layers of `ddp.nn`, or of classes that `safe_globals` or `add_safe_globals` has listed.

    f: a path, or an open binary file, read to its end; map_location: the device of the tensors, the CPU if None
    weights_only, mmap: have no effect: only tensors and JSON are ever read, into new memory

    Raises: SerializationError, with the problem, for a file that is truncated, is not of this format, or has a class
    that may not be loaded or a dtype that no tensor has; ArgumentError for another `f` or `map_location`; DeviceError
    if that device is not there; OSError if the file cannot be read.
    """
    if map_location is not None and not isinstance(map_location, str | device):
        raise ArgumentError(f"load: map_location is a device or its name, not {type(map_location).__name__}")
    target = CPU if map_location is None else device(map_location)
    if isinstance(f, str | os.PathLike):
        with open(f, "rb") as file:
            return read(file, os.fspath(f), target)
    _check("load", f, "read")
    return read(f if f.seekable() else io.BytesIO(f.read()), _name(f), target)


def _name(file: Any) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else f"<{type(file).__name__}>"


def _check(name: str, f: Any, method: str) -> None:
    if not hasattr(f, method) or isinstance(f, io.TextIOBase):
        raise ArgumentError(f"{name}: expected a path or an open binary file, got {type(f).__name__}")
