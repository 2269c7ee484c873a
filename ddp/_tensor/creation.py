"""Making tensors that hold what a rule says: constants, ranges, and copies of another's shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ddp import _device
from ddp._device import CPU, device_of, on, place
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.dtypes import INTEGERS, float64, get_default_dtype, int64, is_float, of_number, parse
from ddp._tensor.operands import as_method, parse_sizes
from ddp.errors import ArgumentError, DeviceError, ShapeError

__all__ = ["arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "logspace"]
__all__ += ["get_default_device", "ones", "ones_like", "set_default_device", "zeros", "zeros_like"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ddp._tensor.core import Tensor

Where = _device.device | str | int | None
Size = int | Sequence[int]


def from_array(array: Any, where: _device.device, requires_grad: bool = False) -> Tensor:
    """`array` (NumPy or CuPy) on `where` as a tensor."""
    if where is not CPU or not isinstance(array, np.ndarray):
        array = place(array, where)
        where = device_of(array)
    x = wrap(array, where)
    return x.requires_grad_() if requires_grad else x


def resolve_device(device: Where) -> _device.device:
    """The device that was asked for; if none was, that of `with ddp.device(...)`, else the CPU."""
    if device is None:
        return _device.default.where
    found = _device.device(device)
    if found is not CPU:
        check_device_index(found)
    return found


def set_default_device(device: Where) -> None:
    """From now on this thread makes tensors there that name no device; None: on the CPU. See also `with ddp.device`."""
    _device.default.where = CPU if device is None else resolve_device(device)


def get_default_device() -> _device.device:
    """Where this thread makes tensors that name no device."""
    return _device.default.where


def check_device_index(where: _device.device) -> None:
    """Raises: DeviceError for a GPU that does not exist."""
    if where.index is not None and where.index >= (count := where.xp.cuda.runtime.getDeviceCount()):
        raise DeviceError(f"device {where}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")


def as_number(value: Any, name: str) -> Any:
    """A Python number from one, a NumPy scalar or a tensor of one element. Raises: ArgumentError for anything else."""
    if isinstance(value, bool | int | float):
        if isinstance(value, np.generic):
            return value.item()  # np.float64 is a float
        return value
    if hasattr(value, "item"):
        return value.item()
    raise ArgumentError(f"{name}: expected a number, got {type(value).__name__}")


def parse_shape(given: tuple[Size, ...], size: Size | None, name: str) -> tuple[int, ...]:
    """The shape from `make(2, 3)`, `make((2, 3))` or `make(size=(2, 3))`. Raises: ShapeError for a negative size."""
    shape = parse_sizes(given, size)
    if shape and min(shape) < 0:
        raise ShapeError(f"{name}: {shape} has a negative size")
    return shape


def pin(x: Tensor) -> Tensor:
    """A new tensor in page-locked memory, which requires grad if `x` does. Raises: DeviceError if that is on a GPU."""
    page_locked = x.detach().pin_memory()
    return page_locked.requires_grad_() if x.requires_grad else page_locked


_QUIET = np.errstate(all="ignore")  # as a decorator: what a dtype cannot hold is infinite


class Options(TypedDict, total=False):
    """What every creation function takes by name. dtype: None is the default one, or that of the numbers."""

    dtype: Any
    device: Where
    requires_grad: bool
    pin_memory: bool  # in page-locked memory, where there is a GPU to copy to


def new(
    make: Callable[[Any, np.dtype[Any]], Any],
    usual: np.dtype[Any] | None = None,
    *,
    dtype: Any = None,
    device: Where = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> Tensor:
    """What `make(xp, dtype)` returns, as a tensor on the device.

    usual: the dtype where none was asked for; None is the default one
    """
    kind = parse(dtype) if dtype is not None else usual or get_default_dtype()
    where = resolve_device(device)
    with on(where):
        array = make(np if pin_memory else where.xp, kind)
    x = from_array(array, where, requires_grad)
    return pin(x) if pin_memory else x


def rename(function: Any, name: str, doc: str) -> Any:
    """`function`, which stands in its module under this name."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _of_shape(name: str, doc: str) -> Callable[..., Tensor]:
    """The function that makes a tensor by the array module's function of this name, of a shape and a dtype."""

    def make(*sizes_: Size, size: Size | None = None, **options: Unpack[Options]) -> Tensor:
        shape = parse_shape(sizes_, size, name)
        return new(lambda xp, dtype: getattr(xp, name)(shape, dtype), **options)

    return rename(make, name, f"{doc} dtype, device, requires_grad, pin_memory: by name.")


zeros = _of_shape("zeros", "Zeros: zeros(2, 3) or zeros((2, 3)).")
ones = _of_shape("ones", "Ones: ones(2, 3) or ones((2, 3)).")
empty = _of_shape("empty", "Uninitialized memory: every element is to be written before it is read.")


