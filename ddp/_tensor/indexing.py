"""Indexing: splits an index into a basic index, which gives a view, and arrays that index this view, as in PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from ddp._device import CPU, to_device
from ddp._tensor.base import Parameters, Tensor, TensorBase, TensorFunction, apply, copy_if_needed, wrap
from ddp._tensor.creation import array_of
from ddp._tensor.dtypes import INTEGERS, Number, is_float
from ddp._tensor.inplace import assign, must_record
from ddp._tensor.operands import REJECTED, Other, as_ddp_error, as_method, check_operand, convert
from ddp._tensor.reductions import at_least_1d, resolve_axis
from ddp.errors import ArgumentError, DdpError, DtypeError, RangeError, ShapeError
from ddp.ops import indexing as ops
from ddp.ops import shape as shape_ops
from ddp.ops.arrays import Ints
from ddp.ops.op import Op

Step = tuple[Any, ...]
FULL = slice(None)
_PLAIN = (int, slice, type(None), type(...))
_OUT_OF_RANGE = "{name}: index {{value}} is out of range for {{limit}} elements"


def index_parts(x: TensorBase, index: Any) -> tuple[Step | None, Step]:
    """Splits an index in two: a basic index, which gives a view of `x` (None: `x` itself), and an index of that view.

    The second one is basic, too, if it has no arrays. Otherwise it has an array or a full slice for each dimension; a
    single mask stands for all dimensions of the mask. So integers are applied before arrays, as in PyTorch: NumPy would
    broadcast them together, and put the new dimension elsewhere. Every basic index has an Ellipsis, so that a single
    element is a view, too.

    Raises: RangeError for parts that are not indices, for too many parts, and for masks of another shape;
    ArgumentError for a step below 1.
    """
    parts = index if type(index) is tuple else _as_parts(index)
    for part in parts:
        cls = type(part)
        if cls not in _PLAIN:
            return _split_mixed(x, [_parse_part(part, x) for part in parts])
        if cls is slice and part.step is not None:
            _check_step(part)
    return None, _with_one_ellipsis(parts)


def _check_step(part: slice) -> None:
    if part.step < 1:
        raise ArgumentError(f"indexing by {part}: the step must be greater than zero; use flip()")


def _as_parts(index: Any) -> Step:
    """The parts of an index that is not a tuple.

    A list of fewer than 32 parts counts as a tuple if it holds a tensor, array, list, slice, None or Ellipsis.
    """
    if isinstance(index, Sequence) and not isinstance(index, str) and len(index) < 32:
        kinds = (TensorBase, np.ndarray, Sequence, slice, type(None), type(...))
        if any(isinstance(part, kinds) for part in index):
            return tuple(index)
    return (index,)


def _with_one_ellipsis(parts: Sequence[Any]) -> Step:
    """Adds an Ellipsis if there is none. Drops each Ellipsis after the first, because it stands for zero dimensions."""
    places = [i for i, part in enumerate(parts) if part is ...]
    if not places:
        return (*parts, ...)
    return tuple(part for i, part in enumerate(parts) if part is not ... or i == places[0])


def _parse_part(part: Any, x: TensorBase) -> Any:
    """Converts tensors, lists and arrays in an index to arrays on the device of `x`, or to numbers if they are 0-d.

    Other integers become int. Parts that are int, slice, None, Ellipsis or bool stay.

    Raises: RangeError for anything else, and for arrays of floats or uint8; ArgumentError for a step below 1.
    """
    cls = type(part)
    if cls is slice and part.step is not None:
        _check_step(part)
    if cls in _PLAIN or cls is bool:
        return part
    if isinstance(part, TensorBase):
        array = part.array
    elif isinstance(part, Sequence) and not isinstance(part, str):
        array = np.asarray(part) if len(part) else np.zeros(0, np.int64)
    elif hasattr(part, "dtype") and hasattr(part, "ndim"):
        array = part
    elif hasattr(cls, "__index__"):
        return part.__index__()
    else:
        raise RangeError(f"indexing by {cls.__name__}: expected integers, slices, Ellipsis, None, tensors or lists")
    if array.dtype.kind not in "biu" or array.dtype.char == "B":
        raise RangeError(f"indexing by {array.dtype}: expected int64 or int32, or bool for a mask")
    if not array.ndim:
        return array.item()
    return to_device(array, x._device)


def _split_mixed(x: TensorBase, parts: list[Any]) -> tuple[Step | None, Step]:
    xp = x._device.xp
    shape = x.array.shape
    if len(parts) == 1 and hasattr(parts[0], "dtype"):  # the most frequent case, handled fast
        part = parts[0]
        taken = part.ndim if part.dtype.kind == "b" else 1
        if shape and (part.dtype.kind != "b" or part.shape == shape[:taken]):
            part = part if part.dtype.kind == "b" else _check_bounds(x, part, shape[0])
            return None, (part, *(FULL,) * (len(shape) - taken))
    parts = list(_with_one_ellipsis(parts))
    named = sum([_dims_of(part) for part in parts])
    if named > len(shape):
        raise RangeError(f"too many indices: {named} for {len(shape)} dimensions")
    arrays = [part for part in parts if isinstance(part, bool) or hasattr(part, "dtype")]
    is_only_mask = len(arrays) == 1 and _is_mask(arrays[0])
    view: list[Any] = []
    places: list[Any] = []
    axis = 0  # the dimension of x that comes next
    for part in parts:
        if part is ...:
            skipped = len(shape) - named
            view.append(part)
            places.extend([FULL] * skipped)
            axis += skipped
        elif part is None or isinstance(part, slice):
            view.append(part)
            places.append(FULL)
        elif isinstance(part, bool):
            view.append(None)
            places.append(xp.zeros(int(part), xp.int64))
        elif isinstance(part, int):
            view.append(part)
        elif _is_mask(part):
            if part.shape != shape[axis : axis + part.ndim]:
                raise RangeError(f"a mask of shape {part.shape} stands at dimension {axis}")
            view.extend([FULL] * part.ndim)
            places.extend([part] if is_only_mask else xp.nonzero(part))
        else:
            view.append(FULL)
            places.append(_check_bounds(x, part, shape[axis]))
        axis += _dims_of(part)
    if not any(hasattr(place, "dtype") for place in places):
        return None, tuple(view)
    return None if all(part is ... or part == FULL for part in view) else tuple(view), tuple(places)


def _check_bounds(x: TensorBase, part: Any, n: int) -> Any:
    """Checks indices along a dimension of size n on a GPU: CuPy would wrap them around. NumPy checks them itself."""
    if x._device is CPU:
        return part
    return ops.check_index(x._device.xp, part, -n, n, RangeError, _OUT_OF_RANGE.format(name="x[index]"))


def _is_mask(part: Any) -> bool:
    return hasattr(part, "dtype") and part.dtype.kind == "b"


def _dims_of(part: Any) -> int:
    """How many dimensions of the tensor a part of an index stands for."""
    if part is None or part is ... or isinstance(part, bool):
        return 0
    return part.ndim if _is_mask(part) else 1


def copy_index(step: Step, *readers: Any) -> Step:
    """Copies the arrays in `step` if backward will read them for the gradient of one of `readers`."""
    return tuple([copy_if_needed(part, *readers) if hasattr(part, "dtype") else part for part in step])


def read_index(x: TensorBase, step: Step) -> Tensor:
    """Computes x[step]. An index with arrays has an array or a full slice for each dimension."""
    if any(hasattr(part, "dtype") for part in step):
        if x._device is not CPU:  # the host waits for the number of selected elements once, not again in backward
            parts: list[Any] = []
            for part in step:
                if _is_mask(part):
                    parts += x._device.xp.nonzero(part)
                else:
                    parts.append(part)
            step = tuple(parts)
        return apply(ops.index, (x,), places=copy_index(step, x))
    return apply(ops.getitem, (x,), index=step)


def drop_leading_ones(value: TensorBase) -> Any:
    """Drops leading dimensions of size 1: the value of an assignment may have more of them than its target."""
    shape = value.array.shape
    if not shape or shape[0] != 1:
        return value
    lead = next((i for i, n in enumerate(shape) if n != 1), len(shape))
    return apply(shape_ops.reshape, (value,), shape=shape[lead:])


def index_along(x: TensorBase, dim: int, index: Any) -> Step:
    """The index that takes `index` along dimension `dim`, and everything along the others."""
    return tuple([index if i == dim else FULL for i in range(x.array.ndim)])


def check_indices(x: TensorBase, index: Any, n: int, name: str, low: int = 0) -> Any:
    """The array of `index`, if it holds integers from `low` to n - 1.

    Raises: DtypeError if `index` is not a tensor of integers; RangeError naming an index that is out of range (on a
    GPU, at the next call that waits for the GPU).
    """
    if not isinstance(index, TensorBase) or index.array.dtype.kind not in "iu":
        raise DtypeError(f"{name}: the index is an int64 tensor, not {_dtype_or_class(index)}")
    array = to_device(index.array, x._device)
    if x._device is not CPU:
        return ops.check_index(x._device.xp, array, low, n, RangeError, _OUT_OF_RANGE.format(name=name))
    if (wrong := ops.first_outside(array, low, n)) is not None:
        raise RangeError(f"{name}: index {wrong} is out of range for {n} elements of shape {x.array.shape}")
    return array


def check_gather(x: TensorBase, dim: int, index: Any, name: str) -> tuple[Any, int]:
    """Checks `index`, which selects elements of `x` along `dim`. Returns its array and the non-negative dim.

    A 0-d index is valid for a vector `x`, and an index of shape (1,) for a 0-d `x`. Raises: ShapeError if a non-empty
    index has another number of dimensions than `x`, or if an index is larger than `x` in a dimension other than `dim`;
    DtypeError if index is not a tensor of integers; RangeError for a dimension or an index that is out of range.
    """
    axis = resolve_axis(x, dim, name)
    shape = x.array.shape
    array = check_indices(x, index, shape[axis] if shape else 1, name)
    if array.size == 1 and array.ndim + len(shape) == 1:
        array = array.reshape((1,) * len(shape))
    if array.ndim != len(shape) and array.size:
        raise ShapeError(f"{name}: index of shape {array.shape} for a tensor of shape {shape}: dimensions differ")
    if any(i != axis and m > n for i, (m, n) in enumerate(zip(array.shape, shape, strict=False))):
        raise ShapeError(f"{name}: index of shape {array.shape} is larger than {shape} apart from dimension {axis}")
    return array, axis


def _wrap_negative(index: Any, n: int) -> Any:
    """Adds n to the negative numbers in `index`, which count from the end of n elements."""
    array = index.array
    return wrap(array + (array < 0) * n, index._device)


def broadcast_shape(name: str, *shapes: Ints) -> Ints:
    """The shape that `shapes` broadcast to. Raises: ShapeError if they do not broadcast."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError as error:
        raise ShapeError(f"{name}: shapes {', '.join(map(str, shapes))} do not broadcast") from error


