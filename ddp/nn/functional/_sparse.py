"""Classes and rows by number, as functions."""

from __future__ import annotations

from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.watching import placed_by_any
from ddp.errors import ArgumentError, DtypeError, RangeError
from ddp.ops.cuda import bounds


@placed_by_any
def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """1 at the class number of each element, 0 elsewhere, int64. input: (...) of int64; result: (..., num_classes).

    num_classes: -1 takes the largest class + 1.

    Raises: DtypeError; RangeError for a class that is not there; ArgumentError if the number cannot be inferred.
    """
    array, xp = input._array, input.device.xp
    if array.dtype != "int64":
        raise DtypeError(f"one_hot: expected class numbers of int64, got {array.dtype}")
    if num_classes < 0 and (num_classes != -1 or not array.size):
        raise ArgumentError(f"one_hot: num_classes={num_classes} for shape {array.shape}: expected a number of classes")
    if num_classes >= 0 and input.device.type == "cuda":
        told = "one_hot: class {value} is not one of the {limit} classes 0 to {last}"
        array = bounds.checked(xp, array, 0, num_classes, RangeError, told)
        return wrap((array[..., None] == xp.arange(num_classes)).astype("int64"), input.device)
    if array.size and array.min() < 0:
        raise RangeError(f"one_hot: class {int(array.min())} is below 0")
    top = int(array.max()) + 1 if array.size else 0
    if num_classes == -1:
        num_classes = top
    elif top > num_classes:
        raise RangeError(f"one_hot: class {top - 1} is not one of the {num_classes} classes 0 to {num_classes - 1}")
    out = xp.zeros((array.size, num_classes), "int64")
    out[xp.arange(array.size), array.reshape(-1)] = 1
    return wrap(out.reshape(*array.shape, num_classes), input.device)