def full(size: Size, fill_value: Any, **options: Unpack[Options]) -> Tensor:
    """`fill_value` everywhere; the dtype follows it unless given: bool, int64 or float32.

    Raises: ArgumentError if an integer dtype cannot hold the value.
    """
    value, shape = as_number(fill_value, "full"), parse_shape((size,), None, "full")

    @_QUIET
    def make(xp: Any, dtype: Any) -> Any:
        whole = dtype in INTEGERS and isinstance(value, float) and math.isfinite(value)
        try:
            return xp.full(shape, int(value) if whole else value, dtype)
        except (OverflowError, ValueError) as error:
            raise ArgumentError(f"full: {value} does not fit {dtype}") from error

    return new(make, of_number(value), **options)


def arange(start: Any = 0, end: Any = None, step: Any = 1, **options: Unpack[Options]) -> Tensor:
    """start, start + step, ... below end: shape (ceil((end - start) / step),); int64 unless a number is a float.

    Raises: ArgumentError if step is 0, leads away from end, or a number is not finite.
    """
    if end is None:
        start, end = 0, start
    first, last, stride = numbers = [as_number(n, "arange") for n in (start, end, step)]
    if stride == 0:
        raise ArgumentError("arange: step is 0")
    if not all(map(math.isfinite, numbers)):
        raise ArgumentError(f"arange: expected finite numbers, got {first}, {last}, {stride}")
    if (last - first) * stride < 0:
        raise ArgumentError(f"arange: step {stride} leads away from {last}, starting at {first}")

    @_QUIET
    def make(xp: Any, dtype: Any) -> Any:
        if dtype == int64:
            if not int(stride):
                raise ArgumentError(f"arange: step {step} is 0 as an integer")
            return xp.arange(int(first), int(last), int(stride), dtype)
        # start + i * step in float64 and rounded once: adding up steps would add up their errors.
        count, floating = math.ceil((last - first) / stride), is_float(dtype)
        steps = xp.arange(count, dtype=float64 if floating else int64)
        return (first + steps * stride if floating else int(first) + steps * int(stride)).astype(dtype)

    return new(make, None if any(isinstance(n, float) for n in numbers) else int64, **options)


def linspace(start: Any, end: Any, steps: int, **options: Unpack[Options]) -> Tensor:
    """`steps` numbers at equal distances from start to end, both included: (steps,)."""
    points = _points(start, end, steps, "linspace")
    return new(_QUIET(lambda xp, dtype: points(xp, dtype).astype(dtype)), **options)


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, **options: Unpack[Options]) -> Tensor:
    """base ** x for `steps` numbers x at equal distances from start to end, both included: (steps,)."""
    points = _points(start, end, steps, "logspace")
    return new(_QUIET(lambda xp, dtype: (float(base) ** points(xp, dtype)).astype(dtype)), **options)


def _points(start: Any, end: Any, steps: int, name: str) -> Callable[[Any, np.dtype[Any]], Any]:
    """A function of array module and dtype: the points in float64. Raises: ArgumentError for negative steps."""
    first, last = as_number(start, name), as_number(end, name)
    if steps < 0:
        raise ArgumentError(f"{name}: steps={steps} is negative")

    def points(xp: Any, kind: np.dtype[Any]) -> Any:
        low, high = (first, last) if is_float(kind) else (int(first), int(last))  # before the steps, as in PyTorch
        if steps == 1:
            return xp.full((1,), float(low))
        # From each end towards the middle, so that both ends are exact.
        at, step = xp.arange(steps, dtype=float64), (high - low) / max(steps - 1, 1)
        return xp.where(at < steps // 2, low + at * step, high - (steps - 1 - at) * step)

    return points


def eye(n: int, m: int | None = None, **options: Unpack[Options]) -> Tensor:
    """Ones on the diagonal: (n, m or n)."""
    parse_shape((n, n if m is None else m), None, "eye")
    return new(lambda xp, dtype: xp.eye(n, m, dtype=dtype), **options)


def options_like(x: TensorBase, options: Mapping[str, Any]) -> Any:
    """The options, with the dtype and device of `x` where none were asked for."""
    asked = {name: value for name, value in options.items() if value is not None}
    return {"dtype": x.array.dtype, "device": x._device, **asked}


def like_form(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make` with the shape, dtype and device of another tensor."""

    def of_input(input: TensorBase, *arguments: Any, **options: Any) -> Tensor:
        return make(input.array.shape, *arguments, **options_like(input, options))

    name = make.__name__
    of_input.__module__ = make.__module__
    return rename(of_input, f"{name}_like", f"{name}() in the shape, dtype and device of `input`, unless given.")


zeros_like, ones_like, empty_like, full_like = like_form(zeros), like_form(ones), like_form(empty), like_form(full)


def _method(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make` with the dtype and device of this tensor."""
    name = f"new_{make.__name__}"

    def method(self: TensorBase, *sizes_: Size, size: Size | None = None, **options: Unpack[Options]) -> Tensor:
        return make(parse_shape(sizes_, size, name), **options_like(self, options))

    return as_method(method, name, f"{make.__name__}() in the dtype and on the device of this tensor, unless given.")


class Making(TensorBase):
    """New tensors in the dtype and on the device of this one, unless given."""

    __slots__ = ()

    new_zeros, new_ones, new_empty = _method(zeros), _method(ones), _method(empty)

    def new_full(self, size: Size, fill_value: Any, **options: Unpack[Options]) -> Tensor:
        """`fill_value` everywhere, in the given shape."""
        return full(size, fill_value, **options_like(self, options))
