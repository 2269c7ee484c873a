"""The dtypes of results, by PyTorch's rules, as NumPy's dtype objects.

The categories are bool < integers < floats. A tensor and a Python number give the dtype of the tensor, unless the
number has a higher category. The same holds for a tensor with dimensions and a 0-d tensor. bfloat16 is the dtype of
ml_dtypes: its `kind` is "V" and its `name` "bfloat16", so use `is_float` to ask whether a dtype is floating.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ddp.errors import DtypeError

__all__ = ["bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"]
__all__ += ["can_cast", "finfo", "get_default_dtype", "iinfo", "promote_types", "set_default_dtype"]

Dtype = np.dtype[Any]
Number = bool | int | float

bool_ = np.dtype("bool")
uint8 = np.dtype("uint8")
int8 = np.dtype("int8")
int16 = np.dtype("int16")
int32 = np.dtype("int32")
int64 = np.dtype("int64")
float16 = np.dtype("float16")
bfloat16: Dtype = np.dtype(ml_dtypes.bfloat16)
float32 = np.dtype("float32")
float64 = np.dtype("float64")

_default = float32  # the default dtype of this process; see set_default_dtype
INTEGERS: frozenset[Dtype] = frozenset({uint8, int8, int16, int32, int64})
FLOATS: frozenset[Dtype] = frozenset({float16, bfloat16, float32, float64})
HALVES: frozenset[Dtype] = frozenset({float16, bfloat16})
SUPPORTED: frozenset[Dtype] = frozenset({bool_}) | INTEGERS | FLOATS
# The dtype of each tensor type, by its name: `ddp.LongTensor` has int64.
TYPES: dict[str, Dtype] = {
    "BoolTensor": bool_,
    "ByteTensor": uint8,
    "CharTensor": int8,
    "ShortTensor": int16,
    "IntTensor": int32,
    "LongTensor": int64,
    "HalfTensor": float16,
    "BFloat16Tensor": bfloat16,
    "FloatTensor": float32,
    "DoubleTensor": float64,
}
CATEGORY = dict.fromkeys(SUPPORTED, 0) | dict.fromkeys(INTEGERS, 1) | dict.fromkeys(FLOATS, 2)


def parse(dtype: Any) -> Dtype:
    """A supported dtype from `ddp.float32`, `np.float32`, "float32", float, int or bool.

    Raises: DtypeError for anything else.
    """
    if isinstance(dtype, np.dtype) and dtype in SUPPORTED:
        return dtype
    try:
        parsed = None if dtype is None else np.dtype(dtype)  # NumPy would read None as float64
    except (TypeError, ValueError):
        parsed = None
    if parsed is None or parsed not in SUPPORTED:
        raise DtypeError(f"dtype {dtype!r}: expected one of {', '.join(sorted(d.name for d in SUPPORTED))}")
    return parsed


def is_float(dtype: Dtype) -> bool:
    """Whether the dtype is floating, so that its tensors can require grad."""
    return dtype in FLOATS


def _join(a: Dtype, b: Dtype) -> Dtype:
    above = CATEGORY[a] - CATEGORY[b]
    if above:
        return a if above > 0 else b
    if a != b and a in HALVES and b in HALVES:
        return float32  # neither can hold all values of the other
    return np.promote_types(a, b)


_JOINED = {(a, b): _join(a, b) for a in SUPPORTED for b in SUPPORTED}


def promote(a: Dtype, a_dims: int, b: Dtype, b_dims: int) -> Dtype:
    """The dtype of an operation on two tensors of these dtypes and numbers of dimensions."""
    if a == b:
        return a
    if (a_dims == 0) != (b_dims == 0) and CATEGORY[a] == CATEGORY[b]:
        return a if a_dims else b
    return _JOINED[a, b]


def promote_scalar(dtype: Dtype, number: Number) -> Dtype:
    """The dtype of an operation on a tensor of `dtype` and a Python number."""
    if isinstance(number, float):
        return dtype if dtype in FLOATS else _default
    if dtype == bool_ and not isinstance(number, bool):
        return int64
    return dtype


def of_number(number: Number) -> Dtype:
    """The dtype of a tensor made of a Python number alone."""
    if isinstance(number, bool):
        return bool_
    return int64 if isinstance(number, int) else _default


def is_count(value: Any, least: int = 0) -> bool:
    """Whether `value` is an integer of at least `least`, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def promote_types(type1: Any, type2: Any) -> Dtype:
    """The smallest dtype that holds the values of both; for a float and an integer, the floating one."""
    return _JOINED[parse(type1), parse(type2)]


def can_cast(from_: Any, to: Any) -> bool:
    """Whether PyTorch's rules let an in-place op write a result of dtype `from_` into a tensor of dtype `to`.

    The rules allow bool into all dtypes, integers into all but bool, and floats into floats.
    """
    return CATEGORY[parse(from_)] <= CATEGORY[parse(to)]


def get_default_dtype() -> Dtype:
    """The dtype of tensors made of Python floats, or by functions such as zeros and rand, unless a dtype is given.

    float32 unless `set_default_dtype` was called.
    """
    return _default


def set_default_dtype(d: Any) -> None:
    """Sets the default dtype of this process: see `get_default_dtype`. Raises: DtypeError unless it is floating."""
    global _default
    dtype = parse(d)
    if dtype not in FLOATS:
        raise DtypeError(f"set_default_dtype: expected a floating dtype, got {dtype.name}")
    _default = dtype


class _Limits:
    __slots__: tuple[str, ...] = ()

    def __repr__(self) -> str:
        limits = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({limits})"


class finfo(_Limits):
    """The limits of a floating dtype, or of the default one.

    They are bits, eps, max, min, tiny, smallest_normal and resolution; `dtype` is the dtype's name. Raises: DtypeError
    for other dtypes.
    """

    __slots__ = ("bits", "dtype", "eps", "max", "min", "resolution", "smallest_normal", "tiny")

    def __init__(self, dtype: Any = None) -> None:
        dtype = _default if dtype is None else parse(dtype)
        if dtype not in FLOATS:
            raise DtypeError(f"finfo: expected a floating dtype, got {dtype.name}; iinfo has the limits of integers")
        limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]  # it has no annotations
        self.dtype = dtype.name
        self.bits = dtype.itemsize * 8
        self.eps = float(limits.eps)
        self.max = float(limits.max)
        self.min = float(limits.min)
        self.tiny = self.smallest_normal = float(limits.smallest_normal)
        self.resolution = 10.0**-limits.precision


class iinfo(_Limits):
    """The limits of an integer dtype: bits, max, min; `dtype` is its name. Raises: DtypeError for other dtypes."""

    __slots__ = ("bits", "dtype", "max", "min")

    def __init__(self, dtype: Any) -> None:
        dtype = parse(dtype)
        if dtype not in INTEGERS:
            raise DtypeError(f"iinfo: expected an integer dtype, got {dtype.name}; finfo has the limits of floats")
        limits = np.iinfo(dtype)
        self.dtype = dtype.name
        self.bits = limits.bits
        self.max = limits.max
        self.min = limits.min
