"""Parametrizations: tensors of a module that are computed from trained parameters whenever they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError
from ddp.nn.containers import ModuleDict, ModuleList
from ddp.nn.module import Module
from ddp.nn.parameter import Parameter

__all__ = ["ParametrizationList", "cached", "is_parametrized", "register_parametrization", "remove_parametrizations"]

M = TypeVar("M", bound=Module)

# Inside `cached()`: the computed tensors by ParametrizationList; None outside.
_values: ContextVar[Any] = ContextVar("values", default=None)


@contextmanager
def cached() -> Iterator[None]:
    """Inside this context, each parametrized tensor is computed once, when it is first read.

    It saves time if a forward reads such a tensor several times. Later changes of the originals have no effect on the
    tensor inside the context. The context applies to this thread only.
    """
    values = _values.get()
    token = _values.set({} if values is None else values)
    try:
        yield
    finally:
        _values.reset(token)


class ParametrizationList(ModuleList):
    """The parametrizations of a tensor, in their order, and the trained parameters from which it is computed.

    Made by `register_parametrization`. original: the parameter that the first parametrization takes; original0,
    original1, ... if right_inverse returned several tensors.
    """

    def forward(self) -> Tensor:
        """Computes the parametrized tensor."""
        values = _values.get()
        if values is None:
            values = {}
        if self not in values:
            first, *others = self
            value = first(*self._parameters.values())
            for parametrization in others:
                value = parametrization(value)
            values[self] = value
        return values[self]


def register_parametrization(module: M, tensor_name: str, parametrization: Module, *, unsafe: bool = False) -> M:
    """Makes `parametrization` compute the module's parameter `tensor_name`, and returns the module.

    The parameter becomes parametrizations.NAME.original, which is trained and is in the state dict. Its value is
    parametrization.right_inverse(parameter) if there is such a method, otherwise it is unchanged. If right_inverse
    returns several tensors, they are new parameters, original0, original1, ...: make a new optimizer for them. A second
    parametrization is given what the first one computes. unsafe: accepted, and ignored: the result may have any shape.

    Raises: ArgumentError if there is no such parameter.
    """
    parametrization.train(module.training)
    if is_parametrized(module, tensor_name):
        module.parametrizations[tensor_name].append(parametrization)
        return module
    tensor = getattr(module, tensor_name, None)
    if not isinstance(tensor, Parameter):
        raise ArgumentError(f"{type(module).__name__} has no parameter {tensor_name!r}")
    inverse: Any = tensor
    if hasattr(parametrization, "right_inverse"):
        with no_grad():
            inverse = parametrization.right_inverse(tensor)
    parametrization_list = ParametrizationList([parametrization])
    delattr(module, tensor_name)
    if isinstance(inverse, Tensor):
        tensor.data = inverse  # keeps the parameter object, which an optimizer may hold
        parametrization_list.original = tensor
    else:
        for i, part in enumerate(inverse):
            setattr(parametrization_list, f"original{i}", Parameter(part, tensor.requires_grad))
    if not is_parametrized(module):
        module.parametrizations = ModuleDict()
    module.parametrizations[tensor_name] = parametrization_list
    return module


def is_parametrized(module: Module, tensor_name: str | None = None) -> bool:
    """Whether the tensor `tensor_name` has a parametrization; None: whether any tensor has one."""
    computed = module._computed()
    return bool(computed) if tensor_name is None else tensor_name in computed


def remove_parametrizations(module: M, tensor_name: str, leave_parametrized: bool = True) -> M:
    """Makes a parametrized tensor the module's own parameter again, and returns the module.

    leave_parametrized: keeps the computed value; False: takes the value of the original, if there is only one.

    Raises: ArgumentError if the tensor has no parametrization, or leave_parametrized=False and several originals.
    """
    if not is_parametrized(module, tensor_name):
        raise ArgumentError(f"{type(module).__name__}: {tensor_name!r} is not parametrized")
    parametrization_list = module.parametrizations[tensor_name]
    original, *others = parametrization_list._parameters.values()
    if others and not leave_parametrized:
        raise ArgumentError(f"leave_parametrized=False: {tensor_name!r} has {len(others) + 1} originals, not one")
    with no_grad():
        value = parametrization_list() if leave_parametrized else original
    if others:
        original = Parameter(value, original.requires_grad)
    else:
        original.data = value
    del module.parametrizations[tensor_name]
    if not is_parametrized(module):
        del module.parametrizations
    setattr(module, tensor_name, original)
    return module
