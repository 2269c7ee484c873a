"""`cupy.ndarray`: numbers in a device's memory, which only work on a stream reads and writes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.collectives.backends.device.machine import GARBAGE

if TYPE_CHECKING:
    from tests.gpu.standin import Cupy


class Array:
    """Subclassed by each stand-in as its `ndarray`. Only closures on streams touch `_host`, its memory."""

    _cupy: Cupy
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple([int(n) for n in shape])
        dtype = np.dtype(dtype)
        self._cupy._known(dtype)
        if memptr is None:
            nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
            memptr = self._cupy.allocator(nbytes)
        self._set(np.ndarray(shape, dtype, memptr.mem.raw, memptr.offset, strides, order), memptr, None)

    def _set(self, host: Any, memptr: Any, base: Any) -> None:
        self._host = host
        self._memptr = memptr
        self.base = base
        self.shape = host.shape
        self.dtype = host.dtype
        self.strides = host.strides
        self.ndim = host.ndim
        self.size = host.size
        self.itemsize = host.itemsize
        self.nbytes = host.nbytes

    @property
    def device(self) -> Any:
        return self._cupy.cuda.Device(self._memptr.device_id)

    @property
    def flags(self) -> Any:
        flags = self._host.flags
        return SimpleNamespace(
            c_contiguous=flags.c_contiguous,
            f_contiguous=flags.f_contiguous,
            owndata=self.base is None,
            forc=flags.forc,
            fnc=flags.fnc,
        )

    @property
    def data(self) -> Any:
        address = self._host.__array_interface__["data"][0] if self.size else self._memptr.ptr
        return self._memptr + (address - self._memptr.ptr)

    def _view(self, host: Any) -> Any:
        array = object.__new__(type(self))
        array._set(host, self._memptr, self if self.base is None else self.base)
        return array

    # What leaves the device ------------------------------------------------------------------------------------------

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        return self._down("get", stream, out, blocking)

    def _down(self, kind: str, stream: Any = None, out: Any = None, blocking: bool = True) -> Any:
        cupy = self._cupy
        stream = cupy.current(self._memptr.device_id) if stream is None else stream
        if out is None:
            out = np.empty(self.shape, self.dtype)
        assert (out.dtype, out.shape) == (self.dtype, self.shape), "get: out is of another shape or dtype"
        source = self._host
        if source.size and not (source.flags.c_contiguous and out.flags.c_contiguous):
            with stream:  # as CuPy does it, for a copy that is contiguous
                pass
        waits = blocking or out.__array_interface__["data"][0] not in cupy.pinned
        cupy.refuse_capture(kind)
        if waits:
            cupy.record.wait(kind)
        cupy.put(stream.ptr, "copy down", lambda: np.copyto(out, source))
        if waits:
            cupy.finish(stream.ptr)
        return out

    def set(self, arr: Any, stream: Any = None) -> None:
        cupy = self._cupy
        assert isinstance(arr, np.ndarray), f"Only numpy.ndarray can be set to cupy.ndarray, not {type(arr)}"
        assert (arr.dtype, arr.shape) == (self.dtype, self.shape), "set: another shape or dtype"
        pinned = arr.size == 0 or arr.__array_interface__["data"][0] in cupy.pinned
        target = self._host
        into = cupy.current() if stream is None else stream
        if not self._host.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        cupy.refuse_capture("set")  # CuPy refuses pinned memory, too
        cupy.record.launches["copy up"] += 1
        if pinned and arr.size and arr.flags.c_contiguous:
            # An address is all that CUDA has of it: the array may die, and what is no longer pinned is not read.
            start = arr.__array_interface__["data"][0]
            nbytes = arr.nbytes
            dtype = arr.dtype
            shape = arr.shape

            def read() -> None:
                if start in cupy.pinned:
                    np.copyto(
                        target, np.frombuffer(ctypes.string_at(start, nbytes), np.uint8).view(dtype).reshape(shape)
                    )
                else:
                    target.fill(np.frombuffer(bytes([GARBAGE]) * dtype.itemsize, np.uint8).view(dtype)[0])

            cupy.put(into.ptr, "copy up", read)
        else:
            source = arr if pinned else arr.copy()
            cupy.put(into.ptr, "copy up", lambda: np.copyto(target, source))

    # Protocols -------------------------------------------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.data.ptr, False),
            "strides": None if self._host.flags.c_contiguous else self.strides,
            "stream": self._cupy.current().ptr,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._memptr.device_id

    def __dlpack__(self, stream: Any = None, **kwargs: Any) -> Any:
        return Capsule(self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        ours = getattr(self._cupy, {"true_divide": "divide"}.get(ufunc.__name__, ufunc.__name__), None)
        if ours is None:
            return NotImplemented
        return getattr(ours, method)(
            *inputs, **{k: v[0] if k == "out" and len(v) == 1 else v for k, v in kwargs.items()}
        )

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        module = self._cupy
        for name in func.__module__.split(".")[1:]:
            module = getattr(module, name, None)
        ours = getattr(module, func.__name__, None)
        if ours is None or ours is func:
            return NotImplemented
        return ours(*args, **kwargs)

    # Indexing --------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Any:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return iter([self[i] for i in range(len(self))])

    def __getitem__(self, index: Any) -> Any:
        return self._cupy._getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._cupy._setitem(self, index, value)

    # Methods ---------------------------------------------------------------------------------------------------------

    @property
    def T(self) -> Any:
        return self._view(self._host.T)

    def view(self, dtype: Any = None, *args: Any) -> Any:
        return self._view(self._host.view(self.dtype if dtype is None else dtype))

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return self._cupy._viewed("reshape", lambda x: x.reshape(shape, order=order), self)

    def transpose(self, *axes: Any) -> Any:
        return self._view(self._host.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> Any:
        return self._view(self._host.swapaxes(a, b))

    def squeeze(self, axis: Any = None) -> Any:
        return self._view(self._host.squeeze(axis))

    def copy(self, order: str = "C") -> Any:
        return self._cupy._compute("copy", lambda x: x.copy(order), (self,))

    def astype(self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True) -> Any:
        dtype = np.dtype(dtype)
        self._cupy._known(dtype)
        if not copy and dtype == self.dtype and order == "K":
            return self
        return self._cupy._compute("astype", lambda x: x.astype(dtype, order), (self,))


class Capsule:
    """In the place of DLPack's capsule, which could only be made in C."""

    def __init__(self, array: Array) -> None:
        self.array = array


