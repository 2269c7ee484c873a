"""Checks of arguments before arrays reach an op: dtypes, shapes, and whether windows fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._engine import modes
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import bfloat16, float16, float32, is_float
from ddp.errors import ArgumentError, DtypeError, ShapeError
from ddp.ops.convolution import Pair, Window, output_size

Size = int | Sequence[int]
_CAST = {float16, bfloat16, float32}  # the dtypes that autocast casts


def pair(value: Size, name: str) -> Pair:
    """Returns `numbers(value, 2, name)`, a tuple of two numbers. Raises: as `numbers`."""
    h, w = numbers(value, 2, name)
    return h, w


def numbers(value: Size | str, n: int, name: str) -> tuple[int, ...]:
    """Returns `n` numbers as a tuple: a sequence of `n`, or one number (alone or in a sequence), repeated `n` times.

    Raises: ArgumentError for a sequence of another length; DtypeError for a string.
    """
    if not isinstance(value, Sequence):
        return (value,) * n
    if isinstance(value, str):
        raise DtypeError(f"{name}: expected one number or {n}, got {value!r}")
    if len(value) == 1:
        return (value[0],) * n
    if len(value) != n:
        raise ArgumentError(f"{name}: expected one number or {n}, got {tuple(value)}")
    return tuple(value)


def one_dtype(name: str, *tensors: Tensor | None) -> None:
    """Checks that the given tensors have one dtype, or that autocast casts them to one. Raises: DtypeError if not."""
    dtypes = [x.dtype for x in tensors if x is not None]
    if any(dtype != dtypes[0] for dtype in dtypes) and not (modes.state.autocast and _CAST.issuperset(dtypes)):
        raise DtypeError(f"{name}: input, weight and bias need one dtype, got {', '.join(map(str, dtypes))}")


def window_of(
    name: str, image: Pair, kernel: Pair, stride: Any, padding: Any, dilation: Any, ceil: bool = False
) -> Window:
    """Makes a `Window` on the image, with the number of its positions. Raises: as `numbers` and `positions`."""
    stride = pair(stride, "stride")
    padding = pair(padding, "padding")
    dilation = pair(dilation, "dilation")
    h, w = positions(name, image, kernel, stride, padding, dilation, ceil)
    return Window(image, kernel, stride, padding, dilation, (h, w))


def positions(
    name: str,
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil: bool = False,
) -> list[int]:
    """Counts the positions of a window along each of its dimensions.

    Raises: ArgumentError for a kernel, stride or dilation below 1, or a negative padding; ShapeError if there is no
    position.
    """
    if min(*stride, *dilation, *kernel) < 1 or min(padding) < 0:
        raise ArgumentError(f"{name}: too small: {kernel=}, {stride=}, {padding=}, {dilation=}")
    sizes = [output_size(*along, ceil) for along in zip(image, kernel, stride, padding, dilation, strict=True)]
    if min(sizes) < 1:
        raise ShapeError(
            f"{name}: kernel {kernel} with dilation {dilation} does not fit images of {image} with padding {padding}"
        )
    return sizes


def affine_dtype(name: str, input: Tensor, *parameters: Tensor | None) -> None:
    """Raises: DtypeError unless `input` is floating and each parameter has its dtype (or float32, for 16-bit input)."""
    dtype = input.array.dtype
    if not is_float(dtype):
        raise DtypeError(f"{name}: expected a floating input, got {dtype}")
    for parameter in parameters:
        if (
            parameter is not None
            and parameter.array.dtype != dtype
            and (dtype.itemsize > 2 or parameter.array.dtype != "float32")
        ):
            raise DtypeError(f"{name}: input is {dtype}, weight or bias {parameter.dtype}; they need one dtype")


def check_channels(name: str, input: Tensor, *affine: Tensor | None, statistics: Sequence[Tensor | None] = ()) -> None:
    """Checks the shapes: (N, C, ...) of `input`, (C,) of `affine` and `statistics`. Also calls `affine_dtype`.

    Raises: ShapeError for another shape; DtypeError: see `affine_dtype`.
    """
    if input.ndim < 2:
        raise ShapeError(f"{name}: input {input.shape}: expected (N, C, ...)")
    for array in (*affine, *statistics):
        if array is not None and tuple(array.shape) != (input.shape[1],):
            raise ShapeError(
                f"{name}: input {input.shape} has {input.shape[1]} channels, got one of shape {array.shape}"
            )
    affine_dtype(name, input, *affine)
