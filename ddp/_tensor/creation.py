"""Creates tensors from constants, ranges, numbers, lists and arrays, and by PyTorch's older tensor types.

Python floats become the default dtype, integers int64, and arrays keep their dtype, as in PyTorch. `as_tensor` and
`from_numpy` share the memory of read-only arrays, too: reading the tensor is safe, and writing to it in place raises.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ddp import _device
from ddp._device import CPU, device_of, on, to_device
from ddp._tensor import dtypes
from ddp._tensor.base import Tensor, TensorBase, TensorFunction, wrap
from ddp._tensor.dtypes import Dtype, Number
from ddp._tensor.interop import dlpack_device, is_bfloat16, take_dlpack
from ddp._tensor.operands import REJECTED, as_ddp_error, as_method, check_tensor, parse_int, parse_sizes
from ddp._tensor.results import Size as Shape
from ddp.errors import ArgumentError, DdpError, DeviceError, DtypeError, ShapeError
from ddp.ops.arrays import Ints

__all__ = ["arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "logspace"]
__all__ += ["as_tensor", "asarray", "from_dlpack", "from_numpy", "frombuffer", "scalar_tensor", "tensor"]
__all__ += ["get_default_device", "ones", "ones_like", "set_default_device", "zeros", "zeros_like"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

Where = _device.device | str | int | None
Size = int | Sequence[int]


def from_array(array: Any, device: _device.device, requires_grad: bool = False) -> Tensor:
    """Moves `array` (NumPy or CuPy) to `device`, and wraps it as a tensor."""
    if device is not CPU or not isinstance(array, np.ndarray):
        array = to_device(array, device)
        device = device_of(array)
    x = wrap(array, device)
    return x.requires_grad_() if requires_grad else x


def resolve_device(device: Where) -> _device.device:
    """Returns `device` as a `ddp.device`; for None, this thread's default device.

    Raises: DeviceError for "cuda:INDEX" if there is no such GPU; ArgumentError, DtypeError for a malformed device.
    """
    if device is None:
        return _device.default.device
    result = _device.device(device)
    if result.index is not None and result.index >= (count := result.xp.cuda.runtime.getDeviceCount()):
        raise DeviceError(f"device {result}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    return result


def set_default_device(device: Where) -> None:
    """Sets the device on which this thread creates tensors by default; None: the CPU. See also `with ddp.device()`."""
    _device.default.device = CPU if device is None else resolve_device(device)


def get_default_device() -> _device.device:
    """The device on which this thread creates tensors if none is given."""
    return _device.default.device


def as_number(value: Any, name: str) -> Any:
    """Converts a number, a NumPy scalar or a tensor of one element to a Python number.

    Raises: ArgumentError for anything else.
    """
    try:
        number = value.item() if hasattr(value, "item") else value
    except ValueError as error:
        raise as_ddp_error(name, error) from error
    if not isinstance(number, Number):
        raise ArgumentError(f"{name}: expected a number, got {type(value).__name__}")
    return number


def parse_shape(given: tuple[Size, ...], size: Size | None, name: str) -> Ints:
    """The shape from `make(2, 3)`, `make((2, 3))` or `make(size=(2, 3))`.

    Raises: ShapeError for a negative size; DtypeError for sizes that are not integers; ArgumentError for two shapes at
    once.
    """
    shape = parse_sizes(given, size)
    if shape and min(shape) < 0:
        raise ShapeError(f"{name}: {shape} has a negative size")
    return shape


def parse_count(n: Any, name: str) -> int:
    """Converts a number of elements to an int. Raises: DtypeError if `n` is not an integer; ArgumentError if n < 0."""
    count = parse_int(n, name, "a number of elements")
    if count < 0:
        raise ArgumentError(f"{name}: expected a number of elements, got {count}")
    return count


def pin(x: Tensor) -> Tensor:
    """Copies `x` to page-locked memory if there is a GPU; keeps requires_grad. Raises: DeviceError if x is on a GPU."""
    page_locked = x.detach().pin_memory()
    return page_locked.requires_grad_(x.requires_grad)


_QUIET = np.errstate(all="ignore")  # a decorator: numbers too large for a dtype become infinite, without a warning


class Options(TypedDict, total=False):
    """Options that functions such as `zeros` and `arange` take by name.

    dtype: if None, the default dtype or the dtype of the given numbers
    """

    dtype: Any
    device: Where
    requires_grad: bool
    pin_memory: bool  # in page-locked memory, if there is a GPU to copy to


def new(
    make: Callable[[Any, Dtype], Any],
    usual: Dtype | None = None,
    *,
    dtype: Any = None,
    device: Where = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> Tensor:
    """Creates a tensor on the device from the array that `make(xp, dtype)` returns.

    usual: the dtype if `dtype` is None; None: the default dtype

    Raises: errors of the array module become ArgumentError or DtypeError: see `as_ddp_error`.
    """
    dtype = dtypes.parse(dtype) if dtype is not None else usual or dtypes.get_default_dtype()
    target = resolve_device(device)
    try:
        with on(target):
            array = make(np if pin_memory else target.xp, dtype)
    except DdpError:
        raise
    except REJECTED as error:
        raise as_ddp_error("a new tensor", error) from error
    x = from_array(array, target, requires_grad)
    return pin(x) if pin_memory else x


def rename(function: Any, name: str, doc: str) -> Any:
    """Sets the name of a function, by which pickle finds it and `repr` shows it, and its docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _of_shape(name: str, doc: str) -> TensorFunction:
    """Makes the creation function `name`: it passes a shape and a dtype to the array module's function of that name."""

    def make(*sizes_: Size, size: Size | None = None, **options: Unpack[Options]) -> Tensor:
        shape = parse_shape(sizes_, size, name)
        return new(lambda xp, dtype: getattr(xp, name)(shape, dtype), **options)

    return rename(make, name, f"{doc} dtype, device, requires_grad, pin_memory: by name.")


