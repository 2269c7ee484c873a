"""Which dtype a result has: PyTorch's rules, on NumPy's dtype objects.

Python numbers never widen a tensor of their own category or a higher one; neither does a 0-d tensor beside one with
dimensions. bool < integers < floats are the categories.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp.errors import DtypeError

bool_ = np.dtype("bool")
uint8 = np.dtype("uint8")
int8 = np.dtype("int8")
int16 = np.dtype("int16")
int32 = np.dtype("int32")
int64 = np.dtype("int64")
float16 = np.dtype("float16")
float32 = np.dtype("float32")
float64 = np.dtype("float64")

DEFAULT = float32
SUPPORTED = frozenset({bool_, uint8, int8, int16, int32, int64, float16, float32, float64})
_CATEGORY = {"b": 0, "i": 1, "u": 1, "f": 2}


def parse(dtype: Any) -> np.dtype[Any]:
    """A supported dtype from `ddp.float32`, `np.float32`, "float32", float, int or bool.

    Raises: DtypeError for anything else.
    """
    try:
        found = None if dtype is None else np.dtype(dtype)  # NumPy would read None as float64
    except TypeError:
        found = None
    if found is None or found not in SUPPORTED:
        raise DtypeError(f"dtype {dtype!r}: expected one of {', '.join(sorted(d.name for d in SUPPORTED))}")
    return found


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether tensors of this dtype can require grad."""
    return dtype.kind == "f"


def promote(a: np.dtype[Any], a_dims: int, b: np.dtype[Any], b_dims: int) -> np.dtype[Any]:
    """The dtype of an operation on two tensors of these dtypes and numbers of dimensions."""
    if a == b:
        return a
    above = _CATEGORY[a.kind] - _CATEGORY[b.kind]
    if above:
        return a if above > 0 else b
    if (a_dims == 0) != (b_dims == 0):
        return a if a_dims else b
    return np.promote_types(a, b)


def promote_scalar(dtype: np.dtype[Any], number: bool | int | float) -> np.dtype[Any]:
    """The dtype of an operation on a tensor of `dtype` and a Python number."""
    if isinstance(number, float):
        return dtype if dtype.kind == "f" else DEFAULT
    if dtype.kind == "b" and not isinstance(number, bool):
        return int64
    return dtype
