"""Making tensors: Python floats become float32, integers int64, and NumPy arrays keep their dtype, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddp import _device
from ddp._device import CPU, device_of, generator, place
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import DEFAULT, float16, float64, int64, parse
from ddp._tensor.shaping import spread
from ddp.errors import ArgumentError, DtypeError, ShapeError

Where = _device.device | str | None
Size = int | Sequence[int]


def _array(data: Any, dtype: Any) -> Any:
    """`data` as an array of a supported dtype: shared with an array or tensor where the dtype allows it."""
    if isinstance(data, TensorBase):
        array = data._array
    elif isinstance(data, np.ndarray | np.generic) or hasattr(data, "__cuda_array_interface__"):
        array = data if hasattr(data, "flags") and not isinstance(data, np.generic) else np.asarray(data)
    else:
        try:
            array = np.asarray(data)
        except ValueError as error:
            raise ShapeError(f"tensor: the nested lists are ragged: {error}") from error
        if dtype is None and array.dtype == float64:
            array = array.astype(DEFAULT)
    return array.astype(parse(array.dtype if dtype is None else dtype), copy=False)


def tensor(data: Any, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """A new tensor with a copy of `data`: numbers, nested sequences, an array or a tensor.

    Raises: ShapeError for ragged sequences; DtypeError for what is no number, or if an integer should require grad.
    """
    array = _array(data, dtype)
    array = array.copy() if isinstance(data, TensorBase) or array is data or _shares(array, data) else array
    where = device_of(array) if device is None else _device.device(device)
    return _made(array, where, requires_grad)


def _shares(array: Any, data: Any) -> bool:
    return isinstance(data, np.ndarray) and np.may_share_memory(array, data)


def as_tensor(data: Any, dtype: Any = None, device: Where = None) -> Tensor:
    """`data` as a tensor, sharing the memory of an array where dtype and device allow it; a tensor as it is."""
    if isinstance(data, Tensor):
        return data.to(device=device, dtype=dtype)
    array = _array(data, dtype)
    return _made(array, device_of(array) if device is None else _device.device(device), False)


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that shares the memory of `array`. Raises: DtypeError for anything but an array of a known dtype."""
    if not isinstance(array, np.ndarray):
        raise DtypeError(f"from_numpy: expected a NumPy array, got {type(array).__name__}")
    parse(array.dtype)
    return wrap(array, CPU)


def _made(array: Any, where: _device.device, requires_grad: bool) -> Tensor:
    array = place(array, where)
    x = wrap(array, device_of(array))
    return x.requires_grad_() if requires_grad else x


def _new(
    make: Callable[[Any, Any], Any], dtype: Any, device: Where, requires_grad: bool, default: Any = DEFAULT
) -> Tensor:
    """What `make(xp, dtype)` returns, as a tensor. The array is made where it will live."""
    where = CPU if device is None else _device.device(device)
    array = make(where.xp, parse(default if dtype is None else dtype))
    return _made(array, where, requires_grad)


def zeros(*size: Size, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Zeros: zeros(2, 3) or zeros((2, 3))."""
    return _new(lambda xp, dtype: xp.zeros(spread(size), dtype), dtype, device, requires_grad)


def ones(*size: Size, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Ones: ones(2, 3) or ones((2, 3))."""
    return _new(lambda xp, dtype: xp.ones(spread(size), dtype), dtype, device, requires_grad)


def empty(*size: Size, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Memory as it comes: every element is to be written before it is read."""
    return _new(lambda xp, dtype: xp.empty(spread(size), dtype), dtype, device, requires_grad)


def full(size: Size, fill_value: float, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """`fill_value` everywhere; the dtype follows it unless given: bool, int64 or float32."""
    if dtype is None:
        dtype = _dtype_of(fill_value)
    return _new(lambda xp, dtype: xp.full(spread((size,)), fill_value, dtype), dtype, device, requires_grad)


def _dtype_of(number: float) -> Any:
    return bool if isinstance(number, bool) else int64 if isinstance(number, int) else DEFAULT


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    dtype: Any = None,
    device: Where = None,
    requires_grad: bool = False,
) -> Tensor:
    """start, start + step, ... below end: shape (ceil((end - start) / step),); int64 unless a number is a float."""
    if end is None:
        start, end = 0, start
    if step == 0:
        raise ArgumentError("arange: step is 0")
    if dtype is None:
        dtype = DEFAULT if any(isinstance(n, float) for n in (start, end, step)) else int64
    return _new(lambda xp, dtype: xp.arange(start, end, step).astype(dtype), dtype, device, requires_grad)


def eye(n: int, m: int | None = None, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Ones on the diagonal: (n, m or n)."""
    return _new(lambda xp, dtype: xp.eye(n, m, dtype=dtype), dtype, device, requires_grad)


def _drawn(draw: str, size: tuple[Size, ...], dtype: Any, device: Where, requires_grad: bool) -> Tensor:
    where = CPU if device is None else _device.device(device)
    kind = parse(DEFAULT if dtype is None else dtype)
    if kind.kind != "f":
        raise DtypeError(f"random numbers are floating, not {kind}")
    # Generators draw no float16.
    array = getattr(generator(where), draw)(spread(size), dtype=DEFAULT if kind == float16 else kind)
    return _made(where.xp.asarray(array).astype(kind, copy=False), where, requires_grad)


def rand(*size: Size, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Uniform random numbers in [0, 1)."""
    return _drawn("random", size, dtype, device, requires_grad)


def randn(*size: Size, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Normally distributed random numbers of mean 0 and deviation 1."""
    return _drawn("standard_normal", size, dtype, device, requires_grad)


def randint(low: int, high: int, size: Size, dtype: Any = None, device: Where = None) -> Tensor:
    """Random integers in [low, high), int64 unless `dtype` says otherwise. Raises: ArgumentError for an empty range."""
    if high <= low:
        raise ArgumentError(f"randint: no integer is in [{low}, {high})")
    where = CPU if device is None else _device.device(device)
    drawn = where.xp.asarray(generator(where).integers(low, high, spread((size,))))
    return _made(drawn.astype(parse(int64 if dtype is None else dtype), copy=False), where, False)


def randperm(n: int, device: Where = None) -> Tensor:
    """0 to n - 1 in random order, int64."""
    where = CPU if device is None else _device.device(device)
    return _made(where.xp.asarray(generator(where).permutation(n)).astype(int64, copy=False), where, False)


def _like(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make` with the shape, dtype and device of another tensor."""

    def like(input: Tensor, dtype: Any = None, device: Where = None, requires_grad: bool = False) -> Tensor:
        return make(
            input.shape,
            dtype=input.dtype if dtype is None else dtype,
            device=input.device if device is None else device,
            requires_grad=requires_grad,
        )

    like.__name__ = like.__qualname__ = f"{make.__name__}_like"
    like.__doc__ = f"{make.__name__}() in the shape, dtype and device of `input`, unless given."
    return like


zeros_like = _like(zeros)
ones_like = _like(ones)
empty_like = _like(empty)
rand_like = _like(rand)
randn_like = _like(randn)


def full_like(
    input: Tensor, fill_value: float, dtype: Any = None, device: Where = None, requires_grad: bool = False
) -> Tensor:
    """`fill_value` everywhere, in the shape, dtype and device of `input`, unless given."""
    return full(
        input.shape,
        fill_value,
        input.dtype if dtype is None else dtype,
        input.device if device is None else device,
        requires_grad,
    )