# A prepared write: the target (`x`, or `x` expanded), the op of target and value, the value, the op's parameters.
Call = tuple[TensorBase, "Op", Any, Parameters]


def _forms(build: Callable[..., Call]) -> tuple[TensorFunction, TensorFunction]:
    """Makes two methods from `build`: NAME, which writes into a copy, and NAME_, which writes into the tensor."""
    name = build.__name__[1:]
    first, _, *rest = inspect.signature(build).parameters.values()

    def copied(self: Any, *args: Any, **named: Any) -> Tensor:
        return _run(name, *build(self, name, *args, **named))

    def written(self: Any, *args: Any, **named: Any) -> Tensor:
        return _run_in_place(self, f"{name}_", *build(self, f"{name}_", *args, **named))

    for form in (copied, written):
        cast(Any, form).__signature__ = inspect.Signature([first.replace(name="self"), *rest])
    return as_method(copied, name, build.__doc__), as_method(written, f"{name}_", f"{name} in place. {build.__doc__}")


def _run(name: str, x: TensorBase, op: Op, value: Any, parameters: Parameters) -> Tensor:
    try:
        return apply(op, (x, value), **parameters)
    except DdpError:
        raise
    except IndexError as error:
        raise RangeError(f"{name} on a tensor of shape {x.array.shape}: {error}") from error
    except ValueError as error:
        raise ShapeError(f"{name} on a tensor of shape {x.array.shape}: {error}") from error
    except REJECTED as error:
        raise as_ddp_error(name, error) from error