zeros = _of_shape("zeros", "Zeros: zeros(2, 3) or zeros((2, 3)).")
ones = _of_shape("ones", "Ones: ones(2, 3) or ones((2, 3)).")
empty = _of_shape("empty", "Uninitialized memory: every element is to be written before it is read.")


def full(size: Size, fill_value: Any, **options: Unpack[Options]) -> Tensor:
    """A tensor filled with `fill_value`. Without `dtype`: bool for a bool, int64 for an int, the default for a float.

    Raises: ArgumentError if the value is not a number, or if an integer dtype cannot hold it; ShapeError for a negative
    size; DtypeError for sizes that are not integers, or an unknown dtype.
    """
    value = as_number(fill_value, "full")
    shape = parse_shape((size,), None, "full")

    @_QUIET
    def make(xp: Any, dtype: Any) -> Any:
        whole = dtype in dtypes.INTEGERS and isinstance(value, float)
        try:
            return xp.full(shape, int(value) if whole else value, dtype)
        except (OverflowError, ValueError) as error:
            raise ArgumentError(f"full: {value} does not fit {dtype}") from error

    return new(make, dtypes.of_number(value), **options)


def arange(start: Any = 0, end: Any = None, step: Any = 1, **options: Unpack[Options]) -> Tensor:
    """start, start + step, ... before end: shape (ceil((end - start) / step),); int64 unless a number is a float.

    With dtype=int64, floats are truncated first. Rounding may give a last number that is not before end.

    Raises: ArgumentError if step is 0 (for a dtype that is not floating: after truncation), if step leads away
    from end, or if start, end or step is not a finite number; DtypeError for an unknown dtype.
    """
    if end is None:
        start, end = 0, start
    first, last, stride = numbers = [as_number(n, "arange") for n in (start, end, step)]
    if stride == 0 or not all(map(math.isfinite, numbers)) or (last - first) * stride < 0:
        raise ArgumentError(
            f"arange: from {first} to {last} by steps of {stride}: expected finite steps that lead there"
        )

    @_QUIET
    def make(xp: Any, dtype: Any) -> Any:
        if not int(stride) and not dtypes.is_float(dtype):
            raise ArgumentError(f"arange: step {stride} is 0 as an integer")
        if dtype == dtypes.int64:
            return xp.arange(int(first), int(last), int(stride), dtype)
        # start + i * step in float64 and rounded once: adding up steps would add up their errors.
        count = math.ceil((last - first) / stride)
        floating = dtypes.is_float(dtype)
        steps = xp.arange(count, dtype=dtypes.float64 if floating else dtypes.int64)
        return (first + steps * stride if floating else int(first) + steps * int(stride)).astype(dtype)

    return new(make, None if any(isinstance(n, float) for n in numbers) else dtypes.int64, **options)


