"""Recording arrays, with which the formulas of `ddp.ops` compute under create_graph.

A `RecordingArray` has the methods of an array and holds a tensor; a `recording_module` has the functions of NumPy or
CuPy for such arrays. With these two, a formula runs as on arrays, but each step is an op on tensors, so that its
results have a graph. Tensors cannot be used instead, because some of their methods differ from those of arrays (`size`,
`max`). Formulas may write, by `out=`, `+=` or `x[i] = y`. No memory changes then: the recording array gets a new
tensor, and so does the recording array that it is a view of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ddp._device import device_of
from ddp._tensor.base import FLOATS, Tensor, TensorBase, TensorFunction, apply, wrap
from ddp._tensor.elementwise import select_where
from ddp._tensor.operands import convert, operand_as_tensor, parse_sizes
from ddp.ops import elementwise, indexing, products, reduction, shape
from ddp.ops.arrays import RecordingModule
from ddp.ops.op import OPS, Op

FULL = slice(None)
_BASIC = (int, np.integer, slice, type(None), type(...))


def record(op: Op, *inputs: Any, **parameters: Any) -> RecordingArray:
    """Applies an op to recording arrays, arrays and numbers."""
    return RecordingArray(apply(op, [*map(as_operand, inputs)], **parameters))


def as_operand(x: Any) -> Any:
    """Converts `x` to an operand of ops on tensors: a tensor, or a number."""
    if isinstance(x, RecordingArray):
        return x.tensor
    if isinstance(x, np.generic):
        return x.item()
    return x if isinstance(x, TensorBase) or not hasattr(x, "dtype") else wrap(x, device_of(x))


def as_array(x: Any) -> Any:
    """Marks a recording array as compared, and returns its array. Returns anything else unchanged.

    No gradient passes through the result.
    """
    if not isinstance(x, RecordingArray):
        return x
    noted: RecordingArray | None = x
    while noted is not None:
        noted.compared = True
        noted = noted._base
    return x.tensor.array


class RecordingArray:
    """A tensor with the methods of an array. A view reads its base anew after the base was written to.

    compared: whether `as_array` has read it, for example to compute a mask or a sign
    """

    __slots__ = ("_base", "_read", "_replace", "_seen", "_tensor", "compared")
    __array_ufunc__ = None  # makes NumPy leave operators with arrays to this class
    __hash__ = None  # type: ignore[assignment]  # compared by element, as arrays are

    _tensor: Tensor
    _base: RecordingArray | None
    _read: TensorFunction
    _replace: TensorFunction
    _seen: Any

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._base = None
        self.compared = False

    def _view(self, read: TensorFunction, replace: TensorFunction) -> RecordingArray:
        """Makes a view of this array.

        read: takes a tensor and returns this view of it
        replace: takes a tensor and values, and returns the tensor with these values in this view
        """
        view = RecordingArray.__new__(RecordingArray)
        view._base = self
        view._read = read
        view._replace = replace
        view._seen = None
        view.compared = False
        return view

    @property
    def tensor(self) -> Tensor:
        """The current values. A view reads them again if its base has been written to."""
        if self._base is not None:
            whole = self._base.tensor
            if self._seen is not whole:
                self._seen = whole
                self._tensor = self._read(whole)
        return self._tensor

    def write(self, value: Any, index: Any = ...) -> None:
        """Replaces the elements that `index` selects by `value`, which broadcasts to them."""
        before = self.tensor
        value = as_operand(value)
        if isinstance(value, TensorBase):
            value = convert(value, before.array.dtype)
        if index is not ...:
            value = apply(indexing.setitem, (before, value), steps=(index,))
        elif not isinstance(value, TensorBase) or value.array.shape != before.array.shape:
            value = apply(indexing.setitem, (before.detach(), value), steps=(...,))
        if self._base is None:
            self._tensor = value
        else:
            self._base.write(self._replace(self._base.tensor, value))

    def __array__(self, *args: Any, **named: Any) -> Any:
        raise TypeError("NumPy was given a recording array, whose gradient would be lost")

    shape = property(lambda self: self.tensor.array.shape)
    dtype = property(lambda self: self.tensor.array.dtype)
    ndim = property(lambda self: self.tensor.array.ndim)
    size = property(lambda self: self.tensor.array.size)
    T = property(lambda self: self.transpose())

    def __len__(self) -> int:
        return len(self.tensor.array)

    def __getitem__(self, index: Any) -> RecordingArray:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, _BASIC) and not isinstance(part, bool) for part in parts):
            return RecordingArray(self.tensor[index])
        if not any(part is ... for part in parts):
            parts = (*parts, ...)  # with an Ellipsis, a single element is a view, too
        return self._view(
            lambda x: apply(indexing.getitem, (x,), index=parts),
            lambda x, v: apply(indexing.setitem, (x, v), steps=(parts,)),
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        # After x[index] += v, `value` is a view of this array that has already been written to.
        if not isinstance(value, RecordingArray) or value._base is not self:
            self.write(value, index)

    def reshape(self, *sizes: Any) -> RecordingArray:
        wanted = parse_sizes(sizes)
        return self._view(
            lambda x: apply(shape.reshape, (x,), shape=wanted),
            lambda x, v: apply(shape.reshape, (v,), shape=x.array.shape),
        )

    def transpose(self, *dims: Any) -> RecordingArray:
        order = parse_sizes(dims) if dims else range(self.ndim)[::-1]
        return record(shape.permute, self, dims=tuple([d % self.ndim for d in order]))

    def swapaxes(self, a: int, b: int) -> RecordingArray:
        return RecordingArray(self.tensor.transpose(a, b))

    def copy(self, order: str = "C") -> RecordingArray:
        return RecordingArray(self.tensor)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> Any:
        wanted = np.dtype(dtype)
        if wanted == self.dtype:
            return self.copy() if copy else self
        if wanted.kind not in FLOATS:
            return self.tensor.array.astype(wanted)
        return record(elementwise.cast, self, dtype=wanted)

    def take(self, where: Any, axis: int | None = None) -> RecordingArray:
        x = self.reshape(-1) if axis is None else self
        return x[shape.along(axis or 0, where)]

    def __matmul__(self, other: Any) -> RecordingArray:
        return record(products.matmul, self, other)

    def __neg__(self) -> RecordingArray:
        return record(elementwise.neg, self)

    def __pow__(self, power: Any) -> RecordingArray:
        return RecordingArray(self.tensor ** as_operand(power))


def _add_reduction(name: str, op: Op) -> None:
    def reduce(self: RecordingArray, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> RecordingArray:
        if axis is None:
            axis = range(self.ndim)
        axes = (axis,) if isinstance(axis, int) else axis
        # float32 stays float32: float64 would only reduce the rounding of sums.
        x = self.astype(dtype, copy=False) if dtype is not None and self.dtype.itemsize == 2 else self
        return record(op, x, dims=tuple([a % self.ndim for a in axes]), keepdim=keepdims)

    setattr(RecordingArray, name, reduce)


def _rounded(x: Any, other: Any) -> Any:
    """Rounds a Python number `x` to float16 if `other` is float16: ops on arrays do so, ops on tensors do not."""
    return float(np.float16(x)) if type(x) in (int, float) and other.dtype == "float16" else x


def _add_arithmetic(name: str, op: Op) -> None:
    function = getattr(operator, name)

    def compute(x: Any, y: Any) -> RecordingArray:
        left = as_operand(_rounded(x, y))
        right = as_operand(_rounded(y, x))
        if getattr(left, "dtype", None) == getattr(right, "dtype", None):
            return RecordingArray(apply(op, (left, right)))
        return RecordingArray(function(left, right))

    def in_place(self: RecordingArray, other: Any) -> RecordingArray:
        self.write(compute(self, other))
        return self

    setattr(RecordingArray, f"__{name}__", compute)
    setattr(RecordingArray, f"__r{name}__", lambda self, other: compute(other, self))
    setattr(RecordingArray, f"__i{name}__", in_place)


def _add_comparison(name: str) -> None:
    function = getattr(operator, name)
    setattr(RecordingArray, f"__{name}__", lambda self, other: function(as_array(self), as_array(other)))


for _name, _op in (("sum", reduction.sum), ("max", reduction.amax)):
    _add_reduction(_name, _op)
for _name, _op in (("add", elementwise.add), ("sub", elementwise.sub), ("mul", elementwise.mul)):
    _add_arithmetic(_name, _op)
_add_arithmetic("truediv", elementwise.div)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _add_comparison(_name)


class _RecordingModule(RecordingModule):
    """An array module whose functions also take recording arrays; for arrays, they call the module's own."""

    def __getattr__(self, name: str) -> Any:
        """Called when an attribute is first read. Gets it, wraps it if it is a function, and stores it."""
        value = getattr(self.module, name)
        if callable(value) and not isinstance(value, type):
            value = _function(self.module, name, value)
        setattr(self, name, value)
        return value


