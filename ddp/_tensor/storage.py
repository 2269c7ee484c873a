"""The memory of tensors: `data`, copies, pickles, conversions, and moves to memory that other processes can map.

The memory of an array cannot be replaced under its views. So a move copies the whole memory that a tensor is a view of,
and every tensor over it gets an array over the copy: views, their base, and the results of `detach()` and `data`. If
reference counts show that there may be such tensors, all objects are searched for them, which takes milliseconds.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ddp import _engine
from ddp._block import Block, is_shared
from ddp._device import CPU, device, device_of, found_cupy, to_device
from ddp._engine import Node, Version
from ddp._tensor import dtypes
from ddp._tensor.base import Tensor, TensorBase, apply, record, wrap
from ddp._tensor.creation import as_number
from ddp._tensor.dtypes import TYPES, is_float, parse
from ddp._tensor.inplace import must_record, operand_array
from ddp._tensor.operands import REJECTED, Other, as_ddp_error, as_method, convert
from ddp.errors import ArgumentError, DeviceError, DtypeError, GraphError, ShapeError
from ddp.ops import elementwise
from ddp.ops.memory_formats import channels_last, is_channels_last, memory_format, preserve_format

T = TypeVar("T", bound="Storage")


Array = np.ndarray[Any, Any]
_LINE = 64  # a cache line (bytes): in a block, each array that was moved there starts on one


class Storage(TensorBase):
    """Methods that copy a tensor or write into it, make tensors over its memory, and share it with other processes."""

    __slots__ = ()
    # Whether `deepcopy` also copies the attributes that a user has set on the tensor.
    _attributes_are_copied = True

    @property
    def data(self) -> Tensor:
        """The same memory outside the graph, with a version of its own: backward does not notice writes through it.

        Assigning a tensor makes this one share that tensor's memory. The assignment may change the shape, dtype and
        device of a leaf.

        Raises: GraphError for such a change of a parameter of a wrapped model; ShapeError for such a change of the
        result of an op, or if the leaf has a gradient of another shape; DtypeError if something other than a tensor is
        assigned, or if this tensor requires grad and a tensor that is not floating is assigned.
        """
        return wrap(self.array, self._device)

    @data.setter
    def data(self, value: TensorBase) -> None:
        if not isinstance(value, TensorBase):
            raise DtypeError(f"data: expected a Tensor, got {type(value).__name__}")
        new = value.array
        old = self.array
        if self.edge is not None and not is_float(new.dtype):
            raise DtypeError(f"data: a tensor that requires grad cannot become {new.dtype}")
        alike = new.shape == old.shape and new.dtype == old.dtype and value._device is self._device
        full = self.accumulate_grad is not None and self.accumulate_grad.grad_buffer.full
        if (isinstance(self.edge, Node) and not alike) or (new.shape != old.shape and full):
            raise ShapeError(
                f"data: {old.dtype} {old.shape} on {self._device} is the result of an op, or has a grad, and cannot "
                f"become {new.dtype} {new.shape} on {value._device}"
            )
        if alike:  # `edge` and `accumulate_grad` stay valid
            self.array = new
            self.version = Version()
            self._epoch = 0
        else:
            self.replace_storage(new, value._device)

    def clone(self) -> Tensor:
        """A copy that gradients pass through."""
        return apply(elementwise.clone, (self,))

    def detach_(self: T) -> T:
        """Takes this tensor out of the graph: it becomes a leaf that does not require grad."""
        self.edge = None
        return self

    def copy_(self: T, source: Other, non_blocking: bool = False) -> T:
        """Writes the elements of `source`, broadcast and cast to this dtype, into this tensor.

        non_blocking: between a GPU and pinned memory, the host does not wait if both tensors are contiguous and of one
        shape and dtype; see `to`.

        Raises: ShapeError if `source` does not broadcast to this shape; DtypeError if it is neither a tensor, an array
        nor a number; ArgumentError for a number that the dtype cannot hold; InplaceError if autograd must record the
        write and cannot.
        """
        recorded = must_record(self, "copy_", source)
        away = isinstance(source, TensorBase) and source._device is not self._device
        if away and not recorded and "cpu" in (source._device.type, self._device.type):
            from ddp._cuda import copies  # only where there is a GPU

            if self.array.flags.c_contiguous and copies.copy_into(self.array, source.array, non_blocking):
                self.version.count += 1
                return self
        return _write(self, "copy_", source, operand_array(self, source, "copy_"), recorded)

    def fill_(self: T, value: Any) -> T:
        """Sets every element to `value`, a number or a tensor of one element.

        Raises: ShapeError for several elements; ArgumentError for a value that is not a number, or that the dtype
        cannot hold; InplaceError if autograd must record the write and cannot.
        """
        if value.array.size != 1 if isinstance(value, TensorBase) else np.ndim(value):
            raise ShapeError(f"fill_: expected a number or a tensor of one element, got shape {np.shape(value)}")
        number = as_number(value, "fill_")
        return _write(self, "fill_", value, number, must_record(self, "fill_", value))

    def zero_(self: T) -> T:
        """Sets every element to 0."""
        return self.fill_(0)

    def __copy__(self: T) -> T:
        return _copy_as_leaf(self, self.array, "copying", self)

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        if id(self) in memo:
            return memo[id(self)]
        twin = memo[id(self)] = _copy_as_leaf(self, self.array.copy(order="K"), "copying")
        if self.__dict__ and self._attributes_are_copied:
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.grad = self.grad
        return twin

    def __reduce__(self) -> Any:
        check_leaf(self, "pickling")
        arguments = (type(self), to_device(self.array, CPU), self._device, self.edge is not None)
        return _rebuild, arguments, self.__dict__ or None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for hook in _class_hooks:
            hook(cls)

    def share_memory_(self: T) -> T:
        """Moves this tensor's memory to where other processes can map it, and returns the tensor.

        All tensors over this memory move along, such as views and results of `detach()`. NumPy arrays that were taken
        from the tensor before keep the old memory, and the gradient stays private. Does nothing if the memory is shared
        already, or is on a GPU, where it can always be shared. Raises: SharingError if the system gives no memory.
        """
        move_to_shared_memory([self])
        return self

    def is_shared(self) -> bool:
        """Whether other processes can map this tensor's memory; always on a GPU."""
        return self._device is not CPU or is_shared(self.array)


