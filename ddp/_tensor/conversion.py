"""Tensors in another dtype or on another device; gradients pass through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp import _engine
from ddp._device import CPU, device, device_of, place
from ddp._engine import Node
from ddp._tensor import dtypes
from ddp._tensor.arithmetic import convert
from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.dtypes import parse
from ddp.errors import DtypeError
from ddp.ops import elementwise

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor

Flag = bool  # the names, where a method `bool` or a parameter `device` hides them
_Device = device
_convert: Any = convert  # returns a Tensor, which it knows only as its base

_TYPES = {  # PyTorch's old names of dtypes
    "BoolTensor": dtypes.bool_,
    "ByteTensor": dtypes.uint8,
    "CharTensor": dtypes.int8,
    "ShortTensor": dtypes.int16,
    "IntTensor": dtypes.int32,
    "LongTensor": dtypes.int64,
    "HalfTensor": dtypes.float16,
    "BFloat16Tensor": dtypes.bfloat16,
    "FloatTensor": dtypes.float32,
    "DoubleTensor": dtypes.float64,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class Conversion(TensorBase):
    """`to` and its short forms. Each returns the tensor itself where there is nothing to do."""

    __slots__ = ()

    def to(
        self, *target: Any, dtype: Any = None, device: Any = None, non_blocking: Flag = False, copy: Flag = False
    ) -> Tensor:
        """In another dtype, on another device, or both: to("cuda:0"), to(ddp.float64), to(other_tensor).

        copy: a copy even if nothing changes. non_blocking: accepted, and changes nothing: copies to a GPU are ordered
        with its work anyway, and copies from it must be there when read. Both may follow by position, in that order.
        Raises: DtypeError, DeviceError.
        """
        flags = [each for each in target if isinstance(each, bool)]
        for each in target:
            if isinstance(each, TensorBase):
                dtype, device = each._array.dtype, each._device
            elif isinstance(each, bool) or each is None:
                continue
            elif isinstance(each, _Device | int) or (isinstance(each, str) and each[:4] in ("cpu", "cpu:", "cuda")):
                device = each
            else:
                dtype = each
        x: Any = self
        if dtype is not None:
            x = convert(x, parse(dtype))
        if device is not None:
            where = _Device(device)
            if where is not x._device and not (where.index is None and where.type == x._device.type):
                x = transfer(x, where)
        return apply(elementwise.clone, (x,)) if x is self and (copy or flags[1:] == [True]) else x

    def cpu(self) -> Tensor:
        """On the CPU."""
        return self.to(device=CPU)

    def cuda(self, device: Any = None, non_blocking: Flag = False) -> Tensor:
        """On a CUDA device. Raises: DeviceError if there is none."""
        return self.to(device=_Device("cuda") if device is None else _Device(device))

    def pin_memory(self) -> Tensor:
        """This tensor: CuPy stages copies to a GPU itself, and nothing needs to be pinned before."""
        return self.to()

    def type(self, dtype: Any = None, non_blocking: Flag = False) -> Any:
        """In another dtype; without one, the name of the type: "ddp.FloatTensor"."""
        place_ = "ddp." if self._device is CPU else "ddp.cuda."
        if dtype is None:
            return place_ + _NAMES[self._array.dtype]
        if isinstance(dtype, str) and dtype.endswith("Tensor"):
            name = dtype.rpartition(".")[2]
            if name not in _TYPES:
                raise DtypeError(f"type: {dtype!r}: expected one of {', '.join(_TYPES)}")
            return self.to(device="cuda" if ".cuda." in dtype else CPU, dtype=_TYPES[name])
        return self.to(dtype=dtype)

    def type_as(self, other: TensorBase) -> Tensor:
        """In the dtype and on the device of `other`."""
        return self.to(other)

    def half(self) -> Tensor:
        """As float16."""
        return _convert(self, dtypes.float16)

    def bfloat16(self) -> Tensor:
        """As bfloat16."""
        return _convert(self, dtypes.bfloat16)

    def float(self) -> Tensor:
        """As float32."""
        return _convert(self, dtypes.float32)

    def double(self) -> Tensor:
        """As float64."""
        return _convert(self, dtypes.float64)

    def byte(self) -> Tensor:
        """As uint8."""
        return _convert(self, dtypes.uint8)

    def char(self) -> Tensor:
        """As int8."""
        return _convert(self, dtypes.int8)

    def short(self) -> Tensor:
        """As int16."""
        return _convert(self, dtypes.int16)

    def int(self) -> Tensor:
        """As int32."""
        return _convert(self, dtypes.int32)

    def long(self) -> Tensor:
        """As int64."""
        return _convert(self, dtypes.int64)

    def bool(self) -> Tensor:
        """As bool: whether each element is non-zero."""
        return _convert(self, dtypes.bool_)


def transfer(x: TensorBase, where: device) -> Tensor:
    """`x` on `where`; its gradient travels back."""
    result = wrap(place(x._array, where), where)
    result._device = device_of(result._array)
    if x._edge is not None and _engine.is_grad_enabled():
        result._edge = Node(elementwise.transfer, where.xp, (x._edge,), (True,), (), (), x._device)
    return result