def linspace(start: Any, end: Any, steps: int, **options: Unpack[Options]) -> Tensor:
    """`steps` numbers at equal distances from start to end, both included: (steps,). One step: start alone.

    Raises: ArgumentError for negative steps, or if start or end is not a number; DtypeError if steps is not an
    integer, or for an unknown dtype.
    """
    points = _points(start, end, parse_count(steps, "linspace"), "linspace")
    return new(_QUIET(lambda xp, dtype: points(xp, dtype).astype(dtype)), **options)


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, **options: Unpack[Options]) -> Tensor:
    """base ** x for `steps` numbers x at equal distances from start to end, both included: (steps,).

    One step: base ** start alone. Raises: as linspace.
    """
    points = _points(start, end, parse_count(steps, "logspace"), "logspace")
    radix = float(as_number(base, "logspace"))
    return new(_QUIET(lambda xp, dtype: (radix ** points(xp, dtype)).astype(dtype)), **options)


def _points(start: Any, end: Any, steps: int, name: str) -> Callable[[Any, Dtype], Any]:
    """Returns a function of array module and dtype that computes the points in float64.

    Raises: ArgumentError if start or end is not a number.
    """
    first = as_number(start, name)
    last = as_number(end, name)

    def points(xp: Any, dtype: Dtype) -> Any:
        # For an integer dtype, truncates the ends before it computes the steps, as PyTorch does.
        low, high = (first, last) if dtypes.is_float(dtype) else (int(first), int(last))
        if steps == 1:
            return xp.full((1,), float(low))
        # From each end towards the middle, so that both ends are exact.
        i = xp.arange(steps, dtype=dtypes.float64)
        step = (high - low) / max(steps - 1, 1)
        return xp.where(i < steps // 2, low + i * step, high - (steps - 1 - i) * step)

    return points


def eye(n: int, m: int | None = None, **options: Unpack[Options]) -> Tensor:
    """A matrix with ones on the diagonal and zeros elsewhere: (n, m), or (n, n) without m."""
    shape = parse_shape((n, n if m is None else m), None, "eye")
    return new(lambda xp, dtype: xp.eye(*shape, dtype=dtype), **options)


def options_like(x: TensorBase, options: Mapping[str, Any]) -> Any:
    """Returns the options; dtype and device are those of `x` if they are not given."""
    asked = {name: value for name, value in options.items() if value is not None}
    return {"dtype": x.array.dtype, "device": x._device, **asked}


def like_form(make: TensorFunction) -> TensorFunction:
    """Makes the function NAME_like, which calls `make` with the shape, dtype and device of another tensor."""

    name = make.__name__

    def of_input(input: TensorBase, *arguments: Any, **options: Any) -> Tensor:
        check_tensor(f"{name}_like", input)
        return make(input.array.shape, *arguments, **options_like(input, options))

    of_input.__module__ = make.__module__
    return rename(of_input, f"{name}_like", f"{name}() in the shape, dtype and device of `input`, unless given.")


zeros_like = like_form(zeros)
ones_like = like_form(ones)
empty_like = like_form(empty)
full_like = like_form(full)


def _method(make: TensorFunction) -> TensorFunction:
    """Makes the method new_NAME, which calls `make` with the dtype and device of its tensor."""
    name = f"new_{make.__name__}"

    def method(self: TensorBase, *sizes_: Size, size: Size | None = None, **options: Unpack[Options]) -> Tensor:
        return make(parse_shape(sizes_, size, name), **options_like(self, options))

    return as_method(method, name, f"{make.__name__}() in the dtype and on the device of this tensor, unless given.")


class Creation(TensorBase):
    """Methods that create tensors in the dtype and on the device of this one, unless others are given."""

    __slots__ = ()

    new_zeros = _method(zeros)
    new_ones = _method(ones)
    new_empty = _method(empty)

    def new_full(self, size: Size, fill_value: Any, **options: Unpack[Options]) -> Tensor:
        """A new tensor of the given shape, filled with `fill_value`."""
        return full(size, fill_value, **options_like(self, options))

    def new_tensor(self, data: Any, **options: Unpack[Options]) -> Tensor:
        """A new tensor with a copy of `data`, in this tensor's dtype and on its device, unless others are given."""
        return tensor(data, **options_like(self, options))


def construct(name: str, dtype: Dtype, given: tuple[Any, ...], device: Where) -> Tensor:
    """Makes an uninitialized tensor from sizes, a copy from data, or a tensor over the memory of a given tensor.

    Raises: DtypeError for a tensor of another dtype, or for data that are not numbers; ArgumentError for several
    arguments that are not sizes; ShapeError for a negative size.
    """
    if all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in given):
        return empty([operator.index(n) for n in given] or (0,), dtype=dtype, device=device)
    if len(given) > 1:
        raise ArgumentError(f"{name}: expected sizes, or one sequence of data, got {len(given)} arguments")
    x = given[0]
    if isinstance(x, Shape):
        return empty(x, dtype=dtype, device=device)
    if not isinstance(x, TensorBase):
        return tensor(x, dtype=dtype, device=device)
    if x.array.dtype != dtype:
        raise DtypeError(f"{name}: a tensor of {dtype} was expected, not {x.array.dtype}; use to()")
    return wrap(x.array, x._device, x)