def _write(x: Any, name: str, source: Any, values: Any, recorded: bool) -> Any:
    """Computes x[...] = source. values: `source` as a number or an array; recorded: whether autograd records it."""
    if recorded:
        x[...] = source
        return x
    try:
        x.array[...] = values
    except REJECTED as error:
        raise as_ddp_error(name, error) from error
    x.version.count += 1
    return x


def check_leaf(x: TensorBase, name: str) -> None:
    if isinstance(x.edge, Node):
        raise GraphError(f"{name} the result of an op: the graph cannot go along; use detach()")


def _copy_as_leaf(x: T, array: Any, name: str, like: TensorBase | None = None) -> T:
    """A leaf of the class of `x` around `array`. Raises: GraphError for the result of an op."""
    check_leaf(x, name)
    twin = as_subclass(type(x), wrap(array, x._device, like))
    if like is not None:
        twin.__dict__.update(x.__dict__)
    return twin.requires_grad_(x.edge is not None)


def as_subclass(cls: type[T], plain: Any) -> T:
    """Turns a new tensor into one of class `cls`, with the same memory, edge and gradient."""
    if cls is type(plain):
        return plain
    self = object.__new__(cls)
    for name in TensorBase.__slots__:
        if name[:2] != "__" and hasattr(plain, name):
            setattr(self, name, getattr(plain, name))
    return self


def _rebuild(cls: type[T], array: Any, target: device, requires_grad: bool) -> T:
    return as_subclass(cls, wrap(to_device(array, target), target)).requires_grad_(requires_grad)


_class_hooks: list[Callable[[type], Any]] = []


def for_each_class(hook: Callable[[type], Any]) -> None:
    """Calls `hook` with each existing class of tensors, and later with each new one when it is defined.

    Pickling for other processes needs each class registered.
    """
    classes: list[type] = [Storage]
    for cls in classes:
        classes += cls.__subclasses__()
        hook(cls)
    _class_hooks.append(hook)


