"""In and out: tensors from numbers, lists and other libraries' arrays, and back, sharing memory wherever it can be.

An array that may not be written to is shared all the same: reading it is safe, and writing in place raises. Python
floats become float32, integers int64, and arrays keep their dtype, as in PyTorch. DLPack names bfloat16 by a code that
NumPy does not know: it is handed 16-bit integers, and the code in the capsule is changed on the way.

Source: dlpack.h 1.0, DLManagedTensor and DLManagedTensorVersioned.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp import _device
from ddp._device import CPU, device, device_of, on, place, raise_cuda_error, raise_pending
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.creation import Options, Where, as_number, from_array, options_like, pin, resolve_device
from ddp._tensor.dtypes import (
    FLOATS,
    INTEGERS,
    bfloat16,
    float32,
    float64,
    get_default_dtype,
    iinfo,
    of_number,
    parse,
    promote_types,
)
from ddp.errors import ArgumentError, DdpError, DeviceError, DtypeError, GraphError, ShapeError

__all__ = ["as_tensor", "asarray", "from_dlpack", "from_numpy", "frombuffer", "scalar_tensor", "tensor"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ddp._tensor.core import Tensor


_UINT, _BFLOAT = 1, 4  # DLDataTypeCode


class _DataType(ctypes.Structure):
    """DLDataType."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


# Where a capsule's struct holds its DLDataType: in DLManagedTensor and in DLManagedTensorVersioned.
_TYPE_AT = {b"dltensor": 20, b"dltensor_versioned": 52}
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _data_type(capsule: Any) -> _DataType:
    """The data type in a capsule, which may be written to."""
    name = b"dltensor_versioned" if _is_valid(capsule, b"dltensor_versioned") else b"dltensor"
    return _DataType.from_address(_pointer(capsule, name) + _TYPE_AT[name])


def bfloat16_capsule(array: Any, options: dict[str, Any]) -> Any:
    """The capsule of a bfloat16 array."""
    try:
        return array.__dlpack__(**options)
    except (BufferError, RuntimeError):
        capsule = array.view(np.uint16).__dlpack__(**options)
    _data_type(capsule).code = _BFLOAT
    return capsule


class _CapsuleHolder:
    """What NumPy or CuPy asks for an array, and gets a capsule of integers."""

    def __init__(self, capsule: Any, where: tuple[int, int]) -> None:
        self._capsule, self._where = capsule, where

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._where

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule


_CPU, _CUDA = (1,), (2, 13)  # kDLCPU; kDLCUDA, kDLCUDAManaged


def dlpack_device(theirs: Any) -> device:
    """Where the memory of an array of another library is. Raises: DtypeError for no such array; DeviceError."""
    if not hasattr(theirs, "__dlpack__"):
        raise DtypeError(f"from_dlpack: expected an array with __dlpack__(), got {type(theirs).__name__}")
    kind, index = theirs.__dlpack_device__()
    if kind in _CPU:
        return CPU
    if kind in _CUDA:
        return device("cuda", index)
    raise DeviceError(f"from_dlpack: memory of DLPack's kind {int(kind)} is neither the CPU's nor CUDA's")


def take_dlpack(theirs: Any, where: device) -> Any:
    """An array over the memory of another library's, which is there. Raises: DtypeError for one of another dtype."""
    try:
        with on(where):
            array = _take_bfloat16(theirs, where.xp) if is_bfloat16(theirs) else where.xp.from_dlpack(theirs)
        parse(array.dtype)
    except (BufferError, RuntimeError) as error:
        if isinstance(error, DdpError):
            raise
        dtype = getattr(theirs, "dtype", "unknown dtype")
        raise DtypeError(f"from_dlpack: {where.xp.__name__} does not take an array of {dtype}: {error}") from error
    return array


def _take_bfloat16(theirs: Any, xp: Any) -> Any:
    """The bfloat16 array of another library's, over the same memory, on the current device and stream.

    Raises: BufferError if it is none.
    """
    if isinstance(theirs, xp.ndarray):
        return theirs
    try:
        array = xp.from_dlpack(theirs)
    except (BufferError, RuntimeError):
        options = {} if xp is np else {"stream": xp.cuda.get_current_stream().ptr or 1}
        try:
            capsule = theirs.__dlpack__(max_version=(1, 0), **options)
        except TypeError:  # of a library from before the versions
            capsule = theirs.__dlpack__(**options)
        found = _data_type(capsule)
        if (found.code, found.bits, found.lanes) != (_BFLOAT, 16, 1):
            raise BufferError(f"no bfloat16, but DLPack's dtype {found.code} of {found.bits} bits") from None
        found.code = _UINT
        array = xp.from_dlpack(_CapsuleHolder(capsule, theirs.__dlpack_device__())).view(bfloat16)
    return array


