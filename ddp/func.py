"""Functions that differentiate functions. They call `ddp.autograd.functional`, and their calls may be nested.

Arguments are tensors, results a tensor or a tuple of them. The results have a graph if they depend on a tensor that
requires grad: an argument, a tensor of an outer call, or a parameter that the function uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ddp._tensor.core import Tensor
from ddp._tensor.operands import parse_int
from ddp.autograd import jacobians
from ddp.errors import ArgumentError, RangeError

__all__ = ["grad", "hessian", "jvp", "vjp", "vmap"]


def _of_arguments(
    func: Callable[..., Any], argnums: int | tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, Any]:
    """Returns `func` as a function of the arguments `argnums` alone, and these arguments.

    If `argnums` is a tuple, the arguments are a tuple. Raises: RangeError, DtypeError, ArgumentError as `grad`.
    """
    numbers = [parse_int(i, "grad", "argnums") for i in (argnums if isinstance(argnums, tuple) else (argnums,))]
    if any(i not in range(-len(args), len(args)) for i in numbers):
        raise RangeError(f"argnums={argnums}: expected the number of one of {len(args)} positional arguments")
    indices = dict.fromkeys(i % len(args) for i in numbers)
    if not 0 < len(numbers) == len(indices):
        raise ArgumentError(f"argnums={argnums}: expected at least one argument, and none twice")

    def of_arguments(*xs: Any) -> Any:
        given = dict(enumerate(args)) | dict(zip(indices, xs, strict=True))
        return func(*given.values(), **named)

    inputs = tuple([args[i] for i in indices])
    return of_arguments, inputs if isinstance(argnums, tuple) else inputs[0]


def grad(func: Callable[..., Any], argnums: int | tuple[int, ...] = 0) -> Callable[..., Any]:
    """Makes a function that takes the arguments of `func` and returns the gradient of its one-element result.

    argnums: the number of the argument to differentiate by, from 0; negative: counted from the last. For a tuple of
    numbers, the result is a tuple of gradients

    The function raises RangeError if there is no such argument, ArgumentError if `argnums` is empty or names an
    argument twice, DtypeError if such an argument is not a floating tensor or a number in `argnums` is not an integer,
    and ShapeError if the result has several elements.
    """
    return lambda *args, **named: jacobians.vjp(*_of_arguments(func, argnums, args, named), create_graph=None)[1]


def vjp(func: Callable[..., Any], *primals: Tensor) -> tuple[Any, Callable[..., Any]]:
    """Returns func(*primals), and a function that turns gradients of the outputs into gradients of the primals.

    Raises: DtypeError for primals that are not floating tensors, or results that are not tensors.
    """
    call = jacobians.Call(func, primals, None)

    def pull_back(*cotangents: Tensor) -> Any:
        results = jacobians.differentiate(call.outputs, call.inputs, cotangents, call.create_graph)
        return call.postprocess(results, primals if len(primals) > 1 else primals[0])

    return call.postprocess(call.outputs, call.result), pull_back


def jvp(func: Callable[..., Any], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> tuple[Any, Any]:
    """Returns func(*primals) and its derivative in the direction of the tangents, computed by two backwards.

    Raises: DtypeError for primals that are not floating tensors, or tangents or results that are not tensors;
    ShapeError for tangents of other shapes; ArgumentError for another number of tangents.
    """
    return jacobians.jvp(func, primals, tangents, create_graph=None)


def hessian(func: Callable[..., Any], argnums: int | tuple[int, ...] = 0) -> Callable[..., Any]:
    """Makes a function that takes the arguments of `func` and returns the second derivatives of its one-element result.

    argnums: as for `grad`; for a tuple of numbers, the result is a tuple of tuples

    The function raises what `grad` raises for `argnums`, and what `autograd.functional.hessian` raises.
    """
    return lambda *args, **named: jacobians.hessian(*_of_arguments(func, argnums, args, named), create_graph=None)


def vmap(*args: Any, **named: Any) -> NoReturn:
    """Raises: ArgumentError. Functions are not batched here."""
    raise ArgumentError("vmap: functions are not batched here; give it a batch dimension, or call it in a loop")