def move_to_shared_memory(tensors: list[Any]) -> None:
    """Moves the tensors that are not shared yet into one new block. Other tensors over their memory move along."""
    tensors = [x for x in tensors if x._device is CPU and not is_shared(x.array)]
    if not tensors:
        return
    alone = all(map(_is_only_reference, tensors))  # counted first: the code below holds references, too
    roots = {id(root): root for root in map(_root, (x.array for x in tensors))}
    moving: Any = tensors
    if not alone:
        # Not isinstance, which reads the objects' __class__: lazy objects may run code then.
        moving = [x for x in gc.get_objects() if issubclass(type(x), TensorBase) and _is_over(x, roots)]
        moving += [x for x in tensors if not any(x is y for y in moving)]  # `gc.freeze` hides objects from this list
    places = {}
    nbytes = 0
    for key, root in roots.items():
        low, high = byte_bounds(root)
        places[key] = (low, nbytes)
        nbytes += -(-(high - low) // _LINE) * _LINE
    block = Block.create(nbytes)
    memory = block.array(np.uint8, nbytes)
    for key, root in roots.items():
        _moved(root, memory, *places[key])[...] = root
    for x in moving:
        array = x.array
        after = _moved(array, memory, *places[id(_root(array))])
        after.flags.writeable = array.flags.writeable
        x.array = after


def _root(array: Array) -> Array:
    """The array at the bottom of a chain of views."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_over(x: TensorBase, roots: dict[int, Array]) -> bool:
    array = getattr(x, "array", None)  # a tensor that is being made has none yet
    return isinstance(array, np.ndarray) and id(_root(array)) in roots


def _moved(array: Array, memory: Array, low: int, offset: int) -> Array:
    """The same view as `array`, after its memory was moved from address `low` to byte `offset` of `memory`."""
    start = offset + array.__array_interface__["data"][0] - low if array.size else 0
    return np.ndarray(array.shape, array.dtype, memory, start, array.strides)


def _references(x: Any) -> tuple[int, ...]:
    """Whether a tensor's array is its own root (see `_root`), and the reference counts of the array and of the root."""
    array = x.array
    root = _root(array)
    return (array is root, sys.getrefcount(array), sys.getrefcount(root))


def _is_only_reference(x: Any) -> bool:
    """Whether reference counts prove that no other tensor is over the memory of `x`."""
    return _references(x) in _PRIVATE


class _Sample:
    """Holds an array that nothing else holds, to count its references: the counts differ between versions of Python."""

    def __init__(self, array: Array) -> None:
        self.array = array


_PRIVATE = {_references(_Sample(np.empty(2))), _references(_Sample(np.empty((2, 2)).reshape(4)))}


Flag = bool  # other names for `bool` and `device`, which a method and a parameter below hide
_Device = device

_NAMES = {dtype: name for name, dtype in TYPES.items()}


def _as(dtype: Any) -> Callable[[Any], Tensor]:
    """Makes the method that converts to `dtype`. Its name comes from the tensor type: `long` from LongTensor."""
    name = _NAMES[dtype].removesuffix("Tensor").lower()
    return as_method(lambda self: convert(self, dtype), name, f"As {dtype.name}.")


def conversion_target(target: tuple[Any, ...], dtype: Any, device: Any) -> tuple[Any, Any]:
    """Reads the arguments of `to`. Returns the dtype and the device to convert to; None: unchanged.

    Raises: DtypeError for anything that is not a device, dtype, tensor, bool or None.
    """
    for value in target:
        if isinstance(value, TensorBase):
            dtype = value.array.dtype
            device = value._device
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, _Device | int) or (isinstance(value, str) and value[:4] in ("cpu", "cpu:", "cuda")):
            device = value
        else:
            dtype = value
    return None if dtype is None else parse(dtype), device


