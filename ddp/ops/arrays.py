"""Array functions that the formulas of ops call.

An `array_function` can have its own kernel for each array module. The others convert dtypes, sum and reshape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import ml_dtypes
import numpy as np

Array = Any
Ints = tuple[int, ...]  # a shape, axes, lengths
ForwardResult = tuple[Array, Any]  # the result of an op, and the residual that its backward reads

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype("float32")
# The dtype characters of float16 and bfloat16.
_HALVES = "eE"

P = ParamSpec("P")
R = TypeVar("R")


class _Kernels(dict[Any, Callable[..., Any]]):
    """The kernels of one function: the item `np` for NumPy, the attributes `recording` and `device` (CuPy)."""

    device: Callable[..., Any]
    recording: Callable[..., Any]

    def __missing__(self, xp: Any) -> Callable[..., Any]:
        return self.recording if isinstance(xp, RecordingModule) else self.device


class RecordingModule:
    """An array module whose arrays record what is computed with them: see `ddp._tensor.recording`.

    module: the array module of the arrays inside the recording arrays
    """

    def __init__(self, module: Any) -> None:
        self.module = module


class ArrayFunction(Protocol[P, R]):
    """A function that chooses a kernel by its first argument, the array module.

    A kernel is an implementation of the function for one array module, like a kernel of an op: see `ddp.ops.op`.
    """

    __wrapped__: Callable[..., R]  # the reference

    def __call__(self, xp: Any, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def attach_device_kernel(self, kernel: Callable[..., R]) -> None:
        """Computes with `kernel` on a GPU from now on."""

    def attach_native_kernel(self, kernel: Callable[..., R]) -> None:
        """Computes with `kernel` on NumPy arrays from now on. It calls the reference if it does not support a case."""

    def attach_recording_kernel(self, kernel: Callable[..., R]) -> None:
        """Computes with `kernel` on recording arrays from now on: for a reference that is slow or cannot take them."""


def array_function(reference: Callable[Concatenate[Any, P], R]) -> ArrayFunction[P, R]:
    """Makes an `ArrayFunction` of its reference implementation. A call looks up the kernel for its array module.

    `ddp._cuda.register`, `ddp._native.register` and `ddp._tensor.create_graph` attach the other kernels. Where none is
    attached, the reference runs.
    """
    kernels = _Kernels({np: reference})
    kernels.device = kernels.recording = reference

    @functools.wraps(reference)
    def call(xp: Any, *args: Any, **kwargs: Any) -> Any:  # a function, because calls of an object take longer
        return kernels[xp](xp, *args, **kwargs)

    function: Any = call
    function.attach_device_kernel = functools.partial(setattr, kernels, "device")
    function.attach_native_kernel = functools.partial(kernels.__setitem__, np)
    function.attach_recording_kernel = functools.partial(setattr, kernels, "recording")
    typed: ArrayFunction[P, R] = function
    return typed


@array_function
def astype(xp: Any, x: Array, dtype: np.dtype[Any]) -> Array:
    """A copy of x in `dtype`."""
    return x.astype(dtype)


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype to compute in: float32 for 16-bit floats, which are too coarse to add up (see `total`)."""
    return _FLOAT32 if dtype.char in _HALVES else dtype


def upcast(x: Array | None) -> Any:
    """Converts an array of 16-bit floats to float32, so that a sum is rounded once. Returns anything else unchanged."""
    return x.astype(_FLOAT32) if x is not None and x.dtype.char in _HALVES else x


def from_bfloat16(xp: Any, x: Any) -> Any:
    """Converts a bfloat16 array to float32. Returns anything else, including float16 arrays, unchanged."""
    return astype(xp, x, _FLOAT32) if getattr(x, "dtype", None) is BFLOAT16 else x


def shape_of(x: Any) -> Ints:
    """The shape of an array, () for a Python scalar."""
    return getattr(x, "shape", ())


def as_rows(x: Array, axes: int) -> Array:
    """Reshapes x to (rows, n): n runs over its last `axes` axes."""
    if axes == 1 and x.ndim == 2:
        return x
    split = x.ndim - axes
    return x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:]))


def total(x: Array, axis: Any = None, keepdims: bool = False, *, keep_float32: bool = False) -> Array:
    """The sum of `x` over `axis`. Adds up float16 in float32, integers and bool in int64.

    keep_float32: returns the sum of float16 in float32.

    A running sum of ones in float16 stops at 2048: from there on, adding 1 changes nothing.
    """
    if x.dtype.char != "e":
        return x.sum(axis=axis, keepdims=keepdims, dtype="int64" if x.dtype.kind in "bu" else None)
    out = x.sum(axis=axis, keepdims=keepdims, dtype="float32")
    return out if keep_float32 else out.astype(x.dtype)


def unbroadcast(g: Array, shape: Ints) -> Array:
    """Sums `g` over the axes along which an array of `shape` was broadcast."""
    if g.shape == shape:
        return g
    extra = g.ndim - len(shape)
    axes = (*range(extra), *(extra + i for i, n in enumerate(shape) if n == 1 and g.shape[extra + i] != 1))
    return total(g, axes, keepdims=True).reshape(shape)


BITS = {size: np.dtype(f"int{8 * size}") for size in (1, 2, 4, 8)}


@array_function
def where_or_zero(xp: Any, mask: Array, g: Array) -> Array:
    """`g` where `mask` (bool), else 0, even if `g` is infinite or nan: the product g * 0 would be nan."""
    # Multiplies the bits of g, as integers, by 0 or 1. This is as fast as g * mask. NumPy's where() branches at every
    # element: it is ten times slower for a mask without a pattern. CuPy's where() makes float32 of bfloat16.
    return (g.view(BITS[g.dtype.itemsize]) * mask).view(g.dtype)


@array_function
def sum_of_squares(xp: Any, x: Array) -> Array:
    """The sum of the squares of a vector."""
    # The dot product makes no array of squares.
    result: Array = x.dot(x)
    return result


def unreduce(g: Array, shape: Ints, axes: Ints, keepdim: bool) -> Array:
    """Reshapes `g`, of the shape that a reduction over `axes` gives, so that it broadcasts to the input's `shape`."""
    if keepdim or not axes:
        return g
    return g.reshape([1 if i in axes else n for i, n in enumerate(shape)])
