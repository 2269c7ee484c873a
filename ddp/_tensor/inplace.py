"""Writing into tensors.

A write counts in the version that all views of the memory share, so that backward notices a saved value that changed.
Where autograd must follow it, the tensor gets a new node over its old one; a leaf that requires grad, and a view of a
tensor that is still there, cannot be followed, and raise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from ddp import _device
from ddp._device import on, place
from ddp._engine import Leaf, Node, modes
from ddp._tensor.base import FLOATS, TensorBase, apply, wrap, written_in_graph
from ddp._tensor.device_guard import guarded_run, needs_guard
from ddp._tensor.elementwise import Elementwise
from ddp._tensor.indexing import assignable, index_parts, kept
from ddp._tensor.interop import array_of
from ddp._tensor.operands import REFUSED, Other, broadcast, convert, refusal
from ddp._tensor.reductions import Reductions
from ddp.errors import ArgumentError, DdpError, DeviceError, DtypeError, InplaceError, RangeError, ShapeError
from ddp.ops import elementwise, indexing

Self = TypeVar("Self", bound="InPlace")
T = TypeVar("T", bound=TensorBase)
P = ParamSpec("P")


def must_record(x: TensorBase, name: str, *operands: Other) -> bool:
    """Whether autograd must follow a write of `operands` into `x`. Raises: InplaceError if it cannot.

    Called before each write, followed or not: ops that saved their own result in this memory get a copy of it.
    """
    if not modes.state.enabled or (
        x.edge is None and not any(isinstance(y, TensorBase) and y.edge is not None for y in operands)
    ):
        _copy_saved_result(x)
        return False
    where = f"{name} on a tensor of shape {x.array.shape}"
    if x.edge is not None and not isinstance(x.edge, Node):
        raise InplaceError(f"{where} that is a leaf and requires grad: wrap the call in ddp.no_grad()")
    version = x.version
    if version.epoch != x._epoch and x._epoch >= 0:
        raise InplaceError(f"{where} that shares memory with one that was changed in place inside the graph since")
    base = None if version.base is None else version.base()
    if base is not None and base is not x:
        raise InplaceError(
            f"{where} that is a view of a tensor of shape {base.array.shape}, inside the graph: use the out-of-place "
            "form, such as x = x + y, or assign to the tensor itself by x[index] = value"
        )
    array = x.array
    if array.size and any(step == 0 and n > 1 for step, n in zip(array.strides, array.shape, strict=True)):
        raise InplaceError(f"{where} that shows elements of its memory several times, as expand() does: clone() it")
    return True


def _written(x: TensorBase, values: Any) -> None:
    """Writes values into the memory of `x`, on its GPU."""
    with on(x._device):
        x.array[...] = values


def assign(x: Self, name: str, result: TensorBase) -> Self:
    """Writes the values of `result`, which was computed of `x`, into `x`, which takes over its place in the graph.

    Raises: ShapeError, DtypeError if it does not fit; InplaceError (see `must_record`). Nothing is written then.
    """
    array, values = x.array, result.array
    if values.shape != array.shape:
        raise ShapeError(f"{name}: a result of shape {values.shape} does not fit a tensor of shape {array.shape}")
    if _CATEGORY[values.dtype.kind] > _CATEGORY[array.dtype.kind]:
        raise DtypeError(f"{name}: a result of {values.dtype} does not fit a tensor of {array.dtype}")
    if not must_record(x, name, result):
        if values is not array:
            _written(x, values)
            x.version.count += 1
        return x
    before = x.edge
    node = convert(result, array.dtype).edge
    if isinstance(node, Leaf):  # the result is an operand itself
        node = apply(elementwise.clone, (result,)).edge
    if isinstance(node, Node):  # else the result has no gradient, as that of logical_not
        _copy_saved(node, x)
    _copy_saved_result(x)
    if values is not array:
        _written(x, values)
    written_in_graph(x)
    x.edge = node
    old = before.metadata if isinstance(before, Node) else None
    if isinstance(node, Node) and old is not None and old.retained_grad is not None:
        node.ensure_metadata().retained_grad, old.retained_grad = old.retained_grad, None
    return x


_CATEGORY = {"b": 0, "u": 1, "i": 1, "f": 2, "V": 2}


def _copy_saved_result(x: TensorBase) -> None:
    """Copies what the op that made the memory of `x` saved of its own result.

    PyTorch saves inputs at some of the ops that save their result here, such as division, so that a write does no harm.
    """
    node = None if x.version.saved_by is None else x.version.saved_by()
    if node is not None:
        _copy_saved(node, x)


def _copy_saved(node: Node, x: TensorBase) -> None:
    """What `node` saved of `x`, which is about to be overwritten, becomes a copy of its own."""
    saved, versions = list(node.saved), []
    for counter, count, position in node.versions:
        if counter is x.version and counter.count == count:
            if saved:  # a checkpointed region keeps none
                saved[position] = saved[position].copy()
        else:
            versions.append((counter, count, position))
    node.saved, node.versions = tuple(saved), versions


def raw(x: TensorBase, y: Other, name: str) -> Any:
    """`y` as what can be written into `x`: a number, or an array on its device that broadcasts to its shape.

    Raises: ShapeError, DtypeError.
    """
    if isinstance(y, np.generic):
        y = y.item()
    if isinstance(y, bool | int | float):
        return y
    if isinstance(y, TensorBase):
        y = y.array
    elif not hasattr(y, "dtype"):
        raise DtypeError(f"{name}: expected a tensor, an array or a number, got {type(y).__name__}")
    elif not isinstance(y, (np.ndarray, x._device.xp.ndarray)):
        y, _ = array_of(y, None, name)
    shape = x.array.shape
    broadcast(shape, y.shape, name)
    if len(y.shape) > len(shape) or any(m != n and n != 1 for m, n in zip(shape[::-1], y.shape[::-1], strict=False)):
        raise ShapeError(f"{name}: shape {tuple(y.shape)} does not broadcast to {shape}")
    return place(y, x._device)


def update(x: Self, name: str, function: Callable[[Any, Any], Any], ufunc: str, y: Other) -> Self:
    """x = function(x, y) in the memory of `x`; where autograd need not follow, by the array module's `ufunc`."""
    if must_record(x, name, y):
        return assign(x, name, function(x, y))
    if isinstance(y, TensorBase) and y._device is not x._device and (y.array.ndim or y._device.type != "cpu"):
        raise DeviceError(f"{name}: one tensor is on {x._device}, another on {y._device}")
    where = x._device
    if where.watched and needs_guard(where):
        return guarded_run(name, where, (x.array,), partial(update, x, name, function, ufunc, y))
    value = raw(x, y, name)
    if x.array.dtype.kind == "V":  # bfloat16 computes in float32
        return assign(x, name, function(x, y))
    try:
        with np.errstate(all="ignore"):
            getattr(x._device.xp, ufunc)(x.array, value, out=x.array, casting="same_kind")
    except TypeError as error:
        raise DtypeError(f"{name}: the result does not fit a tensor of {x.array.dtype}") from error
    except (ValueError, OverflowError) as error:
        raise refusal(name, error) from error
    x.version.count += 1
    return x


