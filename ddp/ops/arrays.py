"""What formulas on arrays use beside the array module: functions that have forms of their own, dtypes, sums, shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import ml_dtypes
import numpy as np

Array = Any
Ints = tuple[int, ...]  # a shape, axes, lengths
ForwardResult = tuple[Array, Any]  # of an op: its result, and the residual that its backward reads

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype("float32")
# The dtype characters of float16 and bfloat16.
_HALVES = "eE"

P = ParamSpec("P")
R = TypeVar("R")


class _Forms(dict[Any, Callable[..., Any]]):
    """The forms of one function by array module: NumPy's, and for every other module the device form."""

    device: Callable[..., Any]
    recording: Callable[..., Any]

    def __missing__(self, xp: Any) -> Callable[..., Any]:
        return self.recording if isinstance(xp, RecordingModule) else self.device


class RecordingModule:
    """An array module whose arrays record what is computed with them: see `ddp._tensor.recording`.

    module: that of the arrays in them
    """

    def __init__(self, module: Any) -> None:
        self.module = module


class ArrayFunction(Protocol[P, R]):
    """A function whose first argument is the array module, and which may be computed in another way on a device."""

    __wrapped__: Callable[..., R]  # the reference

    def __call__(self, xp: Any, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def attach_device_form(self, form: Callable[..., R]) -> None:
        """Computes with `form` on devices from now on."""

    def attach_native_form(self, form: Callable[..., R]) -> None:
        """Computes with `form` on NumPy's arrays from now on; what it cannot take it hands on to the reference."""

    def attach_recording_form(self, form: Callable[..., R]) -> None:
        """Computes with `form` on recording arrays from now on: where the reference cannot, or is slow."""


def array_function(reference: Callable[Concatenate[Any, P], R]) -> ArrayFunction[P, R]:
    """Makes a reference an `ArrayFunction`, whose form is looked up by the array module.

    `ddp._cuda.register`, `ddp._native.register` and `ddp._tensor.create_graph` attach the others; without one, the
    reference runs everywhere.
    """
    forms = _Forms({np: reference})
    forms.device = forms.recording = reference

    @functools.wraps(reference)
    def call(xp: Any, *args: Any, **kwargs: Any) -> Any:  # a function: calls of an object take twice as long
        return forms[xp](xp, *args, **kwargs)

    function: Any = call
    function.attach_device_form = functools.partial(setattr, forms, "device")
    function.attach_native_form = functools.partial(forms.__setitem__, np)
    function.attach_recording_form = functools.partial(setattr, forms, "recording")
    typed: ArrayFunction[P, R] = function
    return typed


@array_function
def astype(xp: Any, x: Array, dtype: np.dtype[Any]) -> Array:
    """A copy of x in that dtype."""
    return x.astype(dtype)


def upcast(x: Any) -> Any:
    """A bfloat16 array in float32; anything else as it is."""
    return x.astype(_FLOAT32) if getattr(x, "dtype", None) is BFLOAT16 else x


def compute_dtype(x: Array) -> np.dtype[Any]:
    """The dtype to compute in: float32 for 16-bit floats, which are too coarse to add up (see `total`)."""
    return _FLOAT32 if x.dtype.char in _HALVES else x.dtype


def as_float32(*arrays: Array | None) -> list[Any]:
    """The arrays with 16-bit floats as float32, so that each sum is rounded once; None stays None."""
    return [x.astype(_FLOAT32) if x is not None and x.dtype.char in _HALVES else x for x in arrays]


def shape_of(x: Any) -> Ints:
    """The shape of an array, () for a Python scalar."""
    return getattr(x, "shape", ())


def as_rows(x: Array, axes: int) -> Array:
    """x as (rows, n), its last `axes` axes taken together."""
    if axes == 1 and x.ndim == 2:
        return x
    split = x.ndim - axes
    return x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:]))


def total(x: Array, axis: Any = None, keepdims: bool = False, *, keep_float32: bool = False) -> Array:
    """The sum of `x` over `axis`. float16 is added up in float32, and stays so with `keep_float32`; integers in int64.

    A running sum in float16 stands still at 2048: from there on, adding 1 changes nothing.
    """
    if x.dtype.char != "e":
        return x.sum(axis=axis, keepdims=keepdims, dtype="int64" if x.dtype.kind in "bu" else None)
    out = x.sum(axis=axis, keepdims=keepdims, dtype="float32")
    return out if keep_float32 else out.astype(x.dtype)


def unbroadcast(g: Array, shape: Ints) -> Array:
    """`g` summed over the axes along which something of `shape` was broadcast."""
    if g.shape == shape:
        return g
    extra = g.ndim - len(shape)
    axes = (*range(extra), *(extra + i for i, n in enumerate(shape) if n == 1 and g.shape[extra + i] != 1))
    return total(g, axes, keepdims=True).reshape(shape)


BITS = {size: np.dtype(f"int{8 * size}") for size in (1, 2, 4, 8)}


@array_function
def where_or_zero(xp: Any, mask: Array, g: Array) -> Array:
    """`g` where `mask` (bool), else 0, also for infinite `g` and nan: a product would make nan of these."""
    # The bits of g as integers, times 0 or 1: as fast as g * mask, where NumPy's where() is ten times slower because it
    # branches at every element of a mask without a pattern, and CuPy's makes float32 of bfloat16.
    return (g.view(BITS[g.dtype.itemsize]) * mask).view(g.dtype)


@array_function
def sum_of_squares(xp: Any, x: Array) -> Array:
    """The sum of x*x of a vector."""
    # The product makes no array of squares.
    result: Array = x.dot(x)
    return result


def unreduce(g: Array, shape: Ints, axes: Ints, keepdim: bool) -> Array:
    """`g`, the gradient of a reduction over `axes` of something of `shape`, with the reduced axes back as ones."""
    if keepdim or not axes:
        return g
    return g.reshape([1 if i in axes else n for i, n in enumerate(shape)])
