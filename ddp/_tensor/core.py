"""`Tensor`: an array that remembers where it came from. Its mathematics is in the mixins, one family a file."""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import numpy as np

from ddp import _engine
from ddp._device import CPU, device, device_of, place
from ddp._engine import Node
from ddp._tensor import base
from ddp._tensor.arithmetic import Arithmetic, convert
from ddp._tensor.base import TensorBase, apply, wrap
from ddp._tensor.dtypes import DEFAULT, bool_, float16, float32, float64, int32, int64, parse
from ddp._tensor.gradients import Gradients
from ddp._tensor.inplace import InPlace
from ddp._tensor.reductions import Reductions
from ddp._tensor.shaping import Shaping
from ddp.errors import ArgumentError, DeviceError, GraphError, ShapeError
from ddp.ops import elementwise

T = TypeVar("T", bound="Tensor")


class Tensor(Gradients, Arithmetic, Reductions, Shaping, InPlace):
    """A multi-dimensional array with a gradient. Made by `ddp.tensor` and the other creation functions.

    shape: a tuple of sizes. dtype: float16, float32, float64, an integer or bool. device: where the memory is.
    """

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions."""
        return self._array.shape

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dimension."""
        return self._array.shape if dim is None else self._array.shape[dim]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._array.ndim

    def dim(self) -> int:
        """The number of dimensions."""
        return self._array.ndim

    def numel(self) -> int:
        """The number of elements."""
        return self._array.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""
        return self._array.dtype

    @property
    def device(self) -> device:
        """Where the memory is."""
        return self._device

    def is_floating_point(self) -> bool:
        """Whether the dtype is floating, so that the tensor can require grad."""
        return self._array.dtype.kind == "f"

    def is_contiguous(self) -> bool:
        """Whether the elements lie in memory in the order of their indices."""
        return bool(self._array.flags.c_contiguous)

    def contiguous(self) -> Tensor:
        """This tensor if it is contiguous, else a copy that is."""
        return self if self._array.flags.c_contiguous else self.clone()

    def clone(self) -> Tensor:
        """A copy that gradients pass through."""
        return apply(elementwise.clone, (self,))

    def item(self) -> Any:
        """The one element as a Python number. Raises: ShapeError if there are more, or none."""
        if self._array.size != 1:
            raise ShapeError(f"item: a tensor of shape {self._array.shape} has {self._array.size} elements, not one")
        return self._array.item()

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers."""
        return self._array.tolist()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The NumPy array of this tensor: shared memory.

        Raises: GraphError if it requires grad; DeviceError if it is on a GPU.
        """
        if self._edge is not None:
            raise GraphError("numpy: this tensor requires grad; use detach().numpy()")
        if self._device is not CPU:
            raise DeviceError(f"numpy: this tensor is on {self._device}; use cpu().numpy()")
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype, copy=copy)

    def to(self: T, *target: Any, dtype: Any = None, device: Any = None) -> T | Tensor:
        """In another dtype, on another device, or both: to("cuda:0"), to(ddp.float64), to(other_tensor).

        Returns this tensor itself if nothing changes. Gradients pass through. Raises: DtypeError, DeviceError.
        """
        for each in target:
            if isinstance(each, TensorBase):
                dtype, device = each._array.dtype, each._device
            elif isinstance(each, _Device) or (isinstance(each, str) and each.partition(":")[0] in ("cpu", "cuda")):
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
        return x

    def cpu(self) -> Tensor:
        """On the CPU."""
        return self.to(device=CPU)

    def cuda(self, index: int | None = None) -> Tensor:
        """On a CUDA device. Raises: DeviceError if there is none."""
        return self.to(device=_Device("cuda", index))

    def half(self) -> Tensor:
        """As float16."""
        return self.to(dtype=float16)

    def float(self) -> Tensor:
        """As float32."""
        return self.to(dtype=float32)

    def double(self) -> Tensor:
        """As float64."""
        return self.to(dtype=float64)

    def int(self) -> Tensor:
        """As int32."""
        return self.to(dtype=int32)

    def long(self) -> Tensor:
        """As int64."""
        return self.to(dtype=int64)

    def bool(self) -> Tensor:
        """As bool: whether each element is non-zero."""
        return self.to(dtype=bool_)

    def __bool__(self) -> Any:
        if self._array.size != 1:
            raise ArgumentError(f"the truth of shape {self._array.shape} is not one value; use all() or any()")
        return bool(self._array.item())

    def __float__(self) -> Any:
        return float(self.item())

    def __int__(self) -> Any:
        return int(self.item())

    def __index__(self) -> Any:
        return operator.index(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self._array.ndim else format(str(self), spec)

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._edge, Node):
            raise GraphError("copying or pickling the result of an op: the graph cannot go along; use detach()")
        return _rebuild, (type(self), place(self._array, CPU), self._device, self._edge is not None)

    def __repr__(self) -> str:
        text = np.array2string(place(self._array, CPU), separator=", ", prefix="tensor(")
        if not self._array.size:
            text = f"[], size={self._array.shape}"
        if self._array.dtype not in (DEFAULT, int64, bool_):
            text += f", dtype=ddp.{self._array.dtype.name}"
        if self._device is not CPU:
            text += f", device='{self._device}'"
        if isinstance(self._edge, Node):
            text += f", grad_fn=<{self._edge.op.name}>"
        elif self._edge is not None:
            text += ", requires_grad=True"
        return f"tensor({text})"


_Device = device  # the name, where a parameter or property `device` hides it
base._plain.append(Tensor)


def transfer(x: TensorBase, where: device) -> Tensor:
    """`x` on `where`; its gradient travels back."""
    result = wrap(place(x._array, where), where)
    result._device = device_of(result._array)
    if x._edge is not None and _engine.is_grad_enabled():
        result._edge = Node(elementwise.transfer, where.xp, (x._edge,), (True,), (), (), x._device)
    return result


def _rebuild(kind: type[Tensor], array: Any, where: device, requires_grad: bool) -> Tensor:
    self = object.__new__(kind)
    self._array = place(array, where)
    self._device = where
    self._edge = self._end = self._grad = None
    self._version, self._epoch = _engine.Version(), 0
    return self.requires_grad_(requires_grad)