def in_place(method: Callable[Concatenate[Any, P], Any], ufunc: str = "") -> Callable[Concatenate[T, P], T]:
    """The method `x.NAME_()`, which writes what `x.NAME()` returns into `x`.

    ufunc: the array module's function that writes straight into `x`, where autograd need not follow
    """
    name = f"{method.__name__}_"

    def form(x: Any, /, *args: Any, **named: Any) -> Any:
        array = x.array
        if not ufunc or array.dtype.kind != "f" or must_record(x, name):
            return assign(x, name, getattr(x, name[:-1])(*args, **named))
        with np.errstate(all="ignore"), on(x._device):
            getattr(x._device.xp, ufunc)(array, *args, out=array, **named)
        x.version.count += 1
        return x

    form.__name__, form.__qualname__, form.__module__ = name, f"Tensor.{name}", "ddp._tensor.core"
    form.__doc__, cast(Any, form).__wrapped__ = f"{method.__name__}() in place. {method.__doc__}", method
    return form


def _seen_as(x: Self, name: str, view: TensorBase) -> Self:
    """`x` in the shape of `view`, one of its own. Raises: InplaceError if a gradient of the old shape is to come."""
    if x.edge is not None and (x.is_leaf or not modes.state.enabled):
        raise InplaceError(
            f"{name}: a tensor of shape {x.array.shape} that requires grad cannot change shape in place, if it is a "
            "leaf or where no graph is recorded; use the out-of-place form"
        )
    x.check_replaceable()
    x.array, x.edge, x.maybe_leaf, x.grad_view = view.array, view.edge, None, None
    return x


