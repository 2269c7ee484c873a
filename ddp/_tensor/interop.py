"""In and out: tensors from numbers, lists and other libraries' arrays, and back, sharing memory wherever it can be.

An array that may not be written to is shared all the same: reading it is safe, and writing in place raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ddp import _device
from ddp._device import CPU, device_of, on, place
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.contents import array_of
from ddp._tensor.creation import Where, alike, made, number, target
from ddp._tensor.dtypes import DEFAULT, FLOATS, bfloat16, parse
from ddp.errors import ArgumentError, DeviceError, DtypeError, GraphError, ShapeError

if TYPE_CHECKING:
    from ddp._tensor.core import Tensor


def tensor(data: Any, *, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """A new tensor with a copy of `data`: numbers, nested sequences, an array or a tensor.

    Raises: ShapeError for ragged sequences; DtypeError for what is no number, or if an integer should require grad;
    ArgumentError for a number that does not fit the dtype.
    """
    array, new = array_of(data, dtype, "tensor")
    where = device_of(array) if device is None else target(device)
    if not new and (where is CPU or device_of(array) is where or where.index is None):
        array = array.copy()
    return made(array, where, requires_grad)


def as_tensor(data: Any, dtype: Any = None, device: Where = None) -> Tensor:
    """`data` as a tensor, sharing the memory of an array where dtype and device allow it; a tensor as it is."""
    if isinstance(data, TensorBase):
        x: Any = data
        return x if dtype is None and device is None else x.to(device=device, dtype=dtype)
    array, _ = array_of(data, dtype, "as_tensor")
    return made(array, device_of(array) if device is None else target(device))


def asarray(
    obj: Any, *, dtype: Any = None, device: Where = None, copy: bool | None = None, requires_grad: bool = False
) -> Tensor:
    """`obj` as a tensor: sharing its memory if that can be, or never (copy=True), or always (copy=False).

    Raises: ArgumentError if copy=False and the memory cannot be shared.
    """
    if isinstance(obj, TensorBase) or not hasattr(obj, "__dlpack__") or hasattr(obj, "__array__"):
        array, new = array_of(obj, dtype, "asarray")
    else:
        array, new = from_dlpack(obj)._array, False
    where = device_of(array) if device is None else target(device)
    moved = place(array, where)
    new = new or moved is not array
    if copy is False and new:
        raise ArgumentError(f"asarray: a {type(obj).__name__} cannot become this tensor without a copy")
    if copy and not new:
        moved = moved.copy()
    if isinstance(obj, TensorBase) and moved is obj._array:
        x = wrap(moved, obj._device, obj)
        return x.requires_grad_() if requires_grad else x
    return made(moved, where, requires_grad)


def scalar_tensor(s: Any, *, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """A 0-d tensor of one number; float32 unless `dtype` says otherwise."""
    kind = DEFAULT if dtype is None else parse(dtype)
    return tensor(number(s, "scalar_tensor"), dtype=kind, device=device, requires_grad=requires_grad)


def from_numpy(ndarray: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that shares the memory of `ndarray`. Raises: DtypeError for anything but an array of a known dtype."""
    if not isinstance(ndarray, np.ndarray):
        raise DtypeError(f"from_numpy: expected a NumPy array, got {type(ndarray).__name__}")
    parse(ndarray.dtype)
    return wrap(ndarray if type(ndarray) is np.ndarray else ndarray.view(np.ndarray), CPU)


def frombuffer(buffer: Any, *, dtype: Any, count: int = -1, offset: int = 0, requires_grad: bool = False) -> Tensor:
    """A 1-d tensor that shares the memory of an object with the buffer protocol, from byte `offset` on.

    Raises: ArgumentError if the bytes are no whole number of elements, or fewer than `count`.
    """
    try:
        array = np.frombuffer(buffer, parse(dtype), count, offset)
    except ValueError as error:
        raise ArgumentError(f"frombuffer: {error}") from error
    return made(array, CPU, requires_grad)


_DLPACK_CPU, _DLPACK_CUDA = (1,), (2, 13)  # kDLCPU; kDLCUDA, kDLCUDAManaged


