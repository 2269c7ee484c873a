"""Converts the operands of an op to one dtype and to tensors. Also lets functions take NumPy's names of arguments."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from ddp._device import on, to_device
from ddp._tensor.base import Tensor, TensorBase, apply, copy_if_needed, guarded_run, needs_guard, to_common_device, wrap
from ddp._tensor.dtypes import SUPPORTED, Dtype, Number, get_default_dtype, is_float, promote, promote_scalar
from ddp.errors import ArgumentError, DdpError, DtypeError, ShapeError
from ddp.ops import elementwise as ops
from ddp.ops.arrays import BFLOAT16, Ints, from_bfloat16
from ddp.ops.op import Op

Other = Any  # a tensor, a Python number, or an array


def convert(x: TensorBase, dtype: Dtype) -> TensorBase:
    """Converts `x` to `dtype`; returns the same tensor if it has that dtype."""
    return x if x.array.dtype == dtype else apply(ops.cast, (x,), dtype=dtype)


def array_as_tensor(x: TensorBase, y: Other) -> Tensor | None:
    """Converts an array `y` to a tensor on the device of `x`; None if `y` is not an array of a supported dtype."""
    if not hasattr(y, "dtype") or y.dtype not in SUPPORTED:
        return None
    return wrap(to_device(copy_if_needed(y, x), x._device), x._device)


def as_ddp_error(name: str, error: Exception) -> DdpError:
    """Turns an error of the array module into ours: a TypeError into a DtypeError, others into an ArgumentError."""
    return (DtypeError if isinstance(error, TypeError) else ArgumentError)(f"{name}: {error}")


REJECTED = (TypeError, ValueError, OverflowError)  # raised for bool - bool, integer ** -1, uint8 + 300


def promote_pair(x: TensorBase, y: Other, name: str, floating: bool = False) -> tuple[TensorBase, Any] | None:
    """Converts `x` and `y` to the dtype of their result; returns None if `y` is not a number, tensor or array.

    floating: integers become the default dtype, as in a true division. Raises: ShapeError if they do not broadcast.
    """
    if isinstance(y, np.generic):
        y = y.item()  # a NumPy scalar counts as a number; its float64 must not widen the result
    if isinstance(y, Number):
        dtype = promote_scalar(x.array.dtype, y)
        if floating and not is_float(dtype):
            dtype = get_default_dtype()
        return convert(x, dtype), y
    if not isinstance(y, TensorBase):
        y = array_as_tensor(x, y)
        if y is None:
            return None
    a = x.array
    b = y.array
    if a.shape != b.shape:
        broadcast(a.shape, b.shape, name)
    if a.dtype == b.dtype and not floating:
        return x, y
    dtype = promote(a.dtype, a.ndim, b.dtype, b.ndim)
    if floating and not is_float(dtype):
        dtype = get_default_dtype()
    return convert(x, dtype), convert(y, dtype)


def broadcast(a: Ints, b: Ints, name: str) -> None:
    """Checks that two shapes broadcast. Raises: ShapeError if they do not."""
    for i, (m, n) in enumerate(zip(reversed(a), reversed(b), strict=False), 1):
        if m != n and m != 1 and n != 1:
            raise ShapeError(f"{name}: shapes {a} and {b} do not broadcast: {m} and {n} differ in dimension {-i}")


def floating(x: TensorBase) -> TensorBase:
    """Converts integers and bool to the default dtype, for functions such as exp and softmax."""
    return x if is_float(x.array.dtype) else convert(x, get_default_dtype())


def binary(op: Op, x: TensorBase, y: Other, swap: bool = False, floating: bool = False, **parameters: Any) -> Any:
    """Computes op(x, y), or op(y, x) with `swap`; returns NotImplemented if `y` is not a number, tensor or array."""
    pair = promote_pair(x, y, op.name, floating)
    if pair is None:
        return NotImplemented
    try:
        return apply(op, pair[::-1] if swap else pair, **parameters)
    except DdpError:
        raise
    except REJECTED as error:
        raise as_ddp_error(op.name, error) from error


def compare(name: str, x: TensorBase, y: Other, swap: bool = False) -> Any:
    """Calls the array module's function `name`, which returns bool or integers: the result is outside the graph.

    Returns NotImplemented if `y` is not a number, tensor or array.
    """
    pair = promote_pair(x, y, name)
    if pair is None:
        return NotImplemented
    a, b = pair
    if a.array.dtype.kind == "b" and name in ("left_shift", "right_shift"):
        raise DtypeError(f"{name}: expected integers, got bool")
    if isinstance(b, TensorBase) and b._device is not a._device:
        a, b = to_common_device(name, pair)
    device = a._device
    if device.watched and needs_guard(device):
        return guarded_run(name, device, (a.array,), partial(compare, name, a, b, swap))
    xp = device.xp
    operands = a.array, b.array if isinstance(b, TensorBase) else b
    try:
        if a.array.dtype is BFLOAT16:  # CuPy may be unable to compare bfloat16; a number is rounded to bfloat16
            operand = b.array if isinstance(b, TensorBase) else float(BFLOAT16.type(b))
            operands = from_bfloat16(xp, a.array), from_bfloat16(xp, operand)
        with np.errstate(invalid="ignore"):  # a comparison with nan is not an error
            left, right = operands[::-1] if swap else operands
            out = getattr(xp, name)(left, right)
    except REJECTED as error:
        raise as_ddp_error(name, error) from error
    return wrap(xp.asarray(out), device)


def check_operand(result: Any, name: str, y: Other) -> Tensor:
    """Returns `result`, which is NotImplemented or None if `y` was not accepted.

    Raises: DtypeError in that case: unlike an operator, a named function has no reflected form to try.
    """
    if result is NotImplemented or result is None:
        raise DtypeError(f"{name}: expected a tensor, an array or a number, got {type(y).__name__}")
    return result


def operand_as_tensor(y: Other, x: Any, name: str = "operand") -> Any:
    """Converts a number or an array to a tensor. A number becomes 0-d, of the dtype that an op on it and `x` gives.

    Raises: DtypeError for anything else, or if `x` is not a tensor; ArgumentError if the dtype cannot hold the number.
    """
    if isinstance(y, TensorBase):
        return y
    if isinstance(y, np.generic):
        y = y.item()
    if isinstance(y, Number) and isinstance(x, TensorBase):
        dtype = promote_scalar(x.array.dtype, y)
        try:
            with on(x._device):
                return wrap(x._device.xp.asarray(y, dtype), x._device)
        except REJECTED as error:
            raise as_ddp_error("number", error) from error
    return check_operand(array_as_tensor(x, y) if isinstance(x, TensorBase) else None, name, y)


def check_tensor(name: str, x: Any) -> None:
    """Checks that `x`, the input of `name`, is a Tensor. Raises: DtypeError if not."""
    if not isinstance(x, TensorBase):
        raise DtypeError(f"{name}: input is a Tensor, not {type(x).__name__}")


def promote_all(name: str, *tensors: TensorBase) -> list[TensorBase]:
    """Converts tensors to the dtype of their common result.

    Raises: ShapeError if they do not broadcast; DtypeError if any but the first is not a tensor.
    """
    first = tensors[0]
    dtype = first.array.dtype
    dims = first.array.ndim
    shape = first.array.shape
    for x in tensors[1:]:
        if not isinstance(x, TensorBase):
            raise DtypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        broadcast(shape, x.array.shape, name)
        shape = np.broadcast_shapes(shape, x.array.shape)
        dtype = promote(dtype, dims, x.array.dtype, x.array.ndim)
        dims = max(dims, x.array.ndim)
    return [convert(x, dtype) for x in tensors]


def parse_int(value: Any, name: str, argument: str) -> int:
    """Converts an integer of any type, an argument of `name`, to an int. Raises: DtypeError for anything else."""
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        raise DtypeError(f"{name}: {argument} is an integer, not {value!r}") from None


def as_sequence(value: Any) -> Sequence[Any]:
    """Returns `value` if it is a sequence, else (value,): dimensions may be given as one number."""
    return value if isinstance(value, Sequence) else (value,)


def is_index(value: Any) -> bool:
    """Whether `value` stands for one integer: an int, a NumPy integer or a 0-d tensor, not a sequence of them."""
    return hasattr(type(value), "__index__") and not getattr(value, "ndim", 0)


def parse_sizes(sizes: tuple[Any, ...], named: Any = None) -> Ints:
    """Reads sizes given one by one, as a sequence, or by name: reshape(2, 3), reshape((2, 3)), reshape(shape=(2, 3)).

    Raises: DtypeError if a size is not an integer; ArgumentError if sizes are given both by position and by name.
    """
    if named is not None:
        if sizes:
            raise ArgumentError(f"sizes {sizes} and, by name, {named}: expected one of them")
        sizes = (named,)
    if len(sizes) == 1 and not is_index(sizes[0]):
        sizes = sizes[0]
    try:
        return tuple(map(operator.index, sizes))
    except (TypeError, ValueError):
        raise DtypeError(f"expected integers, or a sequence of them, got {sizes!r}") from None


def as_method(function: Any, name: str, doc: str | None, wrapped: Any = None) -> Any:
    """Gives `function` its public name as a method of `Tensor`, by which it is pickled and shown in tracebacks."""
    function.__name__ = name
    function.__code__ = function.__code__.replace(co_name=name)
    function.__qualname__ = f"Tensor.{name}"
    function.__module__ = "ddp._tensor.core"
    function.__doc__ = doc
    if wrapped is not None:
        function.__wrapped__ = wrapped
    return function


F = TypeVar("F", bound=Callable[..., Any])

_OURS = {"axis": "dim", "keepdims": "keepdim"}


def numpy_names(function: F) -> F:
    """Lets a function that has the arguments dim and keepdim also take NumPy's names for them: axis and keepdims.

    Raises: ArgumentError if one argument is given by both names.
    """

    @functools.wraps(function)
    def also(*given: Any, **named: Any) -> Any:
        if named and not _OURS.keys().isdisjoint(named):
            for numpy_name, name in _OURS.items():
                if numpy_name in named:
                    if name in named:
                        raise ArgumentError(f"{function.__name__}: {numpy_name} and {name} are one argument")
                    named[name] = named.pop(numpy_name)
        return function(*given, **named)

    return cast(F, also)
