"""Writing into tensors: what optimizers, initialisation and user code under no_grad need.

Autograd does not follow a write: on a tensor that it tracks one raises, outside no_grad, and names the form that is
followed. Every write counts in the version that all views share, so that backward notices a saved value that changed.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from ddp._device import generator, place
from ddp._engine import Node, modes
from ddp._tensor.arithmetic import REFUSED, broadcast, refusal
from ddp._tensor.base import TensorBase
from ddp._tensor.shaping import raw_index
from ddp.errors import DeviceError, DtypeError, InplaceError, RangeError, ShapeError

Other = Any
Self = TypeVar("Self", bound="InPlace")


def writable(x: TensorBase, name: str, *operands: Other) -> None:
    """Counts a write to `x`. Raises: InplaceError if autograd would have to follow it."""
    if modes.state.enabled:
        where = f"{name} on a tensor of shape {x._array.shape}"
        if isinstance(x._edge, Node):
            raise InplaceError(f"{where} that is in the graph: use the out-of-place form, such as x = x + y")
        if x._edge is not None:
            raise InplaceError(f"{where} that is a leaf and requires grad: wrap the call in ddp.no_grad()")
        if any(isinstance(y, TensorBase) and y._edge is not None for y in operands):
            raise InplaceError(f"{where}: the operand requires grad; use the out-of-place form, or detach() it")
    x._version.count += 1


def raw(x: TensorBase, y: Other, name: str) -> Any:
    """`y` as what can be written into `x`: a number, or an array on its device that broadcasts to its shape.

    Raises: ShapeError, DtypeError.
    """
    if isinstance(y, np.generic):
        y = y.item()
    if isinstance(y, bool | int | float):
        return y
    if isinstance(y, TensorBase):
        y = y._array
    elif not hasattr(y, "dtype"):
        raise DtypeError(f"{name}: expected a tensor, an array or a number, got {type(y).__name__}")
    shape = x._array.shape
    broadcast(shape, y.shape, name)
    if len(y.shape) > len(shape) or any(m != n and n != 1 for m, n in zip(shape[::-1], y.shape[::-1], strict=False)):
        raise ShapeError(f"{name}: shape {tuple(y.shape)} does not broadcast to {shape}")
    return place(y, x._device)


def _update(x: Self, name: str, ufunc: str, y: Other) -> Self:
    if isinstance(y, TensorBase) and y._device is not x._device:
        raise DeviceError(f"{name}: one tensor is on {x._device}, another on {y._device}")
    value = raw(x, y, name)
    writable(x, name, y)
    try:
        getattr(x._device.xp, ufunc)(x._array, value, out=x._array, casting="same_kind")
    except TypeError as error:
        raise DtypeError(f"{name}: the result does not fit a tensor of {x._array.dtype}") from error
    except (ValueError, OverflowError) as error:
        raise refusal(name, error) from error
    return x


class InPlace(TensorBase):
    """Methods that end in an underscore write into this tensor and return it.

    Raises: InplaceError on a tensor that autograd tracks, outside no_grad; ShapeError, DtypeError,
    DeviceError.
    """

    __slots__ = ()

    def add_(self: Self, other: Other, alpha: float = 1) -> Self:
        """self += alpha * other."""
        return _update(self, "add_", "add", other if alpha == 1 else other * alpha)

    def sub_(self: Self, other: Other, alpha: float = 1) -> Self:
        """self -= alpha * other."""
        return _update(self, "sub_", "subtract", other if alpha == 1 else other * alpha)

    def mul_(self: Self, other: Other) -> Self:
        """self *= other."""
        return _update(self, "mul_", "multiply", other)

    def div_(self: Self, other: Other) -> Self:
        """self /= other."""
        return _update(self, "div_", "true_divide", other)

    def __iadd__(self: Self, other: Other) -> Self:
        return self.add_(other)

    def __isub__(self: Self, other: Other) -> Self:
        return self.sub_(other)

    def __imul__(self: Self, other: Other) -> Self:
        return self.mul_(other)

    def __itruediv__(self: Self, other: Other) -> Self:
        return self.div_(other)

    def copy_(self: Self, source: Other) -> Self:
        """The elements of `source`, broadcast and cast to this dtype."""
        value = raw(self, source, "copy_")
        writable(self, "copy_", source)
        try:
            self._array[...] = value
        except REFUSED as error:
            raise refusal("copy_", error) from error
        return self

    def fill_(self: Self, value: float) -> Self:
        """Every element becomes `value`."""
        writable(self, "fill_")
        try:
            self._array.fill(value)
        except REFUSED as error:
            raise refusal("fill_", error) from error
        return self

    def zero_(self: Self) -> Self:
        """Every element becomes 0."""
        writable(self, "zero_")
        self._array.fill(0)
        return self

    def uniform_(self: Self, low: float = 0.0, high: float = 1.0) -> Self:
        """Random numbers, uniform in [low, high)."""
        writable(self, "uniform_")
        # In float64, so that one seed gives the same weights, rounded, in every dtype.
        self._array[...] = generator(self._device).random(self._array.shape) * (high - low) + low
        return self

    def normal_(self: Self, mean: float = 0.0, std: float = 1.0) -> Self:
        """Random numbers, normally distributed."""
        writable(self, "normal_")
        self._array[...] = generator(self._device).standard_normal(self._array.shape) * std + mean
        return self

    def __setitem__(self, where: Any, value: Other) -> None:
        selects, rest = raw_index(where, self._device.xp)
        source = place(value._array, self._device) if isinstance(value, TensorBase) else value
        writable(self, "x[index] = value", value)
        try:
            (self._array if selects is None else self._array[selects])[rest] = source
        except IndexError as error:
            raise RangeError(f"x[index] = value on a tensor of shape {self._array.shape}: {error}") from error
        except (TypeError, OverflowError) as error:
            raise refusal("x[index] = value", error) from error
        except ValueError as error:
            raise ShapeError(f"x[index] = value on a tensor of shape {self._array.shape}: {error}") from error