def _run_in_place(x: Any, name: str, target: TensorBase, op: Op, value: Any, parameters: Parameters) -> Any:
    if target.array.shape != x.array.shape:
        raise ShapeError(f"{name}: a mask for shape {target.array.shape} does not broadcast to {x.array.shape}")
    tracked = must_record(x, name, value)
    result = _run(name, x, op, value, {**parameters, "within": True})
    if tracked:
        return assign(x, name, result)
    if result.array is not x.array:  # bfloat16 was added up in float32
        x.array[...] = result.array
    x.version.count += 1
    return x


def _dtype_or_class(x: Any) -> str:
    """The dtype of a tensor, or the class name of any other object, such as a NumPy array."""
    return str(x.array.dtype) if isinstance(x, TensorBase) else type(x).__name__


def _check_source(x: TensorBase, name: str, source: Any) -> Any:
    """`source`, if it is a tensor of the dtype of `x`. Raises: DtypeError if it is not."""
    if not isinstance(source, TensorBase) or source.array.dtype != x.array.dtype:
        got = _dtype_or_class(source)
        raise DtypeError(f"{name}: expected a tensor of {x.array.dtype}, as this one is, got {got}")
    return source


def _fill_value(x: TensorBase, name: str, value: Any) -> Any:
    """Converts `value`, a number or a 0-d tensor, for a write into `x`.

    Raises: ShapeError for a tensor with dimensions; ArgumentError for a number that the dtype of `x` cannot hold;
    DtypeError for anything else.
    """
    if isinstance(value, TensorBase):
        if value.array.ndim:
            raise ShapeError(f"{name}: the value is a number or a 0-d tensor, not of shape {value.array.shape}")
        if x.array.dtype not in INTEGERS or not is_float(value.array.dtype):
            return convert(value, x.array.dtype)
        value = value.array.item()  # checked as a number below: nan, for example, does not fit
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, Number):
        raise DtypeError(f"{name}: the value is a number or a 0-d tensor, not {type(value).__name__}")
    if isinstance(value, float) and is_float(x.array.dtype):
        return value
    return array_of(value, x.array.dtype, name)[0].item()


