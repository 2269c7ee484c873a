"""State as it is on disk: JSON, and beside it arrays by name. Values come back with their types and all their bits.

JSON has no tuples, no keys but text and no infinity, so what is not plain stands in an object of one key:

    {"tensor": name}  {"array": name}  {"raw": name, "dtype": ..., "shape": ...}  {"scalar": name}
    {"tuple": [...]}  {"dict": [[key, value], ...]}  {"counter": [[key, value], ...]}
    {"float": "inf"}  {"bytes": base64}

"raw" is an array of a dtype that the files have no name for, as bytes; that of records is the list of their fields, as
in .npy files. "scalar" is a number of NumPy's, as an array of shape (). Lists stand for themselves.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ddp._device import CPU, device_of
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.dtypes import SUPPORTED
from ddp.errors import ArgumentError, CheckpointError

Array = Any
JSON = Any
Keep = Callable[[str, Array, TensorBase | None], str]  # (name, array, its tensor): the name under which it is kept
Fetch = Callable[[str], Array]


def encode(value: Any, name: str, keep: Keep) -> JSON:
    """`value` as JSON, its arrays kept under `name` and where they stand in it.

    Raises: ArgumentError, naming the place, for what is neither JSON, an array nor made of these.
    """
    if isinstance(value, np.generic):
        return {"scalar": _kept(np.asarray(value), name, keep)}
    if isinstance(value, TensorBase):
        return {"tensor": keep(name, value.array, value)}
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "nbytes"):
        return _kept(value, name, keep)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{name}.{at}", keep) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | bool | int | float | None):
                raise ArgumentError(f"{name} has a key of type {type(key).__name__}, expected text or numbers")
        pairs = [[encode(key, name, keep), encode(item, f"{name}.{key}", keep)] for key, item in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    raise ArgumentError(
        f"{name} is of type {type(value).__name__}, which a checkpoint cannot hold: expected JSON values, tensors and "
        "arrays, dicts, lists and tuples of these, or an object with state_dict and load_state_dict"
    )


def decode(saved: JSON, fetch: Fetch) -> Any:
    """What `encode` was given; tensors are on the CPU. Raises: CheckpointError for what it did not write."""
    if isinstance(saved, list):
        return [decode(item, fetch) for item in saved]
    if not isinstance(saved, dict):
        return saved
    try:
        return _decoded(saved, fetch)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the checkpoint's state has {str(saved)[:80]}, which is nothing of ours: {error}"
        ) from error


def named(saved: JSON) -> Iterator[str]:
    """The names of the arrays that `decode` will fetch."""
    if isinstance(saved, list):
        for item in saved:
            yield from named(item)
    elif isinstance(saved, dict):
        for kind, inner in saved.items():
            if kind in ("tensor", "array", "raw") and isinstance(inner, str):
                yield inner
            elif kind in ("tuple", "dict", "counter", "scalar"):
                yield from named(inner)


def _decoded(saved: dict[str, JSON], fetch: Fetch) -> Any:
    if "raw" in saved:
        return _shaped(fetch(saved["raw"]), _described(saved["dtype"]), saved["shape"])
    ((kind, inner),) = saved.items()
    if kind == "tensor":
        return wrap(fetch(inner), CPU)
    if kind == "array":
        return fetch(inner)
    if kind == "scalar":
        return decode(inner, fetch)[()]
    if kind == "tuple":
        return tuple([decode(item, fetch) for item in inner])
    if kind in ("dict", "counter"):
        pairs = {decode(key, fetch): decode(item, fetch) for key, item in inner}
        return Counter(pairs) if kind == "counter" else pairs
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return base64.b64decode(inner)
    raise ValueError(f"no such kind: {kind}")


def _kept(array: Array, name: str, keep: Keep) -> JSON:
    if not isinstance(array, np.ndarray):
        array = device_of(array).xp.asarray(array)
    elif array.dtype.hasobject:
        raise ArgumentError(f"{name} is an array of Python objects, which a checkpoint cannot hold")
    if array.dtype in SUPPORTED:
        return {"array": keep(name, array, None)}
    raw = np.frombuffer(array.tobytes(), np.uint8)
    return {"raw": keep(name, raw, None), "dtype": _description(array.dtype, name), "shape": list(array.shape)}


def _shaped(raw: Array, dtype: np.dtype[Any], shape: JSON) -> Array:
    """The array whose bytes these are."""
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) >> 63:
        raise ValueError(f"{str(shape)[:80]} is no shape")
    return raw.view(dtype).reshape(shape) if dtype.itemsize else np.empty(shape, dtype)  # elements of nothing


def _description(dtype: np.dtype[Any], name: str) -> JSON:
    """What `_described` makes the same dtype of."""
    try:
        description = json.loads(json.dumps(dtype.str if dtype.names is None else dtype.descr))
        same = _described(description) == dtype
    except (TypeError, ValueError):  # fields that overlap, say; or a dtype that is not NumPy's own
        same = False
    if not same:
        raise ArgumentError(f"{name} is an array of dtype {dtype}, which a checkpoint cannot hold")
    return description


def _described(description: JSON) -> np.dtype[Any]:
    """The dtype of a description, whose tuples are lists. Raises: ValueError for what is none."""
    try:
        described: Any = description if isinstance(description, str) else _fields(description)
        dtype = np.lib.format.descr_to_dtype(described)
    except Exception as error:  # NumPy raises many kinds for a bad description
        raise ValueError(f"{str(description)[:80]} is no dtype: {error}") from None
    if dtype.hasobject:
        raise ValueError(f"{str(description)[:80]} is a dtype of Python objects")
    return dtype


def _fields(description: JSON) -> list[Any]:
    """[["a", "<i4"], ["b", [...], [2, 3]], ...] with the tuples that NumPy wants in it: (name, description, shape)."""
    if not isinstance(description, list):
        raise TypeError("expected a list of fields")
    fields = []
    for name, inner, *shape in description:
        name = tuple(name) if isinstance(name, list) else name  # (title, name)
        fields.append((name, inner if isinstance(inner, str) else _fields(inner), *map(tuple, shape)))
    return fields
