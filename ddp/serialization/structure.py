"""Values as JSON, and beside it arrays by name. Values come back with their types and all their bits.

JSON has no tuples and no keys but text, so what is not plain stands in an object of one key:

    {"tensor": name}  {"array": name}  {"scalar": an array of shape ()}  {"bytes": base64}
    {"tuple": [...]}  {"dict": [[key, value], ...]}  {"counter": [[key, value], ...]}

Lists stand for themselves, and NaN and infinities are written as Python's `json` does.
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
Keep = Callable[[str, Array, TensorBase | None], str]  # (name, array, its tensor): the name under which it is kept
Fetch = Callable[[str], Array]

_KEYS = (str, bool, int, float, type(None))


def free_name(name: str, taken: Container[str]) -> str:
    """`name`, or `name~2`, `name~3` and so on: the first that is not taken."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}~{number}"
    return free


def memory_key(array: Array) -> tuple[Any, ...]:
    """The same for two arrays of the same elements in the same memory."""
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return device_of(array), address, array.shape, array.strides, array.dtype


def refuse(value: Any, name: str) -> JSON:
    """Raises: ArgumentError for a value that has no form in JSON."""
    raise ArgumentError(
        f"{name} is of type {type(value).__name__}: expected JSON values, tensors and arrays, bytes, dicts, lists and "
        "tuples of these, or what has a state_dict, by that"
    )


def encode(value: Any, name: str, keep: Keep, other: Callable[[Any, str], JSON] = refuse) -> JSON:
    """`value` as JSON, its arrays kept under `name` and where they stand in it.

    other: encodes what is neither JSON, an array nor made of these
    Raises: ArgumentError, naming the place, for what cannot be encoded.
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
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{name}.{at}", keep, other) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, _KEYS):
                raise ArgumentError(f"{name} has a key of type {type(key).__name__}, expected text or numbers")
        pairs = [[encode(k, name, keep), encode(v, f"{name}.{k}", keep, other)] for k, v in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    return other(value, name)


def names_in(saved: JSON) -> Iterator[str]:
    """The names of the arrays that decoding will fetch."""
    if isinstance(saved, list):
        for item in saved:
            yield from names_in(item)
    elif isinstance(saved, dict):
        for kind, inner in saved.items():
            if kind in ("tensor", "array") and isinstance(inner, str):
                yield inner
            elif kind in ("tuple", "dict", "counter", "scalar"):
                yield from names_in(inner)


class Decoder:
    """Makes values of what `encode` returned; tensors are on the CPU. fetch: the array of a name"""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def tensor(self, name: str) -> Any:
        """The tensor that was kept under that name."""
        return wrap(self.fetch(name), CPU)

    def other(self, kind: str, inner: JSON) -> Any:
        """What `other` encoded as {kind: inner}."""
        raise ValueError("no such kind")

    def decode(self, saved: JSON) -> Any:
        """The value. Raises: SerializationError for what `encode` did not write."""
        if isinstance(saved, list):
            return [self.decode(item) for item in saved]
        if not isinstance(saved, dict):
            return saved
        try:
            ((kind, inner),) = saved.items()
            return self._decoded(kind, inner)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, SerializationError):
                raise
            raise SerializationError(f"the structure holds {str(saved)[:80]}, which is none: {error}") from None

    def _decoded(self, kind: str, inner: JSON) -> Any:
        if kind == "tensor":
            return self.tensor(inner)
        if kind == "array":
            return self.fetch(inner)
        if kind == "scalar":
            return self.decode(inner)[()]
        if kind == "tuple" and isinstance(inner, list):
            return tuple(self.decode(inner))
        if kind in ("dict", "counter"):
            pairs = {self.decode(key): self.decode(item) for key, item in inner}
            return Counter(pairs) if kind == "counter" else pairs
        if kind == "bytes":
            return base64.b64decode(inner)
        return self.other(kind, inner)
