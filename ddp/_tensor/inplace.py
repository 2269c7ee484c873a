"""Writing into tensors.

A write increases the version that all views of the memory share, so that backward notices a changed saved value.
If autograd must record the write, the tensor gets a new node as its edge. Writes into a leaf that requires grad, into a
view of a tensor that still exists, or into an expanded tensor cannot be recorded, and raise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from ddp._device import on, to_device
from ddp._engine import Leaf, Node, modes
from ddp._tensor.base import (
    Self,
    TensorBase,
    TensorFunction,
    apply,
    check_current,
    guarded_run,
    needs_guard,
    written_in_graph,
)
from ddp._tensor.complex_numbers import ComplexTensor
from ddp._tensor.creation import array_of
from ddp._tensor.dtypes import CATEGORY, Number
from ddp._tensor.operands import Other, as_ddp_error, as_method, broadcast, convert, operand_as_tensor
from ddp.errors import ArgumentError, DeviceError, DtypeError, InplaceError, ShapeError
from ddp.ops import elementwise

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


def must_record(x: TensorBase, name: str, *operands: Other) -> bool:
    """Whether autograd must record a write of `operands` into `x`. Raises: InplaceError if it cannot.

    The methods of tensors call this before each write, recorded or not. The memory of `x` may hold a result that its op
    saved for backward. Then the saved result is first replaced by a copy.
    """
    if not modes.state.enabled or (
        x.edge is None and not any(isinstance(y, TensorBase) and y.edge is not None for y in operands)
    ):
        _copy_saved_result(x)
        return False
    subject = f"{name} on a tensor of shape {x.array.shape}"
    if x.edge is not None and not isinstance(x.edge, Node):
        raise InplaceError(f"{subject} that is a leaf and requires grad: wrap the call in ddp.no_grad()")
    check_current(name, x)
    base = None if x.version.base is None else x.version.base()
    if base is not None and base is not x:
        raise InplaceError(
            f"{subject} that is a view of a tensor of shape {base.array.shape}, inside the graph: use the out-of-place "
            "form, such as x = x + y, or assign to the tensor itself by x[index] = value"
        )
    array = x.array
    if array.size and any(step == 0 and n > 1 for step, n in zip(array.strides, array.shape, strict=True)):
        raise InplaceError(f"{subject} that shows elements of its memory several times, as expand() does: clone() it")
    _copy_saved_result(x)
    return True


def assign(x: Self, name: str, result: TensorBase) -> Self:
    """Writes the values of `result`, which was computed from `x`, into `x`, and gives `x` the edge of `result`.

    Raises: ShapeError, DtypeError if `result` does not fit; InplaceError (see `must_record`). Nothing is written then.
    """
    array = x.array
    values = result.array
    if values.shape != array.shape:
        raise ShapeError(f"{name}: a result of shape {values.shape} does not fit a tensor of shape {array.shape}")
    if CATEGORY[values.dtype] > CATEGORY[array.dtype]:
        raise DtypeError(f"{name}: a result of {values.dtype} does not fit a tensor of {array.dtype}")
    before = x.edge
    node = None
    if recorded := must_record(x, name, result):
        node = convert(result, array.dtype).edge
        if isinstance(node, Leaf):  # the result is an operand itself
            node = apply(elementwise.clone, (result,)).edge
        if isinstance(node, Node):  # otherwise the result has no gradient, like that of logical_not
            _copy_saved(node, x)
    if values is not array:
        with on(x._device):
            array[...] = values
    if not recorded:
        x.version.count += values is not array
        return x
    written_in_graph(x)
    x.edge = node
    old = before.metadata if isinstance(before, Node) else None
    if isinstance(node, Node) and old is not None and old.retained_grad is not None:
        node.ensure_metadata().retained_grad = old.retained_grad
        old.retained_grad = None
    return x


def _copy_saved_result(x: TensorBase) -> None:
    """If the op whose result is in the memory of `x` saved it for backward, replaces the saved result by a copy.

    PyTorch allows writes into the results of some of these ops, such as division, since it saves their inputs instead.
    """
    node = None if x.version.saved_by is None else x.version.saved_by()
    if node is not None:
        _copy_saved(node, x)


def _copy_saved(node: Node, x: TensorBase) -> None:
    """Copies the values that `node` saved in the memory of `x`, which will be overwritten, and saves the copies."""
    saved = list(node.saved)
    changed = [entry for entry in node.versions if entry[0] is x.version and entry[0].count == entry[1]]
    for _, _, position in changed if saved else ():  # a checkpointed region has saved nothing
        saved[position] = saved[position].copy()
    node.saved = tuple(saved)
    node.versions = [entry for entry in node.versions if entry not in changed]


def operand_array(x: TensorBase, y: Other, name: str) -> Any:
    """Converts `y` for a write into `x`: to a number, or to an array on the device of `x` that broadcasts to its shape.

    Raises: ShapeError if it does not broadcast; DtypeError if it is neither a tensor, an array nor a number.
    """
    if isinstance(y, np.generic):
        y = y.item()
    if isinstance(y, Number):
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
    return to_device(y, x._device)


def update(x: Self, name: str, function: Callable[[Any, Any], Any], ufunc: str, y: Other) -> Self:
    """Writes function(x, y) into `x`: by `ufunc` with out=x.array, unless the write is recorded or `x` is bfloat16."""
    if must_record(x, name, y):
        return assign(x, name, function(x, y))
    if isinstance(y, TensorBase) and y._device is not x._device and (y.array.ndim or y._device.type != "cpu"):
        raise DeviceError(f"{name}: one tensor is on {x._device}, another on {y._device}")
    device = x._device
    if device.watched and needs_guard(device):
        return guarded_run(name, device, (x.array,), partial(update, x, name, function, ufunc, y))
    value = operand_array(x, y, name)
    if x.array.dtype.kind == "V":  # bfloat16 computes in float32
        return assign(x, name, function(x, y))
    try:
        with np.errstate(all="ignore"):
            getattr(x._device.xp, ufunc)(x.array, value, out=x.array, casting="same_kind")
    except TypeError as error:
        raise DtypeError(f"{name}: the result does not fit a tensor of {x.array.dtype}") from error
    except (ValueError, OverflowError) as error:
        raise as_ddp_error(name, error) from error
    x.version.count += 1
    return x


def in_place(
    method: Callable[Concatenate[Any, P], Any], write: Callable[..., Any] = assign
) -> Callable[Concatenate[Self, P], Self]:
    """Makes the method `x.NAME_()`, which writes the result of `x.NAME()` into `x`.

    write: `assign`, or `become_view` if the result is a view, which `x` then becomes
    """
    name = f"{method.__name__}_"

    def form(x: Any, /, *args: Any, **named: Any) -> Any:
        return write(x, name, getattr(x, name[:-1])(*args, **named))

    return as_method(form, name, f"{method.__name__}() in place. {method.__doc__}", method)


def in_place_forms(*methods: Callable[..., Any]) -> Iterator[TensorFunction]:
    """Makes the in-place forms of several methods."""
    return map(in_place, methods)


def both_forms(method: F) -> tuple[F, TensorFunction]:
    """Returns `method` and its in-place form."""
    return method, in_place(method)


def become_view(x: Self, name: str, view: TensorBase) -> Self:
    """Gives `x` the array and the edge of its view `view`, and thereby the shape.

    Raises: InplaceError if `x` requires grad and either is a leaf or no graph is recorded: its gradient would have the
    old shape. GraphError if `x` is a parameter of a wrapped model.
    """
    if x.edge is not None and (x.is_leaf or not modes.state.enabled):
        raise InplaceError(
            f"{name}: a tensor of shape {x.array.shape} that requires grad cannot change shape in place, if it is a "
            "leaf or where no graph is recorded; use the out-of-place form"
        )
    x.check_replaceable()
    x.array = view.array
    x.edge = view.edge
    x.accumulate_grad = None
    x.grad_view = None
    return x


def function_form(method: F, *, number_first: bool = False) -> F:
    """Turns `method` into a function whose first argument is `input`, and which also takes `out`: see `with_out`.

    number_first: `input` may be a number or an array

    Raises: DtypeError if `input` is not a tensor.
    """
    name = method.__name__

    @functools.wraps(method)
    def form(*args: Any, out: Any = None, **named: Any) -> Any:
        first, *rest = args or (named.pop("input", None),)
        if not isinstance(first, TensorBase) and not isinstance(first, ComplexTensor):
            if not number_first:
                raise DtypeError(f"{name}: input is a Tensor, not {type(first).__name__}")
            first = operand_as_tensor(first, rest[0] if rest else named.get("other"))
        result = getattr(first, name)(*rest, **named)
        return result if out is None else _write_out(name, result, out)

    return cast(F, _described(form, method, "ddp._tensor.functions"))


def with_out(function: F) -> F:
    """Adds the argument `out` to `function`: a tensor of the result's shape, which gets the values and is returned.

    For several results, `out` is a sequence of tensors. An `out` without elements gets the shape of the result.

    Raises: DtypeError if `out` is not a tensor, or its dtype cannot hold the result; ShapeError if it has another shape
    than the result; DeviceError if it is on another device; ArgumentError for a wrong number of tensors; InplaceError
    if grad mode is on, and the result or `out` requires grad: no gradient passes through `out`.
    """

    @functools.wraps(function)
    def form(*args: Any, out: Any = None, **named: Any) -> Any:
        result = function(*args, **named)
        return result if out is None else _write_out(function.__name__, result, out)

    return cast(F, _described(form, function, function.__module__))


def _described(form: Any, function: Any, module: str) -> Any:
    """Gives `form` the signature that help() shows, and the name by which it is pickled."""
    first, *rest = inspect.signature(function).parameters.values()
    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any")
    form.__signature__ = inspect.Signature([first.replace(name="input") if first.name == "self" else first, *rest, out])
    form.__module__ = module
    form.__qualname__ = function.__name__
    return form


def _write_out(name: str, result: Any, out: Any) -> Any:
    if not isinstance(result, tuple):
        return _write_one(name, result, out)
    if not isinstance(out, Sequence) or len(out) != len(result):
        raise ArgumentError(f"{name}: out is {len(result)} tensors, for the results one each")
    written = [_write_one(name, value, memory) for value, memory in zip(result, out, strict=True)]
    cls: Any = type(result)
    return cls(*written) if hasattr(result, "_fields") else tuple(written)


def _write_one(name: str, result: Any, out: Any) -> Any:
    if not isinstance(result, TensorBase) or not isinstance(out, TensorBase):
        raise DtypeError(f"{name}: out is a Tensor, not {type(out).__name__}")
    if modes.state.enabled and (result.requires_grad or out.requires_grad):
        raise InplaceError(f"{name}: no gradient passes through out=, of shape {out.array.shape}, and one is required")
    if out._device is not result._device:
        raise DeviceError(f"{name}: the result is on {result._device}, out on {out._device}")
    if not out.array.size and out.array.shape != result.array.shape:
        out.check_replaceable()
        out.array = out._device.xp.empty(result.array.shape, out.array.dtype)
        out.accumulate_grad = None
        out.grad_view = None
    return assign(out, name, result)
