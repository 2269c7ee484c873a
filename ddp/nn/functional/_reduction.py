"""What all losses share: the word for their reduction, and shapes that ought to be one."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from ddp._tensor.arithmetic import broadcast, convert, floating
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import promote
from ddp.errors import ArgumentError

WORDS = ("mean", "sum", "none")


def parsed(name: str, reduction: str, size_average: bool | None = None, reduce: bool | None = None) -> str:
    """One of `WORDS`, from the word, or from PyTorch's old pair of flags. Raises: ArgumentError for another word."""
    if size_average is not None or reduce is not None:
        average, reduces = size_average is None or size_average, reduce is None or reduce
        word = ("mean" if average else "sum") if reduces else "none"
        warnings.warn(f"{name}: size_average and reduce are deprecated, use reduction={word!r}", stacklevel=3)
        return word
    if reduction not in WORDS:
        raise ArgumentError(f"{name}: reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    return reduction


def reduced(losses: Any, reduction: str) -> Any:
    """The mean or the sum of the losses, or the losses."""
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def paired(name: str, input: Tensor, target: Tensor, warn: bool = False) -> tuple[Any, Any]:
    """Both in one shape and one floating dtype. warn: says so if the shapes were not the same.

    Raises: ShapeError if they do not broadcast.
    """
    a, b = input._array, target._array
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
                stacklevel=3,
            )
        broadcast(a.shape, b.shape, name)
        shape = np.broadcast_shapes(a.shape, b.shape)
        x, y = x.expand(shape), y.expand(shape)
    return floating(x), floating(y)