def is_bfloat16(theirs: Any) -> bool:
    """Whether an array of any library says that it is of bfloat16."""
    return str(getattr(theirs, "dtype", "")).endswith("bfloat16")


def cast(array: Any, kind: np.dtype[Any]) -> Any:
    """`array` in `kind`; the same array if it has it. What does not fit becomes infinite, or wraps around."""
    if array.dtype == kind:
        return array
    with np.errstate(all="ignore"):
        return array.astype(kind)


def array_of(data: Any, dtype: Any, name: str) -> tuple[Any, bool]:
    """`data` as an array of a supported dtype, and whether it is new: of an array or tensor it may be the same."""
    if isinstance(data, bool | int | float) and not isinstance(data, np.generic):
        kind = of_number(data) if dtype is None else parse(dtype)
        if kind in INTEGERS and math.isfinite(data):
            data = int(data)
        try:
            with np.errstate(over="ignore"):
                return np.array(data, kind), True
        except (OverflowError, ValueError) as error:
            raise ArgumentError(f"{name}: {data} does not fit {kind}") from error
    if isinstance(data, TensorBase):
        array = data.array
    elif isinstance(data, np.ndarray):
        array = data if type(data) is np.ndarray else data.view(np.ndarray)
    elif hasattr(data, "__dlpack__") and is_bfloat16(data):
        array = take_dlpack(data, dlpack_device(data))  # of all ways, this one has a name for it
    elif hasattr(data, "__cuda_array_interface__"):
        array = _device.imported(data)
    elif hasattr(data, "__array__") or hasattr(data, "__array_interface__"):
        array = np.asarray(data)
    else:
        return _of_sequence(data, dtype, name), True
    kind = parse(array.dtype if dtype is None else dtype)
    return cast(array, kind), array.dtype != kind or isinstance(data, np.generic)


def _of_sequence(data: Any, dtype: Any, name: str) -> Any:
    """A new array of nested lists of numbers, arrays and tensors."""
    if isinstance(data, list | tuple):
        kinds = _element_types(data)
        if any(hasattr(kind, "dtype") for kind in kinds):
            found: set[np.dtype[Any]] = set()
            data = _unwrap_tensors(data, found)
            if dtype is None:
                dtype = functools.reduce(promote_types, found)
    try:
        array = np.array(data)
    except ValueError as error:
        raise ShapeError(f"{name}: the nested lists are ragged: {error}") from error
    if dtype is None:
        return cast(array, get_default_dtype() if array.dtype == float64 else parse(array.dtype))
    kind = parse(dtype)
    parse(array.dtype)
    if kind in INTEGERS and array.size:
        limits, low, high = iinfo(kind), array.min(), array.max()
        if not (low >= limits.min and high <= limits.max):
            raise ArgumentError(f"{name}: {low if not low >= limits.min else high} does not fit {kind}")
    return cast(array, kind)


def _element_types(data: Any) -> set[type]:
    """The types of what is in nested lists."""
    kinds = set(map(type, data))
    if any(issubclass(kind, list | tuple) for kind in kinds):
        for part in data:
            if isinstance(part, list | tuple):
                kinds |= _element_types(part)
    return kinds


def _unwrap_tensors(data: Any, found: set[np.dtype[Any]]) -> Any:
    """Nested lists with arrays in the place of tensors; the dtype that each element would have goes to `found`."""
    if isinstance(data, list | tuple):
        return [_unwrap_tensors(part, found) for part in data]
    found.add(data.dtype if hasattr(data, "dtype") else of_number(data))
    array = place(data.array, CPU) if isinstance(data, TensorBase) else data
    return array.astype(float32) if getattr(array, "dtype", None) == bfloat16 else array  # NumPy mixes it with no other


def tensor(
    data: Any, *, dtype: Any = None, device: Where = None, requires_grad: bool = False, pin_memory: bool = False
) -> Tensor:
    """A new tensor with a copy of `data`: numbers, nested sequences, an array or a tensor.

    pin_memory: in page-locked memory, where there is a GPU to copy to.
    Raises: ShapeError for ragged sequences; DtypeError for what is no number, or if an integer should require grad;
    ArgumentError for a number that does not fit the dtype.
    """
    array, new = array_of(data, dtype, "tensor")
    where = _where_to(data, array, device)
    if not new and (where is CPU or device_of(array) is where or where.index is None):
        array = array.copy()
    x = from_array(array, where, requires_grad)
    return pin(x) if pin_memory else x