class TypedTensor(type):
    """The type of `ddp.LongTensor` and similar classes: tensors of one dtype on one kind of device.

    Called with sizes, it makes an uninitialized tensor; with a sequence or an array, a copy; with a tensor, a tensor
    over the same memory. The default device has no effect on it. Every tensor of this dtype on such a device is an
    instance, as in `isinstance(x, ddp.LongTensor)`; `ddp.LongTensor | None` is a valid annotation. `x.type()` takes
    these types, too.

    Raises: when called, DtypeError for a tensor of another dtype, or for data that are not numbers; DeviceError for
    another kind of device; ArgumentError for several arguments that are not sizes; ShapeError for a negative size.
    """

    dtype: Dtype  # NumPy reads this attribute, so that the type can be given as a dtype
    device_type: str

    def __call__(cls, *given: Any, device: Where = None) -> Tensor:
        x = construct(cls.__name__, cls.dtype, given, cls.device_type if device is None else device)
        if x._device.type != cls.device_type:
            raise DeviceError(f"{cls.__name__}: expected a tensor on {cls.device_type}, got one on {x._device}")
        return x

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, TensorBase) and x.array.dtype == cls.dtype and x._device.type == cls.device_type

    def __repr__(cls) -> str:
        return f"{cls.__module__}.{cls.__name__}"


def _typed(module: str, name: str, dtype: Dtype, device_type: str) -> TypedTensor:
    doc = f"Tensors of {dtype} on {device_type}; called with sizes or data, it makes one."
    return TypedTensor(name, (), {"__module__": module, "__doc__": doc, "dtype": dtype, "device_type": device_type})


if TYPE_CHECKING:
    BFloat16Tensor = BoolTensor = ByteTensor = CharTensor = DoubleTensor = Tensor
    FloatTensor = HalfTensor = IntTensor = LongTensor = ShortTensor = Tensor
else:
    globals().update({name: _typed("ddp", name, dtype, "cpu") for name, dtype in dtypes.TYPES.items()})
    __all__ += list(dtypes.TYPES)
ON_CUDA = {name: _typed("ddp.cuda", name, dtype, "cuda") for name, dtype in dtypes.TYPES.items()}


def copy_on_device(array: Any) -> Any:
    """Copies `array` on its device: CuPy copies to the current GPU."""
    with on(device_of(array)):
        return array.copy()


def cast(array: Any, dtype: Dtype) -> Any:
    """Converts `array` to `dtype`, if it has another one. Numbers that do not fit become infinite, or wrap around."""
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"), on(device_of(array)):
        return array.astype(dtype)


def array_of(data: Any, dtype: Any, name: str) -> tuple[Any, bool]:
    """Converts `data` to an array of a supported dtype. Also returns whether the array is certainly a copy.

    Raises: ShapeError for ragged sequences; DtypeError for elements that are not numbers, or an unknown dtype;
    ArgumentError for a number, alone or in a sequence, that an integer dtype cannot hold.
    """
    if isinstance(data, Number) and not isinstance(data, np.generic):
        dtype = dtypes.of_number(data) if dtype is None else dtypes.parse(dtype)
        try:
            if dtype in dtypes.INTEGERS and math.isfinite(data):
                data = int(data)
            elif dtypes.is_float(dtype):
                data = float(data)  # NumPy has no conversion of large integers to bfloat16
            with np.errstate(over="ignore"):
                return np.array(data, dtype), True
        except (OverflowError, ValueError) as error:
            raise ArgumentError(f"{name}: {data} does not fit {dtype}") from error
    if isinstance(data, TensorBase):
        array = data.array
    elif isinstance(data, np.ndarray):
        array = data if type(data) is np.ndarray else data.view(np.ndarray)
    elif hasattr(data, "__dlpack__") and is_bfloat16(data):
        array = take_dlpack(data, dlpack_device(data))  # only DLPack has a name for bfloat16
    elif hasattr(data, "__cuda_array_interface__"):
        array = _device.imported(data)
    elif hasattr(data, "__array__") or hasattr(data, "__array_interface__"):
        array = np.asarray(data)
    else:
        return _of_sequence(data, dtype, name), True
    dtype = dtypes.parse(array.dtype if dtype is None else dtype)
    return cast(array, dtype), array.dtype != dtype or isinstance(data, np.generic)