def _scatter(
    x: TensorBase, name: str, dim: int, index: TensorBase, src: Any = None, *, value: Any = None, reduce: Any = None
) -> Call:
    """self with each src[i, j, ...] written to index[i, j, ...] along `dim`, and to i, j, ... along other dimensions.

    src or value: a tensor of this dtype, or a number. index: int64, not larger than src, nor than self in another
    dimension than `dim`. reduce: None, or "add" to add instead of writing.
    """
    if reduce not in (None, "add"):
        raise ArgumentError(f"{name}: reduce is None or 'add', not {reduce!r}")
    if (src is None) == (value is None):
        raise ArgumentError(f"{name}: expected src or value, one of them")
    positions, axis = check_gather(x, dim, index, name)
    v = src if value is None else value
    if isinstance(src, TensorBase) and src.array.size == positions.size == 1 and src.array.ndim + positions.ndim == 1:
        v = v.reshape(positions.shape)
    if isinstance(v, TensorBase) and (v.array.ndim or not x.array.ndim):
        v = _check_source(x, name, v)
        shape = v.array.shape
        if positions.size and (
            len(shape) != positions.ndim or any(m > n for m, n in zip(positions.shape, shape, strict=False))
        ):
            raise ShapeError(f"{name}: index of shape {positions.shape} is larger than the source of {shape}")
    else:
        v = _fill_value(x, name, v)
    if not positions.size:  # an empty index selects nothing, so its shape does not matter
        positions = positions.reshape((0,) * x.array.ndim)
        v = 0
    if reduce != "add":
        return x, ops.scatter, v, {"index": positions, "dim": axis}
    if not isinstance(v, TensorBase):
        v = wrap(x._device.xp.full(positions.shape, v, x.array.dtype), x._device)
    return x, ops.scatter_add, v, {"index": positions, "dim": axis}