def from_dlpack(ext_tensor: Any, *, device: Where = None, copy: bool | None = None) -> Tensor:
    """A tensor that shares the memory of an array of any library that speaks DLPack.

    Raises: DtypeError for a dtype that NumPy or CuPy does not take this way (bfloat16), or for no such array;
    DeviceError for memory that is neither the CPU's nor CUDA's.
    """
    if not hasattr(ext_tensor, "__dlpack__"):
        raise DtypeError(f"from_dlpack: expected an array with __dlpack__(), got {type(ext_tensor).__name__}")
    kind, index = ext_tensor.__dlpack_device__()
    if kind in _DLPACK_CPU:
        where = CPU
    elif kind in _DLPACK_CUDA:
        where = _device.device("cuda", index)
    else:
        raise DeviceError(f"from_dlpack: memory of DLPack's kind {int(kind)} is neither the CPU's nor CUDA's")
    try:
        with on(where):
            array = where.xp.from_dlpack(ext_tensor)
        parse(array.dtype)
    except (BufferError, RuntimeError) as error:
        if isinstance(error, DtypeError | GraphError):
            raise
        dtype = getattr(ext_tensor, "dtype", "unknown dtype")
        raise DtypeError(f"from_dlpack: {where.xp.__name__} does not take an array of {dtype}: {error}") from error
    x = made(array.copy() if copy else array, where)
    return x if device is None else made(x._array, target(device))


_POINTERS: dict[str, Any] = {
    "numpy": lambda array: array.__array_interface__["data"][0],
    "cupy": lambda array: array.data.ptr,
}


class Interop(TensorBase):
    """What a tensor's memory is, and handing it to others."""

    __slots__ = ()

    def item(self) -> Any:
        """The one element as a Python number. Raises: ShapeError if there are more, or none."""
        if self._array.size != 1:
            raise ShapeError(f"item: a tensor of shape {self._array.shape} has {self._array.size} elements, not one")
        return self._array.item()

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers; a number for a 0-d tensor."""
        return self._array.tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """The NumPy array of this tensor: shared memory.

        force: detaches and copies to the CPU as needed. Raises, without it: GraphError if it requires grad;
        DeviceError if it is on a GPU.
        """
        if force:
            return place(self._array, CPU)
        if self._edge is not None:
            raise GraphError("numpy: this tensor requires grad; use detach().numpy()")
        if self._device is not CPU:
            raise DeviceError(f"numpy: this tensor is on {self._device}; use cpu().numpy()")
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype, copy=copy)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's protocol: shared memory. Raises: AttributeError where numpy() would raise, and for bfloat16."""
        if self._device is not CPU or self._edge is not None or self._array.dtype == bfloat16:
            raise AttributeError("__array_interface__: only for tensors on the CPU that do not require grad")
        return self._array.__array_interface__

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The protocol of CUDA arrays: shared memory. Raises: AttributeError on the CPU, or if it requires grad."""
        if self._device is CPU or self._edge is not None:
            raise AttributeError("__cuda_array_interface__: only for tensors on CUDA that do not require grad")
        return self._array.__cuda_array_interface__

    def __dlpack__(self, **options: Any) -> Any:
        """A DLPack capsule that shares the memory. Raises: GraphError if it requires grad; DtypeError for bfloat16."""
        if self._edge is not None:
            raise GraphError("__dlpack__: this tensor requires grad; use detach()")
        try:
            return self._array.__dlpack__(**{name: value for name, value in options.items() if value is not None})
        except BufferError as error:
            if self._array.dtype != bfloat16:
                raise
            raise DtypeError(f"__dlpack__: {self._device.xp.__name__} gives no bfloat16 away: {error}") from error

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's number of the kind of device, and its index."""
        kind, index = self._array.__dlpack_device__()
        return int(kind), int(index)

    def data_ptr(self) -> int:
        """The address of the first element; 0 for a tensor of none."""
        return _POINTERS[self._device.xp.__name__](self._array) if self._array.size else 0

    def storage_offset(self) -> int:
        """How many elements lie before the first one in the memory that this tensor is a view of."""
        root = self._array
        while isinstance(root.base, self._device.xp.ndarray):
            root = root.base
        at = _POINTERS[self._device.xp.__name__]
        return (at(self._array) - at(root)) // self._array.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """How many elements to step over for the next index, in each dimension or in one."""
        steps = tuple([step // self._array.itemsize for step in self._array.strides])
        return steps if dim is None else steps[dim]

    def element_size(self) -> int:
        """The size of an element in bytes."""
        return self._array.itemsize

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return self._array.itemsize

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes."""
        return self._array.nbytes

    def is_floating_point(self) -> bool:
        """Whether the dtype is floating, so that the tensor can require grad."""
        return self._array.dtype in FLOATS

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
        """A new tensor with a copy of `data`, in the dtype and on the device of this one, unless given."""
        return tensor(data, **alike(self, dtype, device), requires_grad=requires_grad)