class Conversion(TensorBase):
    """`to` and its short forms, which return the tensor itself if there is nothing to do; and pinned memory."""

    __slots__ = ()

    def to(
        self,
        *target: Any,
        dtype: Any = None,
        device: Any = None,
        non_blocking: Flag = False,
        copy: Flag = False,
        memory_format: memory_format = preserve_format,
    ) -> Tensor:
        """Converts to another dtype, another device, or both: to("cuda:0"), to(ddp.float64), to(other_tensor).

        memory_format: ddp.channels_last stores the channels of a pixel side by side, which GPUs convolve faster.
        copy: a copy even if nothing changes. non_blocking: the host does not wait for a copy from pinned memory to a
        GPU, or from a GPU to the CPU. A copy to the CPU goes to new pinned memory, and is complete when the current
        stream has done it (`ddp.cuda.synchronize()`, or an event). non_blocking and copy may follow by position, in
        this order.
        Raises: DtypeError for an argument that is neither dtype, device nor tensor; ArgumentError for a malformed
        device; DeviceError for a GPU that does not exist; CudaError if a copy, or earlier work on the GPU, fails;
        ShapeError for ddp.channels_last of anything but (N, C, H, W).
        """
        flags = [value for value in target if isinstance(value, bool)]
        dtype, device = conversion_target(target, dtype, device)
        x: Any = self
        if dtype is not None:
            x = convert(x, dtype)
        if device is not None:
            target_device = _Device(device)
            if target_device is not x._device and not (
                target_device.index is None and target_device.type == x._device.type
            ):
                x = transfer(x, target_device, non_blocking or flags[:1] == [True])
        if memory_format is not preserve_format:
            x = x._formatted(memory_format)
        return apply(elementwise.clone, (x,)) if x is self and (copy or flags[1:] == [True]) else x

    def _formatted(self, wanted: memory_format) -> Any:
        """This tensor if it has that memory format, else a copy that has it.

        Raises: ShapeError for ddp.channels_last of anything but (N, C, H, W).
        """
        array = self.array
        if wanted is not channels_last:
            return self if array.flags.c_contiguous else apply(elementwise.clone, (self,))
        if array.ndim != 4:
            raise ShapeError(f"channels_last: expected (N, C, H, W), got shape {array.shape}")
        return self if is_channels_last(array) else apply(elementwise.clone, (self,), last=True)

    def cpu(self) -> Tensor:
        """This tensor on the CPU: itself, or a copy from its GPU, which waits for the current stream."""
        return self.to(device=CPU)

    def cuda(self, device: Any = None, non_blocking: Flag = False) -> Tensor:
        """This tensor on a CUDA device, given by number or name; None: the current GPU.

        Raises: DeviceError if there is no such GPU, or for "cpu"; ArgumentError, DtypeError for a malformed device.
        """
        target = _Device("cuda") if device is None else _Device(device)
        if target.type != "cuda":
            raise DeviceError(f"cuda: expected a CUDA device, got {target}")
        if target.index is None:
            target = _Device("cuda", target.xp.cuda.runtime.getDevice())
        return self.to(device=target, non_blocking=non_blocking)

    def pin_memory(self, device: Any = None) -> Tensor:
        """A copy in page-locked memory, outside the graph. A non_blocking copy from there to a GPU does not wait.

        Returns the tensor itself if it is pinned already or has no elements, or if there is no GPU.
        Raises: DeviceError for a tensor on a GPU.
        """
        if self._device is not CPU:
            raise DeviceError(f"pin_memory: only memory of the CPU can be pinned, and this tensor is on {self._device}")
        xp = found_cupy()
        if xp is None or not self.array.size or self.is_pinned():
            return self.to()
        from ddp._cuda import copies

        array = copies.empty_pinned(xp, self.array.shape, self.array.dtype)
        array[...] = self.array
        return wrap(array, CPU)

    def is_pinned(self, device: Any = None) -> Flag:
        """Whether the memory is page-locked."""
        if self._device is not CPU or (xp := found_cupy()) is None:
            return False
        from ddp._cuda import copies

        return copies.is_pinned(xp, self.array)

    def record_stream(self, stream: Any) -> None:
        """Marks this tensor, which was made on another stream, as used by work on `stream` (a `ddp.cuda.Stream`).

        When the tensor is freed, its memory is reused only after the work that was launched on `stream` until then.
        Without this call, later work of the stream that made the tensor may reuse the memory at once.

        Raises: DeviceError for a tensor on the CPU; ArgumentError unless `stream` is a `ddp.cuda.Stream`.
        """
        if self._device is CPU:
            raise DeviceError("record_stream: this tensor is on the CPU, whose work no stream runs")
        device_stream = getattr(stream, "_device_stream", None)
        if device_stream is None:
            raise ArgumentError(f"record_stream: expected a ddp.cuda.Stream, got {type(stream).__name__}")
        from ddp._cuda import stream_order

        stream_order.record(self.array, device_stream)

    def type(self, dtype: Any = None, non_blocking: Flag = False) -> Any:
        """Converts to another dtype. A tensor type, such as "ddp.cuda.FloatTensor", also selects the device.

        Without an argument, returns the name of this tensor's type: "ddp.FloatTensor", or "ddp.cuda.FloatTensor".

        Raises: DtypeError for an unknown type or dtype; DeviceError if there is no GPU for a CUDA type.
        """
        place_ = "ddp." if self._device is CPU else "ddp.cuda."
        if dtype is None:
            return place_ + _NAMES[self.array.dtype]
        if isinstance(dtype, str) and dtype.endswith("Tensor"):
            name = dtype.rpartition(".")[2]
            if name not in TYPES:
                raise DtypeError(f"type: {dtype!r}: expected one of {', '.join(TYPES)}")
            return self.to(device="cuda" if ".cuda." in dtype else CPU, dtype=TYPES[name])
        if hasattr(dtype, "device_type"):  # ddp.FloatTensor, ddp.cuda.FloatTensor
            return self.to(device=dtype.device_type, dtype=dtype.dtype)
        return self.to(dtype=dtype)

    def type_as(self, other: TensorBase) -> Tensor:
        """Converts to the dtype and device of `other`."""
        return self.to(other)

    half = _as(dtypes.float16)
    bfloat16 = _as(dtypes.bfloat16)
    float = _as(dtypes.float32)
    double = _as(dtypes.float64)
    byte = _as(dtypes.uint8)
    char = _as(dtypes.int8)
    short = _as(dtypes.int16)
    int = _as(dtypes.int32)
    long = _as(dtypes.int64)
    bool = _as(dtypes.bool_)


def transfer(x: TensorBase, target: device, non_blocking: Flag = False) -> Tensor:
    """Moves `x` to `target`; in backward, the gradient moves back."""
    result = wrap(to_device(x.array, target, non_blocking), target)
    result._device = device_of(result.array)
    if target.type == x._device.type == "cuda":  # between two GPUs
        _engine.stream_sync.enable()
    if x.edge is not None and _engine.is_grad_enabled():
        record(Node(elementwise.transfer, target.xp, (x.edge,), (True,), (), (), x._device), [result])
    return result