def _scatter_add(x: TensorBase, name: str, dim: int, index: TensorBase, src: TensorBase) -> Call:
    """self with each element of `src` added where `scatter` would write it."""
    return _scatter(x, name, dim, index, src, reduce="add")


def _check_vector(
    x: TensorBase, name: str, dim: int, index: TensorBase, negative: bool = False
) -> tuple[Any, Step, int]:
    """Checks `index`, a vector along `dim`. Returns its array, `index_along` of it, and the non-negative dim.

    A 0-d index counts as a vector. negative: indices may count from the end. Raises: ShapeError if `index` has more
    than one dimension, or `x` is 0-d; DtypeError if `index` is not a tensor of integers; RangeError for a dimension or
    an index that is out of range.
    """
    axis = resolve_axis(x, dim, name)
    n = x.array.shape[axis] if x.array.ndim else 1
    positions = check_indices(x, index, n, name, low=-n if negative else 0)
    if positions.ndim > 1 or not x.array.ndim:
        raise ShapeError(f"{name}: a vector is the index of a tensor of shape {x.array.shape}, not {positions.shape}")
    positions = positions.reshape(-1)
    return positions, index_along(x, axis, positions), axis


def _check_slices(x: TensorBase, name: str, positions: Any, axis: int, source: Any) -> Any:
    """Returns `source`, if it has one slice along `axis` of `x` per position. Raises: ShapeError, DtypeError if not."""
    source = _check_source(x, name, source)
    shape = x.array.shape
    n = positions.size
    number = source.array.ndim == 0 and n == 1 and len(shape) == 1
    if not number and source.array.shape != (*shape[:axis], n, *shape[axis + 1 :]):
        raise ShapeError(f"{name}: {n} places along dimension {axis} of {shape}, but a source of {source.array.shape}")
    return source


def _index_add(x: TensorBase, name: str, dim: int, index: TensorBase, source: Any, *, alpha: float = 1) -> Call:
    """self with alpha * source added at `index`, a vector, along `dim`."""
    positions, places, axis = _check_vector(x, name, dim, index)
    source = _check_slices(x, name, positions, axis, source)
    value = source if alpha == 1 else source * alpha
    return x, ops.index_add, value, {"places": copy_index(places, x, value)}


def _index_copy(x: TensorBase, name: str, dim: int, index: TensorBase, source: Any) -> Call:
    """self with the slices of source at `index`, a vector, along `dim`."""
    positions, places, axis = _check_vector(x, name, dim, index)
    source = _check_slices(x, name, positions, axis, source)
    return x, ops.setitem, source, {"steps": (copy_index(places, x, source),)}


def _index_fill(x: TensorBase, name: str, dim: int, index: TensorBase, value: Any) -> Call:
    """self with `value`, a number or a 0-d tensor, at `index`, a vector, along `dim`."""
    _, places, _ = _check_vector(x, name, dim, index, negative=True)
    value = _fill_value(x, name, value)
    return x, ops.setitem, value, {"steps": (copy_index(places, x, value),)}


def _index_put(x: TensorBase, name: str, indices: Any, values: Any, accumulate: bool = False) -> Call:
    """self with out[indices] = values; `accumulate`: with out[indices] += values. indices: a tuple of tensors."""
    values = drop_leading_ones(_check_source(x, name, values))
    try:
        view, places = index_parts(x, tuple(indices))
    except (RangeError, IndexError) as error:
        raise RangeError(f"{name} on a tensor of shape {x.array.shape}: {error}") from error
    places = copy_index(places, x, values)
    if not accumulate:
        return x, ops.setitem, values, {"steps": (places,) if view is None else (view, places)}
    if view is not None or not any(hasattr(place, "dtype") for place in places):
        raise ArgumentError(f"{name}: accumulate=True needs tensors of one dimension or more as indices")
    return x, ops.index_add, values, {"places": places}


def _masked(x: Any, name: str, mask: TensorBase) -> tuple[Any, Any]:
    """Expands `x` to the shape that `x` and the mask broadcast to. Returns the expanded tensor and the mask's array.

    Raises: DtypeError if the mask is not a tensor of bool; ShapeError if the two do not broadcast.
    """
    if not isinstance(mask, TensorBase) or mask.array.dtype.kind != "b":
        raise DtypeError(f"{name}: the mask is a bool tensor, not {_dtype_or_class(mask)}")
    shape = broadcast_shape(name, x.array.shape, mask.array.shape)
    return x if shape == x.array.shape else x.expand(shape), to_device(mask.array, x._device)


