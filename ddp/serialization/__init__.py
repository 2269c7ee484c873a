"""Saving and loading in safetensors: a JSON header, and the raw bytes of tensors. Nothing in a file is ever run.

The format is read and written here and not by the library of that name, whose NumPy side knows no bfloat16, whose
errors name no file, and whose import costs more than NumPy's; the tests hold the two against each other. What is not a
plain dict of tensors keeps its form as JSON in the header's metadata:

    "structure"   as `ddp.serialization.structure` encodes it, and of modules
                  {"module": ["package.module:Class", {"dict": its attributes}]}, and in there {"set": [...]},
                  {"function": "package.module:name"}, {"parameters": [{"dict": ...}, {name: requires_grad}]};
                  {"same_module": n} for one that appears again: the n-th module whose description ends before, from 0
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
    """Writes tensors to `f` in safetensors: a state dict, or dicts, lists and tuples of tensors, arrays, JSON values,
    bytes and modules.

    f: a path, whose file is replaced at once and whole (a device, pipe or terminal is written to), or an open binary
        file
    A dict of tensors by name is an ordinary safetensors file, which PyTorch's `safetensors.torch.load_file` reads. A
    tensor that appears twice (the same memory, shape and strides) is written once. NumPy arrays come back as arrays. Of
    a module, the file has the name of its class and its attributes, which have to be of these kinds, too; a state dict
    needs no class to be loaded. Tensors and arrays keep their dtype: bool, integers of 8 to 64 bits, float16, bfloat16,
    float32 and float64, in this machine's byte order.

    Raises: ArgumentError for anything else in `obj`, arrays of other dtypes too; OSError if the file cannot be written.
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
    """What `save` wrote, or any safetensors file as a dict of tensors; all memory is new and writable.

    Of modules, the layers of `ddp.nn` are made, and classes that are listed in `ddp.serialization.safe_globals`.

    f: a path, or an open binary file, read to its end; map_location: where the tensors go, the CPU unless given
    weights_only, mmap: change nothing, since nothing but tensors and JSON is ever read, into memory of its own

    Raises: SerializationError for a file that is truncated or something else, which says what is wrong with it.
    """
    if map_location is not None and not isinstance(map_location, str | device):
        raise ArgumentError(f"load: map_location is a device or its name, not {type(map_location).__name__}")
    where = CPU if map_location is None else device(map_location)
    if isinstance(f, str | os.PathLike):
        with open(f, "rb") as file:
            return read(file, os.fspath(f), where)
    _check("load", f, "read")
    return read(f if f.seekable() else io.BytesIO(f.read()), _name(f), where)


def _name(file: Any) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else f"<{type(file).__name__}>"


def _check(name: str, f: Any, method: str) -> None:
    if not hasattr(f, method) or isinstance(f, io.TextIOBase):
        raise ArgumentError(f"{name}: expected a path or an open binary file, got {type(f).__name__}")