class InPlace(TensorBase):
    """Methods that end in an underscore write into this tensor and return it; autograd follows them.

    Raises: InplaceError on a leaf that requires grad, outside no_grad, and on a view of a tensor in the graph;
    ShapeError, DtypeError, DeviceError.
    """

    __slots__ = ()

    def add_(self: Self, other: Other, alpha: float = 1) -> Self:
        """self += alpha * other."""
        return update(self, "add_", lambda x, y: x + y, "add", other if alpha == 1 else other * alpha)

    def sub_(self: Self, other: Other, alpha: float = 1) -> Self:
        """self -= alpha * other."""
        return update(self, "sub_", lambda x, y: x - y, "subtract", other if alpha == 1 else other * alpha)

    def mul_(self: Self, other: Other) -> Self:
        """self *= other."""
        return update(self, "mul_", lambda x, y: x * y, "multiply", other)

    def __iadd__(self: Self, other: Other) -> Self:
        return self.add_(other)

    def __isub__(self: Self, other: Other) -> Self:
        return self.sub_(other)

    def __imul__(self: Self, other: Other) -> Self:
        return self.mul_(other)

    def __itruediv__(self: Self, other: Other) -> Self:
        return self.div_(other)

    def copy_(self: Self, source: Other, non_blocking: bool = False) -> Self:
        """The elements of `source`, broadcast and cast to this dtype.

        non_blocking: between a GPU and pinned memory of one shape and dtype nobody waits; see `to`.
        """
        if self._device.watched and needs_guard(self._device):
            return guarded_run("copy_", self._device, (self.array,), partial(self.copy_, source, non_blocking))
        if isinstance(source, TensorBase) and source._device is not self._device:
            plain = not must_record(self, "copy_", source)
            if plain and "cpu" in (source._device.type, self._device.type) and self.array.flags.c_contiguous:
                from ddp._cuda import copies  # only where there is a GPU

                if copies.straight(self.array, source.array, non_blocking):
                    self.version.count += 1
                    return self
        value = raw(self, source, "copy_")
        if must_record(self, "copy_", source):
            self[...] = source
            return self
        try:
            self.array[...] = value
        except REFUSED as error:
            raise refusal("copy_", error) from error
        self.version.count += 1
        return self

    def fill_(self: Self, value: Any) -> Self:
        """Every element becomes `value`, a number or a tensor of one element."""
        if self._device.watched and needs_guard(self._device):
            return guarded_run("fill_", self._device, (self.array,), partial(self.fill_, value))
        if isinstance(value, TensorBase) and value.array.size != 1:
            raise ShapeError(f"fill_: expected a number or a tensor of one element, got shape {value.array.shape}")
        if must_record(self, "fill_", value):
            self[...] = value
            return self
        try:
            self.array.fill(value.array.item() if isinstance(value, TensorBase) else value)
        except REFUSED as error:
            raise refusal("fill_", error) from error
        self.version.count += 1
        return self

    def zero_(self: Self) -> Self:
        """Every element becomes 0."""
        return self.fill_(0)

    def uniform_(self: Self, low: float = 0.0, high: float = 1.0, generator: Any = None) -> Self:
        """Random numbers, uniform in [low, high). Raises: ArgumentError if low > high; DtypeError unless floating."""
        if low > high:
            raise ArgumentError(f"uniform_: low {low} is above high {high}")
        _check_floating(self, "uniform_")
        # In float64, so that one seed gives the same weights, rounded, in every dtype.
        drawn = _device.generator(self._device, generator).random(self.array.shape)
        return _drawn(self, "uniform_", drawn * (high - low) + low)

    def normal_(self: Self, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Self:
        """Random numbers, normally distributed. Raises: ArgumentError if std < 0; DtypeError unless floating."""
        if std < 0:
            raise ArgumentError(f"normal_: std is at least 0, not {std}")
        _check_floating(self, "normal_")
        drawn = _device.generator(self._device, generator).standard_normal(self.array.shape)
        return _drawn(self, "normal_", drawn * std + mean)

    def __setitem__(self, where: Any, value: Other) -> None:
        name = "x[index] = value"
        if self._device.watched and needs_guard(self._device):
            guarded_run(name, self._device, (self.array,), partial(self.__setitem__, where, value))
            return
        try:
            selects, rest = index_parts(self, where)
            if must_record(self, name, value):
                if isinstance(value, TensorBase):
                    value = assignable(convert(value, self.array.dtype))
                    if value._device is not self._device:
                        value = value.to(self._device)
                else:
                    value = wrap(self._device.xp.asarray(value, self.array.dtype), self._device)
                rest = kept(rest, self, value)
                steps = (rest,) if selects is None else (selects, rest)
                assign(self, name, apply(indexing.setitem, (self, value), steps=steps, within=True))
                return
            source = place(assignable(value).array, self._device) if isinstance(value, TensorBase) else value
            target = self.array if selects is None else self.array[selects]
            indexing.assign(self._device.xp, target, rest, source)
            self.version.count += 1
        except IndexError as error:
            raise RangeError(f"{name} on a tensor of shape {self.array.shape}: {error}") from error
        except DdpError:
            raise
        except OverflowError as error:
            raise refusal(name, error) from error
        except (TypeError, ValueError) as error:
            if isinstance(error, TypeError) and not getattr(value, "shape", ()):
                raise refusal(name, error) from error
            # NumPy calls it a TypeError if a mask is given more than a vector.
            raise ShapeError(f"{name} on a tensor of shape {self.array.shape}: {error}") from error

    neg_ = in_place(Elementwise.neg, "negative")
    abs_ = in_place(Elementwise.abs, "absolute")
    square_ = in_place(Elementwise.square, "square")
    reciprocal_ = in_place(Elementwise.reciprocal, "reciprocal")
    floor_divide_ = in_place(Elementwise.floor_divide)
    remainder_ = in_place(Elementwise.remainder)
    fmod_ = in_place(Elementwise.fmod)
    lerp_ = in_place(Elementwise.lerp)
    addcmul_ = in_place(Elementwise.addcmul)
    addcdiv_ = in_place(Elementwise.addcdiv)
    exp_ = in_place(Elementwise.exp, "exp")
    exp2_ = in_place(Elementwise.exp2, "exp2")
    expm1_ = in_place(Elementwise.expm1, "expm1")
    log_ = in_place(Elementwise.log, "log")
    log2_ = in_place(Elementwise.log2, "log2")
    log10_ = in_place(Elementwise.log10, "log10")
    log1p_ = in_place(Elementwise.log1p, "log1p")
    sqrt_ = in_place(Elementwise.sqrt, "sqrt")
    sin_ = in_place(Elementwise.sin, "sin")
    cos_ = in_place(Elementwise.cos, "cos")
    tan_ = in_place(Elementwise.tan, "tan")
    asin_ = in_place(Elementwise.asin, "arcsin")
    acos_ = in_place(Elementwise.acos, "arccos")
    atan_ = in_place(Elementwise.atan, "arctan")
    sinh_ = in_place(Elementwise.sinh, "sinh")
    cosh_ = in_place(Elementwise.cosh, "cosh")
    tanh_ = in_place(Elementwise.tanh, "tanh")
    asinh_ = in_place(Elementwise.asinh, "arcsinh")
    acosh_ = in_place(Elementwise.acosh, "arccosh")
    atanh_ = in_place(Elementwise.atanh, "arctanh")
    floor_ = in_place(Elementwise.floor, "floor")
    ceil_ = in_place(Elementwise.ceil, "ceil")
    trunc_ = in_place(Elementwise.trunc, "trunc")
    sign_ = in_place(Elementwise.sign, "sign")
    rsqrt_ = in_place(Elementwise.rsqrt)
    erf_ = in_place(Elementwise.erf)
    erfc_ = in_place(Elementwise.erfc)
    erfinv_ = in_place(Elementwise.erfinv)
    sigmoid_ = in_place(Elementwise.sigmoid)
    frac_ = in_place(Elementwise.frac)
    round_ = in_place(Elementwise.round)
    logit_ = in_place(Elementwise.logit)
    atan2_ = in_place(Elementwise.atan2)
    hypot_ = in_place(Elementwise.hypot)
    xlogy_ = in_place(Elementwise.xlogy)
    relu_ = in_place(Elementwise.relu)
    nan_to_num_ = in_place(Elementwise.nan_to_num)
    logical_not_ = in_place(Elementwise.logical_not)
    bitwise_not_ = in_place(Elementwise.bitwise_not)
    logical_and_ = in_place(Elementwise.logical_and)
    logical_or_ = in_place(Elementwise.logical_or)
    logical_xor_ = in_place(Elementwise.logical_xor)
    bitwise_and_ = in_place(Elementwise.bitwise_and)
    bitwise_or_ = in_place(Elementwise.bitwise_or)
    bitwise_xor_ = in_place(Elementwise.bitwise_xor)
    bitwise_left_shift_ = in_place(Elementwise.bitwise_left_shift)
    bitwise_right_shift_ = in_place(Elementwise.bitwise_right_shift)
    eq_ = in_place(Elementwise.eq)
    ne_ = in_place(Elementwise.ne)
    lt_ = in_place(Elementwise.lt)
    le_ = in_place(Elementwise.le)
    gt_ = in_place(Elementwise.gt)
    ge_ = in_place(Elementwise.ge)

    negative_, absolute_, fix_, arctan2_ = neg_, abs_, trunc_, atan2_
    arcsin_, arccos_, arctan_ = asin_, acos_, atan_
    arcsinh_, arccosh_, arctanh_ = asinh_, acosh_, atanh_
    not_equal_, less_, less_equal_, greater_, greater_equal_ = ne_, lt_, le_, gt_, ge_
    subtract_, multiply_ = sub_, mul_
    cumsum_, cumprod_ = in_place(Reductions.cumsum), in_place(Reductions.cumprod)

    def clamp_(self: Self, min: Other = None, max: Other = None) -> Self:
        """self held within [min, max], numbers or tensors."""
        numbers = not (isinstance(min, TensorBase) or isinstance(max, TensorBase) or (min is None and max is None))
        if numbers and self.array.dtype.kind == "f" and not must_record(self, "clamp_"):
            self._device.xp.clip(self.array, min, max, out=self.array)
            self.version.count += 1
            return self
        x: Any = self
        return assign(self, "clamp_", x.clamp(min, max))

    clip_ = clamp_

    def clamp_min_(self: Self, min: Other) -> Self:
        """self, at least `min`."""
        return self.clamp_(min=min)

    def clamp_max_(self: Self, max: Other) -> Self:
        """self, at most `max`."""
        return self.clamp_(max=max)

    def div_(self: Self, other: Other, *, rounding_mode: str | None = None) -> Self:
        """self /= other; rounding_mode: "trunc" or "floor"."""
        if rounding_mode is None:
            return update(self, "div_", lambda x, y: x / y, "true_divide", other)
        x: Any = self
        return assign(self, "div_", x.div(other, rounding_mode=rounding_mode))

    divide_ = true_divide_ = div_

    def pow_(self: Self, exponent: Other) -> Self:
        """self **= exponent."""
        return update(self, "pow_", lambda x, y: x**y, "power", exponent)

    def __ipow__(self: Self, exponent: Other) -> Self:
        return self.pow_(exponent)

    def __ifloordiv__(self: Self, other: Other) -> Self:
        return self.floor_divide_(other)

    def __imod__(self: Self, other: Other) -> Self:
        return self.remainder_(other)

    def __iand__(self: Self, other: Other) -> Self:
        return self.bitwise_and_(other)

    def __ior__(self: Self, other: Other) -> Self:
        return self.bitwise_or_(other)

    def __ixor__(self: Self, other: Other) -> Self:
        return self.bitwise_xor_(other)

    def __ilshift__(self: Self, other: Other) -> Self:
        return self.bitwise_left_shift_(other)

    def __irshift__(self: Self, other: Other) -> Self:
        return self.bitwise_right_shift_(other)

    def squeeze_(self: Self, dim: Any = None) -> Self:
        """squeeze() in place."""
        return _seen_as(self, "squeeze_", self.squeeze(dim))  # type: ignore[attr-defined]  # every tensor has the mixins

    def unsqueeze_(self: Self, dim: int) -> Self:
        """unsqueeze() in place."""
        return _seen_as(self, "unsqueeze_", self.unsqueeze(dim))  # type: ignore[attr-defined]  # as above

    def t_(self: Self) -> Self:
        """t() in place."""
        return _seen_as(self, "t_", self.t())  # type: ignore[attr-defined]  # as above

    def transpose_(self: Self, dim0: int, dim1: int) -> Self:
        """transpose() in place."""
        return _seen_as(self, "transpose_", self.transpose(dim0, dim1))  # type: ignore[attr-defined]  # as above

    swapaxes_ = swapdims_ = transpose_

    def tril_(self: Self, diagonal: int = 0) -> Self:
        """tril() in place: the elements above the diagonal become 0."""
        return assign(self, "tril_", self.tril(diagonal))  # type: ignore[attr-defined]  # as above

    def triu_(self: Self, diagonal: int = 0) -> Self:
        """triu() in place: the elements below the diagonal become 0."""
        return assign(self, "triu_", self.triu(diagonal))  # type: ignore[attr-defined]  # as above

    def fill_diagonal_(self: Self, fill_value: float) -> Self:
        """The diagonal of a matrix becomes `fill_value`. Raises: ShapeError for other dimensions."""
        if self.array.ndim != 2:
            raise ShapeError(f"fill_diagonal_: expected a matrix, got shape {self.array.shape}")
        diagonal = wrap(self._device.xp.eye(*self.array.shape, dtype=bool), self._device)
        return self.masked_fill_(diagonal, fill_value)  # type: ignore[attr-defined]  # as above


def _check_floating(x: TensorBase, name: str) -> None:
    if x.array.dtype.kind not in FLOATS:
        raise DtypeError(f"{name}: expected a floating tensor, got {x.array.dtype} of shape {x.array.shape}")


def _drawn(x: Self, name: str, numbers: Any) -> Self:
    if must_record(x, name):
        x[...] = wrap(numbers.astype(x.array.dtype), x._device)
    else:
        x.array[...] = numbers
        x.version.count += 1
    return x
