"""What tensors are made of: numbers, nested lists and other libraries' arrays, as arrays of a supported dtype.

Python floats become float32, integers int64, and arrays keep their dtype, as in PyTorch.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ddp import _device
from ddp._device import CPU, place
from ddp._tensor import capsules
from ddp._tensor.base import TensorBase
from ddp._tensor.dtypes import (
    INTEGERS,
    bfloat16,
    float32,
    float64,
    get_default_dtype,
    iinfo,
    of_number,
    parse,
    promote_types,
)
from ddp.errors import ArgumentError, ShapeError


def cast(array: Any, kind: np.dtype[Any]) -> Any:
    """`array` in `kind`; the same array if it has it. What does not fit becomes infinite, or wraps around."""
    if array.dtype == kind:
        return array
    with np.errstate(all="ignore"):
        return array.astype(kind)


def array_of(data: Any, dtype: Any, name: str) -> tuple[Any, bool]:
    """`data` as an array of a supported dtype, and whether it is new: of an array or tensor it may be the same."""
    if isinstance(data, bool | int | float) and not isinstance(data, np.generic):
        kind = of_number(data) if dtype is None else parse(dtype)
        if kind in INTEGERS and math.isfinite(data):
            data = int(data)
        try:
            with np.errstate(over="ignore"):
                return np.array(data, kind), True
        except (OverflowError, ValueError) as error:
            raise ArgumentError(f"{name}: {data} does not fit {kind}") from error
    if isinstance(data, TensorBase):
        array = data.array
    elif isinstance(data, np.ndarray):
        array = data if type(data) is np.ndarray else data.view(np.ndarray)
    elif hasattr(data, "__dlpack__") and capsules.is_bfloat16(data):
        array = capsules.shared(data, capsules.home(data))  # of all ways, this one has a name for it
    elif hasattr(data, "__cuda_array_interface__"):
        array = _device.imported(data)
    elif hasattr(data, "__array__") or hasattr(data, "__array_interface__"):
        array = np.asarray(data)
    else:
        return _of_sequence(data, dtype, name), True
    kind = parse(array.dtype if dtype is None else dtype)
    return cast(array, kind), array.dtype != kind or isinstance(data, np.generic)


def _of_sequence(data: Any, dtype: Any, name: str) -> Any:
    """A new array of nested lists of numbers, arrays and tensors."""
    if isinstance(data, list | tuple):
        kinds = _kinds(data)
        if any(hasattr(kind, "dtype") for kind in kinds):
            found: set[np.dtype[Any]] = set()
            data = _bare(data, found)
            if dtype is None:
                dtype = functools.reduce(promote_types, found)
    try:
        array = np.array(data)
    except ValueError as error:
        raise ShapeError(f"{name}: the nested lists are ragged: {error}") from error
    if dtype is None:
        return cast(array, get_default_dtype() if array.dtype == float64 else parse(array.dtype))
    kind = parse(dtype)
    parse(array.dtype)
    if kind in INTEGERS and array.size:
        limits, low, high = iinfo(kind), array.min(), array.max()
        if not (low >= limits.min and high <= limits.max):
            raise ArgumentError(f"{name}: {low if not low >= limits.min else high} does not fit {kind}")
    return cast(array, kind)


def _kinds(data: Any) -> set[type]:
    """The types of what is in nested lists."""
    kinds = set(map(type, data))
    if any(issubclass(kind, list | tuple) for kind in kinds):
        for part in data:
            if isinstance(part, list | tuple):
                kinds |= _kinds(part)
    return kinds


def _bare(data: Any, found: set[np.dtype[Any]]) -> Any:
    """Nested lists with arrays in the place of tensors; the dtype that each element would have goes to `found`."""
    if isinstance(data, list | tuple):
        return [_bare(part, found) for part in data]
    found.add(data.dtype if hasattr(data, "dtype") else of_number(data))
    array = place(data.array, CPU) if isinstance(data, TensorBase) else data
    return array.astype(float32) if getattr(array, "dtype", None) == bfloat16 else array  # NumPy mixes it with no other