def as_tensor(data: Any, dtype: Any = None, device: Where = None) -> Tensor:
    """`data` as a tensor, sharing the memory of an array where dtype and device allow it; a tensor as it is."""
    if isinstance(data, TensorBase):
        x: Any = data
        return x if dtype is None and device is None else x.to(device=device, dtype=dtype)
    array, _ = array_of(data, dtype, "as_tensor")
    return from_array(array, _where_to(data, array, device))


def _where_to(data: Any, array: Any, device: Where) -> _device.device:
    """Where a tensor of `data` is made: where it was asked for; where an array is; else where new tensors are made."""
    named = device is not None or (isinstance(array, np.ndarray) and not isinstance(data, TensorBase))
    return resolve_device(device) if named else device_of(array)


def asarray(
    obj: Any, *, dtype: Any = None, device: Where = None, copy: bool | None = None, requires_grad: bool = False
) -> Tensor:
    """`obj` as a tensor: sharing its memory if that can be, or never (copy=True), or always (copy=False).

    Raises: ArgumentError if copy=False and the memory cannot be shared.
    """
    if isinstance(obj, TensorBase) or not hasattr(obj, "__dlpack__") or hasattr(obj, "__array__"):
        array, new = array_of(obj, dtype, "asarray")
    else:
        array, new = from_dlpack(obj).array, False
    where = _where_to(obj, array, device)
    moved = place(array, where)
    new = new or moved is not array
    if copy is False and new:
        raise ArgumentError(f"asarray: a {type(obj).__name__} cannot become this tensor without a copy")
    if copy and not new:
        moved = moved.copy()
    if isinstance(obj, TensorBase) and moved is obj.array:
        x = wrap(moved, obj._device, obj)
        return x.requires_grad_() if requires_grad else x
    return from_array(moved, where, requires_grad)