def _masked_fill(x: TensorBase, name: str, mask: TensorBase, value: Any) -> Call:
    """self with `value`, a number or a 0-d tensor, where `mask` (bool) holds; self and mask broadcast."""
    value = _fill_value(x, name, value)
    target, selected = _masked(x, name, mask)
    return target, ops.masked_fill, value, {"mask": copy_if_needed(selected, x, value)}


def _masked_scatter(x: TensorBase, name: str, mask: TensorBase, source: Any) -> Call:
    """self with the elements of source, in order, where `mask` (bool) holds; self and mask broadcast."""
    target, selected = _masked(x, name, mask)
    shape = target.array.shape
    xp = x._device.xp
    selected = xp.broadcast_to(selected, shape)
    value = _check_source(x, name, source).reshape(-1)
    n = value.array.size
    if x._device is CPU:
        if n < (count := int(selected.sum())):
            raise ShapeError(f"{name}: {count} places, but a source of shape {source.array.shape}")
        selected = copy_if_needed(selected, x, value)
        value = value[:count]
        return target, ops.setitem, value, {"steps": ((selected,),)}
    # On a GPU, the host does not wait for the number of places. Each place takes the element of `source` whose index is
    # the number of places before it.
    if not n:
        raise ShapeError(f"{name}: a source of shape {source.array.shape} for a tensor of shape {shape}")
    source_index = xp.cumsum(selected.reshape(-1), dtype="int64") - 1
    message = f"{name}: more places than the {{limit}} elements of the source"
    source_index = ops.check_index(xp, xp.where(selected.reshape(-1), source_index, 0), 0, n, ShapeError, message)
    value = apply(ops.index, (value,), places=(source_index,)).reshape(shape)
    return target, ops.masked_fill, value, {"mask": copy_if_needed(selected, x, value)}


