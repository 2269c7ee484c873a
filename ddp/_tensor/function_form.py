"""Functions made of methods: `ddp.exp` is `Tensor.exp` with `out=`, memory for the result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ddp._engine import modes
from ddp._tensor.base import TensorBase
from ddp._tensor.inplace import assign
from ddp._tensor.operands import number_as_tensor
from ddp.errors import ArgumentError, DeviceError, DtypeError, InplaceError

F = TypeVar("F", bound=Callable[..., Any])


def function_form(method: F, *, number_first: bool = False) -> F:
    """`method` as a function of `input`, with `out`: see `with_out`. number_first: `input` may be a number or an array.

    Raises: DtypeError if `input` is no tensor.
    """
    name = method.__name__

    @functools.wraps(method)
    def form(*args: Any, out: Any = None, **named: Any) -> Any:
        if not args and "input" in named:
            args = (named.pop("input"),)
        if not args:
            raise TypeError(f"{name}() missing 1 required positional argument: 'input'")
        if not isinstance(args[0], TensorBase):
            other: Any = args[1] if len(args) > 1 else named.get("other")
            if not number_first:
                raise DtypeError(f"{name}: input is a Tensor, not {type(args[0]).__name__}")
            args = (number_as_tensor(args[0], other), *args[1:])
        result = getattr(args[0], name)(*args[1:], **named)
        return result if out is None else _write_out(name, result, out)

    return cast(F, _described(form, method, "ddp._tensor.functions"))


def with_out(function: F) -> F:
    """`function` with `out`: a tensor of the result's shape that gets its values and is returned; one for each result.

    An `out` without elements becomes as large as the result.

    Raises: DtypeError if the result does not fit; ShapeError; DeviceError; InplaceError if something requires
    grad: no gradient passes through `out`.
    """

    @functools.wraps(function)
    def form(*args: Any, out: Any = None, **named: Any) -> Any:
        result = function(*args, **named)
        return result if out is None else _write_out(function.__name__, result, out)

    return cast(F, _described(form, function, function.__module__))


def _described(form: Any, function: Any, module: str) -> Any:
    """`form` with the signature that help() shows, and the name by which it is pickled."""
    first, *rest = inspect.signature(function).parameters.values()
    if first.name == "self":
        first = first.replace(name="input")
    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any")
    form.__signature__ = inspect.Signature([first, *rest, out])
    form.__module__, form.__qualname__ = module, function.__name__
    return form


def _write_out(name: str, result: Any, out: Any) -> Any:
    if not isinstance(result, tuple):
        return _write_one(name, result, out)
    if not isinstance(out, Sequence) or len(out) != len(result):
        raise ArgumentError(f"{name}: out is {len(result)} tensors, for the results one each")
    written = [_write_one(name, one, memory) for one, memory in zip(result, out, strict=True)]
    kind: Any = type(result)
    return kind(*written) if hasattr(result, "_fields") else tuple(written)


def _write_one(name: str, result: Any, out: Any) -> Any:
    if not isinstance(result, TensorBase) or not isinstance(out, TensorBase):
        raise DtypeError(f"{name}: out is a Tensor, not {type(out).__name__}")
    if modes.state.enabled and (result.requires_grad or out.requires_grad):
        raise InplaceError(f"{name}: no gradient passes through out=, of shape {out.array.shape}, and one is required")
    if out._device is not result._device:
        raise DeviceError(f"{name}: the result is on {result._device}, out on {out._device}")
    if not out.array.size and out.array.shape != result.array.shape:
        out.check_replaceable()
        out.array, out.maybe_leaf, out.grad_view = out._device.xp.empty(result.array.shape, out.array.dtype), None, None
    return assign(cast(Any, out), name, result)