recording_module = lru_cache(2)(_RecordingModule)  # one for NumPy, one for CuPy


def _constant(array: Any) -> Any:
    """Wraps a new array as a recording array if it is floating, since recorded values may be written to it."""
    return RecordingArray(wrap(array, device_of(array))) if array.dtype.kind in FLOATS else array


def _is_recorded(x: Any) -> bool:
    return isinstance(x, RecordingArray) or (isinstance(x, list | tuple) and any(map(_is_recorded, x)))


def _function(module: Any, name: str, of_arrays: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an array module's function `name` take recording arrays, too."""

    def call(*args: Any, **named: Any) -> Any:
        if name in _MAKES:
            return _constant(of_arrays(*map(as_array, args), **named))
        if not _is_recorded((*args, *named.values())):
            return of_arrays(*args, **named)
        out = named.pop("out", None)
        dtype = named.pop("dtype", None)
        if name in _FLAT:
            return _constant(module.asarray(of_arrays(*map(as_array, args))))
        if dtype is not None:
            args = tuple([x.astype(dtype, copy=False) if hasattr(x, "astype") else x for x in args])
        result = _FUNCTIONS[name](*args, **named)
        if out is None:
            return result
        out.write(result)
        return out

    return call


_MAKES = {"zeros", "empty", "full", "zeros_like", "empty_like", "ones_like"}
# Step functions: their derivative is 0, so no gradient passes through their results.
_FLAT = {"equal", "floor_divide", "greater", "greater_equal", "isfinite", "isnan", "less", "less_equal", "not_equal"}
_FLAT |= {"rint", "sign", "trunc"}


def _as_tensors(x: Any, y: Any) -> list[Any]:
    """Converts both to tensors; a number gets the dtype of the other."""
    values = [as_operand(x), as_operand(y)]
    like = next(value for value in values if isinstance(value, TensorBase) and value.array.dtype.kind in FLOATS)
    return [operand_as_tensor(value, like) for value in values]


def _where(condition: Any, x: Any, y: Any) -> RecordingArray:
    values = _as_tensors(x, y)
    mask = wrap(values[0].device.xp.asarray(condition), values[0].device)
    return RecordingArray(select_where(mask, *values))


def _split(x: RecordingArray, sections: int, axis: int) -> list[RecordingArray]:
    lengths = (x.shape[axis] // sections,) * sections
    return [x[place] for place in shape.split_slices(axis % x.ndim, lengths)]


_UNARY = ("abs", "cos", "cosh", "exp", "expm1", "log", "log1p", "sin", "sinh", "sqrt", "square", "tanh")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: partial(record, OPS[name]) for name in _UNARY},
    "add": operator.add,
    "array": lambda x, order="K": x.copy(),
    "ascontiguousarray": lambda x, dtype=None: x.astype(dtype or x.dtype, copy=False),
    "broadcast_to": lambda x, sizes: x if x.shape == sizes else record(shape.expand, x, shape=tuple(sizes)),
    "clip": lambda x, low, high: record(elementwise.clamp, x, low=low, high=high),
    "copyto": lambda x, v, where: x.write(_where(where, v, x)),
    "cumprod": lambda x, axis: record(reduction.cumprod, x, dim=axis % x.ndim),
    "cumsum": lambda x, axis: record(reduction.cumsum, x, dim=axis % x.ndim),
    "divide": operator.truediv,
    "flip": lambda x, axis: record(shape.flip, x, dims=axis if isinstance(axis, tuple) else (axis,)),
    "matmul": partial(record, products.matmul),
    "maximum": lambda x, y: record(elementwise.maximum, *_as_tensors(x, y)),
    "minimum": lambda x, y: record(elementwise.minimum, *_as_tensors(x, y)),
    "moveaxis": lambda x, source, target: RecordingArray(x.tensor.movedim(source, target)),
    "multiply": operator.mul,
    "negative": operator.neg,
    "put_along_axis": lambda x, index, v, axis: x.write(record(indexing.scatter, x, v, index=index, dim=axis)),
    "repeat": lambda x, n: x if n == 1 else RecordingArray(x.tensor.repeat_interleave(n)),
    "roll": lambda x, shifts, dims: record(shape.roll, x, shifts=shifts, dims=dims),
    "split": _split,
    "stack": lambda xs, axis=0: record(shape.stack, *xs, dim=axis),
    "subtract": operator.sub,
    "tril": lambda x, k=0: record(shape.tril, x, diagonal=k),
    "where": _where,
}