class Indexing(TensorBase):
    """Reading and writing by index. Integers and slices give views, arrays and masks copies.

    If a tensor on a GPU is indexed by an array, the RangeError for an index out of range is raised by the next call
    that waits for the GPU.
    """

    __slots__ = ()

    def __getitem__(self, index: Any) -> Tensor:
        try:
            view, step = index_parts(self, index)
            return read_index(self if view is None else read_index(self, view), step)
        except (RangeError, IndexError) as error:
            raise RangeError(f"indexing a tensor of shape {self.array.shape}: {error}") from error

    def __setitem__(self, index: Any, value: Other) -> None:
        name = "x[index] = value"
        check_operand(value, name, value)
        try:
            view, step = index_parts(self, index)
            if must_record(self, name, value):
                if isinstance(value, TensorBase):
                    value = drop_leading_ones(convert(value, self.array.dtype))
                    if value._device is not self._device:
                        value = value.to(self._device)
                else:
                    value = wrap(self._device.xp.asarray(value, self.array.dtype), self._device)
                step = copy_index(step, self, value)
                steps = (step,) if view is None else (view, step)
                assign(self, name, apply(ops.setitem, (self, value), steps=steps, within=True))
                return
            source = to_device(drop_leading_ones(value).array, self._device) if isinstance(value, TensorBase) else value
            target = self.array if view is None else self.array[view]
            ops.assign(self._device.xp, target, step, source)
            self.version.count += 1
        except IndexError as error:
            raise RangeError(f"{name} on a tensor of shape {self.array.shape}: {error}") from error
        except DdpError:
            raise
        except OverflowError as error:
            raise as_ddp_error(name, error) from error
        except (TypeError, ValueError) as error:
            if isinstance(error, TypeError) and not getattr(value, "shape", ()):
                raise as_ddp_error(name, error) from error
            # NumPy raises TypeError if a mask is assigned an array of more than one dimension.
            raise ShapeError(f"{name} on a tensor of shape {self.array.shape}: {error}") from error

    def gather(self, dim: int, index: TensorBase, sparse_grad: bool = False) -> Tensor:
        """out[i, j, ...] is the element of self at index[i, j, ...] along `dim`, and at i, j, ... along the others.

        index: int64, not larger than self except along `dim`. sparse_grad: accepted, and changes nothing.
        Raises: ShapeError for an index of another number of dimensions, or one that is larger; DtypeError if it is not
        a tensor of integers; RangeError for a dimension or an index that is out of range.
        """
        x = at_least_1d(self)
        positions, axis = check_gather(x, dim, index, "gather")
        if not positions.size:
            return wrap(self._device.xp.zeros(positions.shape, self.array.dtype), self._device)
        result = apply(ops.gather, (x,), index=positions, dim=axis)
        return result if index.array.ndim else result.reshape(())

    def take_along_dim(self: Any, indices: Any, dim: int | None = None) -> Tensor:
        """As gather, but self and indices broadcast, and indices may be negative. Without `dim`, both are flattened."""
        if dim is None:
            return self.reshape(-1).gather(0, _wrap_negative(indices.reshape(-1), self.array.size))
        pair = (self, indices)
        if indices.array.ndim != self.array.ndim:
            raise ShapeError(f"take_along_dim: {self.array.shape} by {indices.array.shape}: dimensions differ")
        axis = resolve_axis(self, dim, "take_along_dim")
        common = broadcast_shape(
            "take_along_dim", *[(*x.array.shape[:axis], 1, *x.array.shape[axis + 1 :]) for x in pair]
        )
        x, index = (x.expand(*common[:axis], x.array.shape[axis], *common[axis + 1 :]) for x in pair)
        return x.gather(axis, _wrap_negative(index, x.array.shape[axis]))

    def take(self: Any, index: TensorBase) -> Tensor:
        """The elements at places `index` of the flattened tensor, in the shape of `index`.

        Raises: RangeError for an index out of range; DtypeError if `index` is not a tensor of integers.
        """
        flat = self.reshape(-1)
        array = check_indices(self, index, self.array.size, "take", low=-self.array.size)
        return read_index(flat, (array,)) if array.ndim else flat[int(array)]

    def index_select(self, dim: int, index: TensorBase) -> Tensor:
        """The slices at `index`, a vector, along `dim`.

        Raises: ShapeError if `index` has several dimensions; DtypeError if it is not a tensor of integers; RangeError
        for a dimension or an index that is out of range.
        """
        x = at_least_1d(self)
        result = read_index(x, _check_vector(x, "index_select", dim, index)[1])
        return result if self.array.ndim else result.reshape(())

    def masked_select(self, mask: TensorBase) -> Tensor:
        """A vector of the elements where `mask` (bool) holds; self and mask broadcast.

        Raises: DtypeError if the mask is not a tensor of bool; ShapeError if the two do not broadcast.
        """
        x, selected = _masked(self, "masked_select", mask)
        return x.reshape(-1)[self._device.xp.broadcast_to(selected, x.array.shape).reshape(-1)]

    def nonzero(self, as_tuple: bool = False) -> Any:
        """The indices of non-zero elements, int64 (n, ndim), in order; as_tuple: one vector for each dimension."""
        array = self.array
        xp = self._device.xp
        indices = xp.nonzero(array if array.ndim else array.reshape(1))
        if as_tuple:
            return tuple([wrap(index, self._device) for index in indices])
        rows = xp.stack(indices, axis=1)[:, : array.ndim]  # of a 0-d tensor: a row without indices if it is not zero
        return wrap(xp.ascontiguousarray(rows), self._device)

    def argwhere(self) -> Tensor:
        """The indices of non-zero elements, int64 (n, ndim), in order."""
        return self.nonzero()

    # If an index names a place several times, methods that add values add all of them; the others write one of them.
    scatter, scatter_ = _forms(_scatter)
    scatter_add, scatter_add_ = _forms(_scatter_add)
    index_add, index_add_ = _forms(_index_add)
    index_copy, index_copy_ = _forms(_index_copy)
    index_fill, index_fill_ = _forms(_index_fill)
    index_put, index_put_ = _forms(_index_put)
    masked_fill, masked_fill_ = _forms(_masked_fill)
    masked_scatter, masked_scatter_ = _forms(_masked_scatter)
