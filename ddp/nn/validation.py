"""Checks of arguments before arrays reach an op: dtypes, shapes, windows that fit, how a loss is reduced."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ddp._engine import modes
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import bfloat16, float16, float32, is_float, promote
from ddp._tensor.operands import broadcast, convert, floating
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops.convolution import Pair, Window, output_size

Size = int | Sequence[int]
_CAST = {float16, bfloat16, float32}  # what autocast changes


def pair(value: Size, name: str) -> Pair:
    """(value, value) for a number, else the two of a sequence. Raises: ArgumentError for any other length."""
    h, w = numbers(value, 2, name)
    return h, w


def numbers(value: Size, n: int, name: str) -> tuple[int, ...]:
    """`n` times the number, else the `n` of a sequence. Raises: ArgumentError for any other length."""
    if not isinstance(value, Sequence):
        return (value,) * n
    if len(value) == 1:
        return (value[0],) * n
    if len(value) != n:
        raise ArgumentError(f"{name}: expected one number or {n}, got {tuple(value)}")
    return tuple(value)


def one_dtype(name: str, *tensors: Tensor | None) -> None:
    """Raises: DtypeError unless all given tensors have one dtype, or autocast is going to give them one."""
    dtypes = [x.dtype for x in tensors if x is not None]
    if any(dtype != dtypes[0] for dtype in dtypes) and not (modes.state.autocast and _CAST.issuperset(dtypes)):
        raise DtypeError(f"{name}: input, weight and bias need one dtype, got {', '.join(map(str, dtypes))}")


def window_of(
    name: str, image: Pair, kernel: Pair, stride: Any, padding: Any, dilation: Any, ceil: bool = False
) -> Window:
    """The window's positions on the image, if it fits. Raises: ArgumentError, ShapeError."""
    stride, padding, dilation = pair(stride, "stride"), pair(padding, "padding"), pair(dilation, "dilation")
    if min(*stride, *dilation, *kernel) < 1 or min(padding) < 0:
        raise ArgumentError(f"{name}: too small: {kernel=}, {stride=}, {padding=}, {dilation=}")
    h, w = (output_size(*each, ceil) for each in zip(image, kernel, stride, padding, dilation, strict=True))
    if h < 1 or w < 1:
        raise ShapeError(
            f"{name}: kernel {kernel} with dilation {dilation} does not fit images of {image} with padding {padding}"
        )
    return Window(image, kernel, stride, padding, dilation, (h, w))


def affine_dtype(name: str, input: Tensor, *parameters: Tensor | None) -> None:
    """Raises: DtypeError unless `input` is floating, and weight and bias are of its dtype, or float32 beside a half."""
    dtype = input.array.dtype
    if not is_float(dtype):
        raise DtypeError(f"{name}: expected a floating input, got {dtype}")
    for each in parameters:
        if each is not None and each.array.dtype != dtype and (dtype.itemsize > 2 or each.array.dtype != "float32"):
            raise DtypeError(f"{name}: input is {dtype}, weight or bias {each.dtype}; they need one dtype")


def check_channels(name: str, input: Tensor, *affine: Tensor | None, statistics: Sequence[Tensor | None] = ()) -> None:
    """Raises: ShapeError unless input is (N, C, ...) and the others are (C,); DtypeError as `affine_dtype`."""
    if input.ndim < 2:
        raise ShapeError(f"{name}: input {input.shape}: expected (N, C, ...)")
    for each in (*affine, *statistics):
        if each is not None and tuple(each.shape) != (input.shape[1],):
            raise ShapeError(
                f"{name}: input {input.shape} has {input.shape[1]} channels, got one of shape {each.shape}"
            )
    affine_dtype(name, input, *affine)


F = TypeVar("F", bound=Callable[..., Any])


def positional(names: str, also: str = "") -> Callable[[F], F]:
    """Lets a loss, or its class, take the arguments `names` by position, after those that it declares positional.

    PyTorch has its deprecated size_average and reduce among them; here they become a `reduction`. That of a function is
    checked: "mean", "sum", "none" or `also`. Raises: ArgumentError.
    """
    order = names.split()

    def decorate(function: F) -> F:
        code, is_class = function.__code__, function.__name__ == "__init__"
        count, at = code.co_argcount, code.co_varnames.index("reduction")

        @functools.wraps(function)
        def inner(*args: Any, **named: Any) -> Any:
            name = type(args[0]).__name__ if is_class else function.__name__
            if len(args) > count:
                if len(args) > count + len(order):
                    raise TypeError(f"{name}: at most {count + len(order)} positional arguments, got {len(args)}")
                named.update(zip(order, args[count:], strict=False))
                args = args[:count]
            average, reduce = named.pop("size_average", None), named.pop("reduce", None)
            if average is not None or reduce is not None:
                mean, reduced = average is None or average, reduce is None or reduce
                word = named["reduction"] = ("mean" if mean else "sum") if reduced else "none"
                warnings.warn(f"{name}: size_average and reduce are deprecated, use reduction={word!r}", stacklevel=2)
            word = named.get("reduction", args[at] if len(args) > at else "mean")
            if not is_class and word not in ("mean", "sum", "none", also):
                raise ArgumentError(f"{name}: reduction is 'mean', 'sum' or 'none', not {word!r}")
            return function(*args, **named)

        return cast(F, inner)

    return decorate


def reduce_losses(losses: Any, reduction: str) -> Any:
    """The mean or the sum of the losses, or the losses."""
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def broadcast_pair(name: str, input: Tensor, target: Tensor, warn: bool = False) -> tuple[Any, Any]:
    """Both in one shape and one floating dtype. warn: says so if the shapes were not the same.

    Raises: ShapeError if they do not broadcast.
    """
    a, b = input.array, target.array
    x: Any = input
    y: Any = target
    if a.dtype != b.dtype:
        dtype = promote(a.dtype, a.ndim, b.dtype, b.ndim)
        x, y = convert(input, dtype), convert(target, dtype)
    if a.shape != b.shape:
        if warn:
            warnings.warn(
                f"{name}: the target's size {b.shape} is different to the input's {a.shape}: they are broadcast, "
                "which is rarely what is meant; give them one size",
                stacklevel=5,
            )
        broadcast(a.shape, b.shape, name)
        shape = np.broadcast_shapes(a.shape, b.shape)
        x, y = x.expand(shape), y.expand(shape)
    return floating(x), floating(y)
