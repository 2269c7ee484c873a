"""Encodes Python values as JSON and a table of arrays by name, and decodes them.

JSON has no tensors and no tuples, for example, and its keys are text. So every dict, and every value that JSON does not
have, is encoded as an object with one key:

    {"tensor": name}  {"array": name}  {"scalar": an array of shape ()}  {"bytes": base64}
    {"tuple": [...]}  {"dict": [[key, value], ...]}  {"counter": [[key, value], ...]}

A list is encoded as a list. NaN and infinities are written as Python's `json` does. Subclasses of dict (other than
Counter), list and tuple are decoded as dict, list and tuple.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np

from ddp._device import CPU, device_of
from ddp._tensor.base import TensorBase, wrap
from ddp.errors import ArgumentError, SerializationError
from ddp.serialization.safetensors import CODES

Array = Any
JSON = Any
# Stores an array: (suggested name, array, its tensor if it has one) -> the name under which it is stored.
Keep = Callable[[str, Array, TensorBase | None], str]
# Encodes a value of another type: (value, its name) -> JSON.
EncodeOther = Callable[[Any, str], JSON]

# The types that JSON has, too. Keys of a dict must be of these.
_PLAIN = (str, bool, int, float, type(None))


def free_name(name: str, taken: Container[str]) -> str:
    """The first of `name`, `name~2`, `name~3` and so on that is not taken."""
    number = 1
    free = name
    while free in taken:
        number += 1
        free = f"{name}~{number}"
    return free


def memory_key(array: Array) -> tuple[Any, ...]:
    """A key that is equal for two arrays with the same elements in the same memory."""
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return device_of(array), address, array.shape, array.strides, array.dtype


def refuse(value: Any, name: str) -> JSON:
    """Refuses a value that cannot be encoded. name: its path. Raises: ArgumentError, always."""
    raise ArgumentError(
        f"{name} is of type {type(value).__name__}: expected JSON values, tensors and arrays, bytes, dicts, lists and "
        "tuples of these, or what has a state_dict, by that"
    )


def encode(value: Any, name: str, keep: Keep, other: EncodeOther = refuse) -> JSON:
    """Encodes `value` as JSON. Its arrays are given to `keep`, under `name` and their path inside the value.

    other: encodes values of all other types
    Raises: ArgumentError, with the path, for a value that cannot be encoded; RecursionError for one that contains
    itself, or is nested too deep.
    """
    if isinstance(value, TensorBase):
        return {"tensor": keep(name, value.array, value)}
    if isinstance(value, np.generic):
        return {"scalar": encode(np.asarray(value), name, keep)}
    if hasattr(value, "dtype") and hasattr(value, "nbytes") and not isinstance(value, np.ma.MaskedArray):
        array = value if isinstance(value, np.ndarray) else device_of(value).xp.asarray(value)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.dtype not in CODES:
            raise ArgumentError(f"{name} is an array of dtype {array.dtype}, which a file cannot hold")
        return {"array": keep(name, array, None)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{name}.{index}", keep, other) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, _PLAIN):
                raise ArgumentError(f"{name} has a key of type {type(key).__name__}, expected text or numbers")
            pairs.append([encode(key, name, keep), encode(item, f"{name}.{key}", keep, other)])
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    return other(value, name)


def names_in(saved: JSON) -> Iterator[str]:
    """The names of the arrays that decoding `saved` will fetch."""
    if isinstance(saved, list):
        for item in saved:
            yield from names_in(item)
    elif isinstance(saved, dict):
        for tag, inner in saved.items():
            if tag in ("tensor", "array") and isinstance(inner, str):
                yield inner
            elif tag in ("tuple", "dict", "counter", "scalar"):
                yield from names_in(inner)


class Decoder:
    """Decodes what `encode` returned; tensors are on the CPU. fetch: returns the array of a name"""

    def __init__(self, fetch: Callable[[str], Array]) -> None:
        self.fetch = fetch

    def tensor(self, name: str) -> Any:
        """The tensor that is stored under this name."""
        return wrap(self.fetch(name), CPU)

    def other(self, tag: str, inner: JSON) -> Any:
        """Decodes {tag: inner}, which the `other` of `encode` made. Subclasses override it.

        Raises: ValueError if there is no such tag: in this class, always.
        """
        raise ValueError("no such tag")

    def decode(self, saved: JSON) -> Any:
        """Decodes `saved`. Raises: SerializationError for JSON that `encode` did not write."""
        if isinstance(saved, list):
            return [self.decode(item) for item in saved]
        if not isinstance(saved, dict):
            return saved
        try:
            ((tag, inner),) = saved.items()
            return self._decoded(tag, inner)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, SerializationError):
                raise
            raise SerializationError(f"the structure holds {str(saved)[:80]}, which is none: {error}") from None

    def _decoded(self, tag: str, inner: JSON) -> Any:
        if tag == "tensor":
            return self.tensor(inner)
        if tag == "array":
            return self.fetch(inner)
        if tag == "scalar":
            return self.decode(inner)[()]
        if tag == "tuple" and isinstance(inner, list):
            return tuple(self.decode(inner))
        if tag in ("dict", "counter"):
            pairs = {self.decode(key): self.decode(item) for key, item in inner}
            return Counter(pairs) if tag == "counter" else pairs
        if tag == "bytes":
            return base64.b64decode(inner)
        return self.other(tag, inner)