def scalar_tensor(s: Any, *, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """A 0-d tensor of one number, of the default dtype unless `dtype` says otherwise."""
    kind = get_default_dtype() if dtype is None else parse(dtype)
    return tensor(as_number(s, "scalar_tensor"), dtype=kind, device=device, requires_grad=requires_grad)


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
    return from_array(array, CPU, requires_grad)


def from_dlpack(ext_tensor: Any, *, device: Where = None, copy: bool | None = None) -> Tensor:
    """A tensor that shares the memory of an array of any library that speaks DLPack.

    On a GPU the current stream goes on when the other library's has got this far; the host does not wait.
    copy: True: it does not share; False: it does, or this raises. Raises: DtypeError for a dtype that tensors do not
    have, or for no such array; DeviceError for memory that is neither the CPU's nor CUDA's; ArgumentError if copy=False
    and `device` is another one.
    """
    where = dlpack_device(ext_tensor)
    if copy is False and device is not None and resolve_device(device) is not where:
        raise ArgumentError(f"from_dlpack: an array on {where} cannot become a tensor on {device} without a copy")
    array = take_dlpack(ext_tensor, where)
    x = from_array(array.copy() if copy else array, where)
    return x if device is None else from_array(x.array, resolve_device(device))


def from_foreign(value: Any) -> Any:
    """An array, or a tensor of another library, as a tensor outside the graph, sharing memory; anything else as it is.

    Raises: DtypeError, DeviceError, and what the other library raises for a tensor that it cannot share.
    """
    if isinstance(value, TensorBase) or not hasattr(value, "__dlpack__"):
        return value
    if isinstance(value, np.ndarray):
        return from_numpy(value)  # DLPack refuses an array that may not be written to
    # Not by __array__, after which PyTorch can never again resize the memory.
    return from_dlpack(value.detach() if hasattr(value, "detach") else value)


def _address(array: Any) -> int:
    """The address of the first element: of an array of NumPy, or of CuPy."""
    return array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr


class Interop(TensorBase):
    """What a tensor's memory is, and handing it to others."""

    __slots__ = ()

    def item(self) -> Any:
        """The one element as a Python number. Raises: ShapeError if there are more, or none; CudaError."""
        if self.array.size != 1:
            raise ShapeError(f"item: a tensor of shape {self.array.shape} has {self.array.size} elements, not one")
        if self._device is CPU:
            return self.array.item()
        try:
            found = self.array.item()
        except Exception as error:
            raise_cuda_error(self._device, error, "item")
            raise
        raise_pending()
        return found

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers; a number for a 0-d tensor."""
        try:
            array = self.array
            # CuPy copies what does not lie in one piece under a context of its own, which may leave another stream.
            found = (array if array.flags.c_contiguous else self._device.xp.ascontiguousarray(array)).tolist()
        except Exception as error:
            raise_cuda_error(self._device, error, "tolist")
            raise
        if self._device is not CPU:
            raise_pending()
        return found

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """The NumPy array of this tensor: shared memory.

        force: detaches and copies to the CPU as needed. Raises, without it: GraphError if it requires grad;
        DeviceError if it is on a GPU.
        """
        if force:
            return place(self.array, CPU)
        if self.edge is not None:
            raise GraphError("numpy: this tensor requires grad; use detach().numpy()")
        if self._device is not CPU:
            raise DeviceError(f"numpy: this tensor is on {self._device}; use cpu().numpy()")
        return self.array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype, copy=copy)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's protocol: shared memory. Raises: AttributeError where numpy() would raise, and for bfloat16."""
        if self._device is not CPU or self.edge is not None or self.array.dtype == bfloat16:
            raise AttributeError("__array_interface__: only for tensors on the CPU that do not require grad")
        return self.array.__array_interface__

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The protocol of CUDA arrays: shared memory, which is there when the current stream is past it.

        Raises: AttributeError on the CPU, if it requires grad, and for bfloat16, which has no name there.
        """
        if self._device is CPU or self.edge is not None:
            raise AttributeError("__cuda_array_interface__: only for tensors on CUDA that do not require grad")
        if self.array.dtype == bfloat16:
            raise AttributeError("__cuda_array_interface__: it has no name for bfloat16; DLPack has (from_dlpack)")
        with on(self._device):  # the stream that it names is the current one there
            return self.array.__cuda_array_interface__

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule that shares the memory.

        stream: the consumer's, which goes on when ours has got this far: an address, 1 or None for CUDA's null stream,
        2 for the thread's own, -1 for no order at all; None on the CPU. dl_device: (1, 0) copies from a GPU to the CPU,
        which waits. copy: True: it does not share; False: it does, or this raises.
        Raises: GraphError if it requires grad; BufferError for a device it cannot be given on; ArgumentError for a
        stream that is none.
        """
        if self.edge is not None:
            raise GraphError("__dlpack__: this tensor requires grad; use detach()")
        options: dict[str, Any] = {} if max_version is None else {"max_version": max_version}
        array = self.array
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            if tuple(dl_device) != (1, 0) or copy is False:
                raise BufferError(f"__dlpack__: a tensor on {self._device} has no memory on {dl_device} to share")
            array, copy = place(array, CPU), None
        if copy:
            array = array.copy()
        if not isinstance(array, np.ndarray):
            from ddp._cuda import array_interface  # only where there is a GPU

            array_interface.order_consumer(self._device.xp, array, stream)
            options["stream"] = -1  # all is in order
        elif stream is not None and self._device is CPU:
            raise ArgumentError(f"__dlpack__(stream={stream!r}): a tensor on the CPU has no stream")
        with on(self._device):
            return bfloat16_capsule(array, options) if array.dtype == bfloat16 else array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's number of the kind of device, and its index."""
        kind, index = self.array.__dlpack_device__()
        return int(kind), int(index)

    def data_ptr(self) -> int:
        """The address of the first element; 0 for a tensor of none."""
        return _address(self.array) if self.array.size else 0

    def storage_offset(self) -> int:
        """How many elements lie before the first one in the memory that this tensor is a view of."""
        root = self.array
        while isinstance(root.base, self._device.xp.ndarray):
            root = root.base
        return (_address(self.array) - _address(root)) // self.array.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """How many elements to step over for the next index, in each dimension or in one."""
        steps = tuple([step // self.array.itemsize for step in self.array.strides])
        return steps if dim is None else steps[dim]

    def element_size(self) -> int:
        """The size of an element in bytes."""
        return self.array.itemsize

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return self.array.itemsize

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes."""
        return self.array.nbytes

    def is_floating_point(self) -> bool:
        """Whether the dtype is floating, so that the tensor can require grad."""
        return self.array.dtype in FLOATS

    def new_tensor(self, data: Any, **options: Unpack[Options]) -> Tensor:
        """A new tensor with a copy of `data`, in the dtype and on the device of this one, unless given."""
        return tensor(data, **options_like(self, options))