def _of_sequence(data: Any, dtype: Any, name: str) -> Any:
    """Makes a new array from nested lists of numbers, arrays and tensors."""
    if isinstance(data, list | tuple) and any(hasattr(cls, "dtype") for cls in _element_types(data)):
        element_dtypes: set[Dtype] = set()
        data = _unwrap_tensors(data, element_dtypes)
        dtype = functools.reduce(dtypes.promote_types, element_dtypes) if dtype is None else dtype
    try:
        array = np.array(data)
    except ValueError as error:
        raise ShapeError(f"{name}: the nested lists are ragged: {error}") from error
    if dtype is None:
        return cast(array, dtypes.get_default_dtype() if array.dtype == dtypes.float64 else dtypes.parse(array.dtype))
    dtype = dtypes.parse(dtype)
    dtypes.parse(array.dtype)
    if dtype in dtypes.INTEGERS and array.size:
        limits = dtypes.iinfo(dtype)
        low = array.min()
        high = array.max()
        if not (low >= limits.min and high <= limits.max):
            raise ArgumentError(f"{name}: {low if not low >= limits.min else high} does not fit {dtype}")
    return cast(array, dtype)


def _element_types(data: Any) -> set[type]:
    """The types of the elements of nested lists."""
    classes = set(map(type, data))
    nested = any(issubclass(cls, list | tuple) for cls in classes)
    return classes.union(*[_element_types(part) for part in data if isinstance(part, list | tuple)] if nested else ())


def _unwrap_tensors(data: Any, element_dtypes: set[Dtype]) -> Any:
    """Replaces the tensors in nested lists by arrays. Adds the dtype of each element to `element_dtypes`."""
    if isinstance(data, list | tuple):
        return [_unwrap_tensors(part, element_dtypes) for part in data]
    element_dtypes.add(data.dtype if hasattr(data, "dtype") else dtypes.of_number(data))
    array = to_device(data.array, CPU) if isinstance(data, TensorBase) else data
    mixes = getattr(array, "dtype", None) != dtypes.bfloat16  # NumPy cannot promote bfloat16 with float16 or int64
    return array if mixes else array.astype(dtypes.float32)


def tensor(
    data: Any, *, dtype: Any = None, device: Where = None, requires_grad: bool = False, pin_memory: bool = False
) -> Tensor:
    """A new tensor with a copy of `data`: numbers, nested sequences, an array or a tensor.

    pin_memory: in page-locked memory, if there is a GPU to copy to.
    Raises: ShapeError for ragged sequences; DtypeError for an unknown dtype, for elements that are not numbers, for
    integers beyond int64 in a sequence, and if requires_grad is set and the dtype is not floating; ArgumentError for
    any other number that an integer dtype cannot hold, and for a malformed device; DeviceError for a GPU that does not
    exist. Numbers in an array or a tensor do not raise: they wrap around.
    """
    array, new = array_of(data, dtype, "tensor")
    target = _target_device(data, array, device)
    if not new and (target is CPU or device_of(array) is target or target.index is None):
        array = copy_on_device(array)
    x = from_array(array, target, requires_grad)
    return pin(x) if pin_memory else x


def as_tensor(data: Any, dtype: Any = None, device: Where = None) -> Tensor:
    """Converts `data` to a tensor, which shares the memory of an array if dtype and device allow it.

    A tensor is returned unchanged, unless another dtype or device is given.
    """
    if isinstance(data, TensorBase):
        x: Any = data
        return x if dtype is None and device is None else x.to(device=device, dtype=dtype)
    array, _ = array_of(data, dtype, "as_tensor")
    return from_array(array, _target_device(data, array, device))


