"""Hands a tensor's memory to other libraries, and takes their memory by DLPack, without a copy if possible.

NumPy does not know DLPack's code for bfloat16. So bfloat16 arrays pass through NumPy as 16-bit integers, and the code
in the capsule is changed here.

Source: dlpack.h 1.0, DLManagedTensor and DLManagedTensorVersioned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ddp._device import CPU, device, on, raise_cuda_error, raise_pending, to_device
from ddp._tensor.base import TensorBase
from ddp._tensor.dtypes import FLOATS, bfloat16, parse
from ddp.errors import ArgumentError, DdpError, DeviceError, DtypeError, GraphError, ShapeError

# DLPack's type codes: kDLUInt and kDLBfloat of DLDataTypeCode.
_UINT = 1
_BFLOAT = 4


DLDevice = tuple[int, int]  # DLPack's number of the kind of device, and its index


class _DataType(ctypes.Structure):
    """DLPack's struct DLDataType."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


# Offset of the DLDataType in a capsule's struct (bytes): in DLManagedTensor and in DLManagedTensorVersioned.
_TYPE_AT = {b"dltensor": 20, b"dltensor_versioned": 52}
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _data_type(capsule: Any) -> _DataType:
    """The data type in a capsule; writing to its fields changes the capsule."""
    name = b"dltensor_versioned" if _is_valid(capsule, b"dltensor_versioned") else b"dltensor"
    return _DataType.from_address(_pointer(capsule, name) + _TYPE_AT[name])


def bfloat16_capsule(array: Any, options: dict[str, Any]) -> Any:
    """The DLPack capsule of a bfloat16 array. options: arguments for the array's `__dlpack__`."""
    capsule = array.view(np.uint16).__dlpack__(**options)
    _data_type(capsule).code = _BFLOAT
    return capsule


class _CapsuleHolder:
    """Hands NumPy or CuPy the capsule of a bfloat16 array, in which the dtype was changed to an integer."""

    def __init__(self, capsule: Any, device: DLDevice) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack_device__(self) -> DLDevice:
        return self._device

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule


_CPU = (1,)  # kDLCPU
_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def dlpack_device(exporter: Any) -> device:
    """The device of another library's array.

    Raises: DtypeError if it does not support DLPack; DeviceError if its memory is neither the CPU's nor CUDA's.
    """
    if not hasattr(exporter, "__dlpack__"):
        raise DtypeError(f"from_dlpack: expected an array with __dlpack__(), got {type(exporter).__name__}")
    kind, index = exporter.__dlpack_device__()
    if kind in _CPU:
        return CPU
    if kind in _CUDA:
        return device("cuda", index)
    raise DeviceError(f"from_dlpack: memory of DLPack's kind {int(kind)} is neither the CPU's nor CUDA's")


def take_dlpack(exporter: Any, source: device) -> Any:
    """Makes an array over another library's memory. On a GPU, the current stream waits for that library's work.

    Raises: DtypeError for a dtype that tensors do not have, or if NumPy or CuPy does not take the array.
    """
    try:
        with on(source):
            array = _take_bfloat16(exporter, source) if is_bfloat16(exporter) else source.xp.from_dlpack(exporter)
        parse(array.dtype)
    except (BufferError, RuntimeError) as error:
        if isinstance(error, DdpError):
            raise
        dtype = getattr(exporter, "dtype", "unknown dtype")
        raise DtypeError(f"from_dlpack: {source.xp.__name__} does not take an array of {dtype}: {error}") from error
    return array


def _take_bfloat16(exporter: Any, source: device) -> Any:
    """Makes an array over the memory of another library's bfloat16 array, for the current device and stream.

    Raises: BufferError if it has another dtype.
    """
    xp = source.xp
    if isinstance(exporter, xp.ndarray):
        return exporter
    options = {} if source is CPU else {"stream": xp.cuda.get_current_stream().ptr or 1}
    try:
        capsule = exporter.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # an older library, which does not take max_version
        capsule = exporter.__dlpack__(**options)
    data_type = _data_type(capsule)
    if (data_type.code, data_type.bits, data_type.lanes) != (_BFLOAT, 16, 1):
        raise BufferError(f"no bfloat16, but DLPack's dtype {data_type.code} of {data_type.bits} bits")
    data_type.code = _UINT
    return xp.from_dlpack(_CapsuleHolder(capsule, exporter.__dlpack_device__())).view(bfloat16)


def is_bfloat16(exporter: Any) -> bool:
    """Whether another library's array is bfloat16, judging by the name of the dtype."""
    return str(getattr(exporter, "dtype", "")).endswith("bfloat16")


def _address(array: Any) -> int:
    """The address of the first element of a NumPy or CuPy array."""
    return array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr


