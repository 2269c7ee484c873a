"""Derivatives as functions of functions: thin forms of `ddp.autograd.functional`, which may be nested.

Arguments are tensors, results a tensor or a tuple of them. These have a graph if something beside the arguments in
question requires grad: an outer call of these, or a parameter that the function uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ddp._tensor.core import Tensor
from ddp.autograd import jacobians
from ddp.errors import ArgumentError

__all__ = ["grad", "hessian", "jvp", "vjp", "vmap"]


def _of_argument(func: Callable[..., Any], i: int, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """`func` as a function of argument i alone, and that argument."""
    return lambda x: func(*args[:i], x, *args[i + 1 :], **named), args[i]


def grad(func: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """A function that takes the arguments of `func` and returns the gradient of its single element.

    argnums: which argument it is with respect to, a tensor. Raises, when it is called: DtypeError for another argument;
    ShapeError.
    """
    return lambda *args, **named: jacobians.vjp(*_of_argument(func, argnums, args, named), create_graph=None)[1]


def vjp(func: Callable[..., Any], *primals: Tensor) -> tuple[Any, Callable[..., Any]]:
    """func(*primals), and a function that takes gradients of the outputs and returns those of the primals.

    Raises: DtypeError for what is no tensor.
    """
    call = jacobians.Call(func, primals, None)

    def pull_back(*cotangents: Tensor) -> Any:
        results = jacobians.differentiate(call.outputs, call.inputs, cotangents, call.create_graph)
        return call.finish(results, primals if len(primals) > 1 else primals[0])

    return call.finish(call.outputs, call.result), pull_back


def jvp(func: Callable[..., Any], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> tuple[Any, Any]:
    """func(*primals), and how it changes as the primals go along the tangents, by two backwards.

    Raises: DtypeError for what is no tensor; ShapeError for tangents of other shapes.
    """
    return jacobians.jvp(func, primals, tangents, create_graph=None)


def hessian(func: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """A function that takes the arguments of `func` and returns the second derivatives of its single element.

    argnums: as for `grad`. Raises, when it is called: as `autograd.functional.hessian`.
    """
    return lambda *args, **named: jacobians.hessian(*_of_argument(func, argnums, args, named), create_graph=None)


def vmap(*args: Any, **named: Any) -> NoReturn:
    """Raises: ArgumentError. Functions are not batched here."""
    raise ArgumentError("vmap: functions are not batched here; give it a batch dimension, or call it in a loop")