def _target_device(data: Any, array: Any, device: Where) -> _device.device:
    """The device for a tensor of `data`: `device`, else where a tensor or CUDA array is, else the default device."""
    named = device is not None or (isinstance(array, np.ndarray) and not isinstance(data, TensorBase))
    return resolve_device(device) if named else device_of(array)


def asarray(
    obj: Any, *, dtype: Any = None, device: Where = None, copy: bool | None = None, requires_grad: bool = False
) -> Tensor:
    """Converts `obj` to a tensor, which shares its memory if possible (copy=None), never (True), or always (False).

    Raises: ArgumentError if copy=False and the memory cannot be shared; and what `tensor` and `from_dlpack` raise.
    """
    if isinstance(obj, TensorBase) or not hasattr(obj, "__dlpack__") or hasattr(obj, "__array__"):
        array, new = array_of(obj, dtype, "asarray")
    else:
        array = from_dlpack(obj).array
        new = False
    target = _target_device(obj, array, device)
    moved = to_device(array, target)
    new = new or moved is not array
    if copy is False and new:
        raise ArgumentError(f"asarray: a {type(obj).__name__} cannot become this tensor without a copy")
    if copy and not new:
        moved = copy_on_device(moved)
    if isinstance(obj, TensorBase) and moved is obj.array:
        return wrap(moved, obj._device, obj).requires_grad_(requires_grad)
    return from_array(moved, target, requires_grad)


def scalar_tensor(s: Any, *, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """A 0-d tensor of one number, of the default dtype unless `dtype` says otherwise."""
    dtype = dtypes.get_default_dtype() if dtype is None else dtypes.parse(dtype)
    return tensor(as_number(s, "scalar_tensor"), dtype=dtype, device=device, requires_grad=requires_grad)


def from_numpy(ndarray: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that shares the memory of `ndarray`. Raises: DtypeError for anything but an array of a known dtype."""
    if not isinstance(ndarray, np.ndarray):
        raise DtypeError(f"from_numpy: expected a NumPy array, got {type(ndarray).__name__}")
    dtypes.parse(ndarray.dtype)
    return wrap(ndarray if type(ndarray) is np.ndarray else ndarray.view(np.ndarray), CPU)


def frombuffer(buffer: Any, *, dtype: Any, count: int = -1, offset: int = 0, requires_grad: bool = False) -> Tensor:
    """A 1-d tensor that shares the memory of an object with the buffer protocol, from byte `offset` on.

    Raises: ArgumentError if the bytes are not a whole number of elements, or fewer than `count`, or if `offset` is
    outside the buffer; DtypeError for an unknown dtype, or an object without the buffer protocol.
    """
    try:
        array = np.frombuffer(buffer, dtypes.parse(dtype), count, offset)
    except REJECTED as error:
        raise as_ddp_error("frombuffer", error) from error
    return from_array(array, CPU, requires_grad)


def from_dlpack(ext_tensor: Any, *, device: Where = None, copy: bool | None = None) -> Tensor:
    """A tensor that shares the memory of an array of any library that supports DLPack.

    On a GPU the current stream waits for the other library's work so far; the host does not wait.
    copy: True: makes a copy; False: shares the memory, or raises. Raises: DtypeError for a dtype that tensors do not
    have, or if ext_tensor does not support DLPack; DeviceError for memory that is neither the CPU's nor CUDA's, or if
    `device` is a GPU that does not exist; ArgumentError if copy=False and `device` is not that of ext_tensor, or for a
    malformed device.
    """
    source = dlpack_device(ext_tensor)
    target = source if device is None else resolve_device(device)
    if copy is False and target not in (source, _device.device(source.type)):
        raise ArgumentError(f"from_dlpack: an array on {source} cannot become a tensor on {device} without a copy")
    array = take_dlpack(ext_tensor, source)
    return from_array(copy_on_device(array) if copy else array, target)


def from_foreign(value: Any) -> Any:
    """Converts an array or another library's tensor to a tensor over the same memory; returns anything else unchanged.

    Raises: DtypeError for a dtype that tensors do not have; DeviceError for memory that is neither the CPU's nor
    CUDA's; and what the other library raises for a tensor that it cannot share.
    """
    if isinstance(value, TensorBase) or not hasattr(value, "__dlpack__"):
        return value
    if isinstance(value, np.ndarray):
        return from_numpy(value)  # DLPack before version 1.0 has no read-only arrays
    # Not by __array__, after which PyTorch can never again resize the memory.
    return from_dlpack(value.detach() if hasattr(value, "detach") else value)