def _forward(symbol: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    def there(self: Any, other: Any) -> Any:
        return _unless_unknown(self, symbol, self, other)

    def back(self: Any, other: Any) -> Any:
        return _unless_unknown(self, symbol, other, self)

    def inplace(self: Any, other: Any) -> Any:
        getattr(self._cupy, symbol)(self, other, out=self)
        return self

    return there, back, inplace


def _unless_unknown(array: Any, symbol: str, x: Any, y: Any) -> Any:
    other = y if array is x else x
    if not isinstance(other, Array | np.ndarray | np.generic | int | float | complex | bool):
        return NotImplemented
    return getattr(array._cupy, symbol)(x, y)


for _name, _symbol in {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
}.items():
    for _prefix, _method in zip(("", "r", "i"), _forward(_symbol), strict=True):
        setattr(Array, f"__{_prefix}{_name}__", _method)
for _name, _symbol in {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}.items():
    setattr(Array, f"__{_name}__", _forward(_symbol)[0])
for _name, _symbol in {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}.items():
    setattr(Array, f"__{_name}__", lambda self, s=_symbol: getattr(self._cupy, s)(self))
# What waits for a number.
for _name, _convert in {
    **{name: getattr(np.ndarray, name) for name in ("item", "tolist", "tobytes")},
    **{f"__{kind.__name__}__": kind for kind in (bool, int, float, complex, repr, str, format)},
}.items():
    setattr(
        Array,
        _name,
        lambda self, *args, n=_name, f=_convert: f(self._down(n.strip("_").replace("repr", "print")), *args),
    )
# Methods that are functions of the module.
for _name in (
    "all",
    "any",
    "argmax",
    "argmin",
    "argpartition",
    "argsort",
    "choose",
    "clip",
    "compress",
    "conj",
    "cumprod",
    "cumsum",
    "dot",
    "max",
    "mean",
    "min",
    "nonzero",
    "prod",
    "ptp",
    "put",
    "repeat",
    "round",
    "searchsorted",
    "std",
    "sum",
    "take",
    "trace",
    "var",
):
    setattr(Array, _name, lambda self, *args, f=_name, **kwargs: getattr(self._cupy, f)(self, *args, **kwargs))
Array.conjugate = Array.conj  # type: ignore[attr-defined]