class Interop(TensorBase):
    """Describes a tensor's memory, and hands it to other libraries."""

    __slots__ = ()

    def item(self) -> Any:
        """The one element as a Python number.

        Raises: ShapeError if there are more elements, or none; on a GPU also the error of earlier work that has failed,
        such as a CudaError or a RangeError.
        """
        if self.array.size != 1:
            raise ShapeError(f"item: a tensor of shape {self.array.shape} has {self.array.size} elements, not one")
        return self.array.item() if self._device is CPU else self._read("item", self.array.item)

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers; a number for a 0-d tensor."""
        if self._device is CPU:
            return self.array.tolist()
        # Made contiguous first: otherwise CuPy's tolist might leave another stream current, as described in
        # `ddp._cuda.stream_order.StreamGuard`. Reshaped, because ascontiguousarray gives a 0-d array one axis.
        shape = self.array.shape
        return self._read("tolist", lambda: self._device.xp.ascontiguousarray(self.array).reshape(shape).tolist())

    def _read(self, name: str, read: Callable[[], Any]) -> Any:
        """The result of `read()`, which may wait for a GPU. Raises: the error of earlier GPU work that has failed."""
        try:
            value = read()
        except Exception as error:
            raise_cuda_error(self._device, error, name)
            raise
        raise_pending()
        return value

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """The NumPy array of this tensor, which shares its memory.

        force: detaches and copies to the CPU as needed. Raises, unless force: GraphError if the tensor requires grad;
        DeviceError if it is on a GPU.
        """
        if force:
            return to_device(self.array, CPU)
        if self.edge is not None:
            raise GraphError("numpy: this tensor requires grad; use detach().numpy()")
        if self._device is not CPU:
            raise DeviceError(f"numpy: this tensor is on {self._device}; use cpu().numpy()")
        return self.array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype, copy=copy)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's protocol for sharing memory. Raises: AttributeError where numpy() would raise, and for bfloat16."""
        if self._device is not CPU or self.edge is not None or self.array.dtype == bfloat16:
            raise AttributeError("__array_interface__: only for tensors on the CPU that do not require grad")
        return self.array.__array_interface__

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA's protocol for sharing memory. It names the current stream, for which a reader has to wait.

        Raises: AttributeError on the CPU, if the tensor requires grad, and for bfloat16, which the protocol lacks.
        """
        if self._device is CPU or self.edge is not None or self.array.dtype == bfloat16:
            raise AttributeError("__cuda_array_interface__: only for tensors on CUDA that do not require grad")
        with on(self._device):  # the protocol names the current stream of that device
            return self.array.__cuda_array_interface__

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: DLDevice | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule that shares the memory.

        stream: the address of the consumer's stream, which will wait for the current stream's work so far; 1 or None:
        CUDA's null stream; 2: the per-thread default stream; -1: no stream waits. On the CPU only None is valid.
        dl_device: (1, 0) copies from a GPU to the CPU, and waits. copy: True: makes a copy; False: shares the memory,
        or raises.
        Raises: GraphError if the tensor requires grad; BufferError for a dl_device other than its own and (1, 0), or if
        copy=False and the dl_device is not its own; ArgumentError for an invalid stream.
        """
        if self.edge is not None:
            raise GraphError("__dlpack__: this tensor requires grad; use detach()")
        options: dict[str, Any] = {} if max_version is None else {"max_version": max_version}
        array = self.array
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            if tuple(dl_device) != (1, 0) or copy is False:
                raise BufferError(f"__dlpack__: a tensor on {self._device} has no memory on {dl_device} to share")
            array = to_device(array, CPU)
            copy = None
        if copy:
            array = array.copy()
        if not isinstance(array, np.ndarray):
            from ddp._cuda import array_interface  # only where there is a GPU

            array_interface.order_consumer(self._device.xp, array, stream)
            options["stream"] = -1  # order_consumer has done what `stream` asks for
        elif stream is not None and self._device is CPU:
            raise ArgumentError(f"__dlpack__(stream={stream!r}): a tensor on the CPU has no stream")
        with on(self._device):
            return bfloat16_capsule(array, options) if array.dtype == bfloat16 else array.__dlpack__(**options)

    def __dlpack_device__(self) -> DLDevice:
        """DLPack's number of the kind of device, and its index."""
        kind, index = self.array.__dlpack_device__()
        return int(kind), int(index)

    def data_ptr(self) -> int:
        """The address of the first element; 0 if there are no elements."""
        return _address(self.array) if self.array.size else 0

    def storage_offset(self) -> int:
        """The number of elements that precede this tensor's first element in the memory that it is a view of."""
        root = self.array
        while isinstance(root.base, self._device.xp.ndarray):
            root = root.base
        return (_address(self.array) - _address(root)) // self.array.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """The distance, in elements, between neighbours along each dimension, or along `dim`."""
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
