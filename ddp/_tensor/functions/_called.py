"""What function forms take beyond the methods they call: `out=`, memory for the result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ddp._engine import modes
from ddp._tensor.core import Tensor
from ddp._tensor.inplace import become
from ddp.errors import ArgumentError, DeviceError, DtypeError, InplaceError

F = TypeVar("F", bound=Callable[..., Any])


def called(function: F) -> F:
    """`function` with `out`: a tensor of the result's shape that gets its values and is returned; one for each result.

    An `out` without elements becomes as large as the result. Where the first argument is annotated as a tensor, nothing
    else is let through.

    Raises: DtypeError if an argument is no tensor, or the result does not fit out's dtype; ShapeError; DeviceError;
    InplaceError if something requires grad: no gradient passes through `out`.
    """
    name = function.__name__
    first = next(iter(inspect.signature(function).parameters.values()))
    tensor = first.name if first.annotation == "Tensor" else None

    @functools.wraps(function)
    def also(*given: Any, out: Any = None, **named: Any) -> Any:
        if tensor is not None and given and not isinstance(given[0], Tensor):
            raise DtypeError(f"{name}: {tensor} is a Tensor, not {type(given[0]).__name__}")
        result = function(*given, **named)
        return result if out is None else _written(name, result, out)

    parameters = list(inspect.signature(function).parameters.values())
    keyword = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any")
    also.__signature__ = inspect.Signature([*parameters, keyword])  # type: ignore[attr-defined]  # what help() shows
    return cast(F, also)


def _written(name: str, result: Any, out: Any) -> Any:
    if not isinstance(result, tuple):
        return _into(name, result, out)
    if not isinstance(out, Sequence) or len(out) != len(result):
        raise ArgumentError(f"{name}: out is {len(result)} tensors, for the results one each")
    written = [_into(name, one, memory) for one, memory in zip(result, out, strict=True)]
    kind: Any = type(result)
    return kind(*written) if hasattr(result, "_fields") else tuple(written)


def _into(name: str, result: Tensor, out: Any) -> Tensor:
    if not isinstance(out, Tensor):
        raise DtypeError(f"{name}: out is a Tensor, not {type(out).__name__}")
    if modes.state.enabled and (result.requires_grad or out.requires_grad):
        raise InplaceError(f"{name}: no gradient passes through out=, of shape {out.array.shape}, and one is required")
    if out._device is not result._device:
        raise DeviceError(f"{name}: the result is on {result._device}, out on {out._device}")
    if not out.numel() and out.array.shape != result.array.shape:
        out.check_replaceable()
        out.array, out.maybe_leaf, out.grad_view = out._device.xp.empty(result.array.shape, out.array.dtype), None, None
    return become(out, name, result)
