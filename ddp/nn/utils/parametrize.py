"""Tensors of a module that are computed, whenever they are read, from others that are trained instead."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError
from ddp.nn.containers import ModuleDict, ModuleList
from ddp.nn.module import Module
from ddp.nn.parameter import Parameter

__all__ = ["ParametrizationList", "cached", "is_parametrized", "register_parametrization", "remove_parametrizations"]

M = TypeVar("M", bound=Module)


class _Cache(threading.local):
    """What this thread has computed inside `cached()`, by its list; None outside."""

    values: dict[Module, Tensor] | None = None


_cache = _Cache()


@contextmanager
def cached() -> Iterator[None]:
    """Inside, each parametrized tensor is computed once, when it is first read, and not again after changes.

    For a forward that reads one several times. It holds for this thread; nested ones share what they computed.
    """
    outer = _cache.values
    _cache.values = {} if outer is None else outer
    try:
        yield
    finally:
        _cache.values = outer


class ParametrizationList(ModuleList):
    """The parametrizations of a tensor, first to last, and what the first is given: made by `register_parametrization`.

    original: the tensor in that place; or original0, original1, ... where a right_inverse gave several.
    names: in PyTorch's older forms, those of parameters and buffers of the module itself, which are here instead.
    """

    names: Sequence[str] = ()

    def originals(self, module: Any) -> list[Any]:
        """What the first parametrization is given, for the tensor of that module."""
        return [getattr(module, name) for name in self.names] or [*self._parameters.values(), *self._buffers.values()]

    def forward(self, module: Any = None) -> Tensor:
        """The parametrized tensor of that module, which only the older forms need."""
        if self.names:
            self.train(module.training)
        values = {} if _cache.values is None else _cache.values
        if self not in values:
            first, *others = self
            value = first(*self.originals(module))
            for parametrization in others:
                value = parametrization(value)
            values[self] = value
        return values[self]

    @no_grad()
    def right_inverse(self, value: Any, module: Any = None) -> None:
        """Copies into the originals what makes `value` of them. Raises: AttributeError where a parametrization has no
        right_inverse; ArgumentError where it returns tensors that are unlike the originals.
        """
        for parametrization in reversed(list(self)):
            value = parametrization.right_inverse(value)
        for original, new in zip(self.originals(module), _as_list(value), strict=not self.names):
            _check_alike(self, original, new)
            original.copy_(new)


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _check_alike(parametrization: Module, tensor: Tensor, value: Any) -> None:
    """Raises: ArgumentError."""
    wanted, found = [(type(x).__name__, getattr(x, "dtype", None), getattr(x, "shape", None)) for x in (tensor, value)]
    if wanted[1:] != found[1:]:
        raise ArgumentError(f"{type(parametrization).__name__}: expected {wanted}, got {found}")


def tensor_of(module: Module, name: str) -> Tensor:
    """The parameter or buffer of that name. Raises: ArgumentError where there is none."""
    tensor = getattr(module, name, None)
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{type(module).__name__} has no parameter or buffer {name!r}")
    return tensor


def compute_by(module: Module, name: str, source: ParametrizationList) -> None:
    """Has `source` compute the module's parameter or buffer of that name. Raises: ArgumentError if one does already."""
    if name in module._parametrized_:
        raise ArgumentError(f"{type(module).__name__}: {name!r} is parametrized already")
    delattr(module, name)
    module.__dict__["_parametrized_"] = {**module._parametrized_, name: source}


def _register(module: Module, name: str, tensor: Tensor, like: Tensor) -> None:
    """Registers a tensor as what `like` is."""
    if isinstance(like, Parameter):
        module.register_parameter(name, tensor if tensor is like else Parameter(tensor, like.requires_grad))
    else:
        module.register_buffer(name, tensor)


def register_parametrization(module: M, tensor_name: str, parametrization: Module, *, unsafe: bool = False) -> M:
    """Has `parametrization` compute the module's parameter or buffer of that name, and returns the module.

    What is trained, and what the state dict has, is parametrizations.NAME.original; or original0, original1, ...,
    where parametrization.right_inverse, which is given the tensor, returns several: an optimizer is then to be made
    anew. Without a right_inverse the original is the tensor itself. A second parametrization is given what the first
    one computes. unsafe: the result may have another shape or dtype, which is then not checked.

    Raises: ArgumentError if there is no such tensor, or the result is unlike it.
    """
    parametrization.train(module.training)
    tensor = tensor_of(module, tensor_name)
    inverse: Any = tensor
    if hasattr(parametrization, "right_inverse"):
        with no_grad():
            inverse = parametrization.right_inverse(tensor)
    if not unsafe:
        _check_alike(parametrization, tensor, parametrization(*_as_list(inverse)))
    if is_parametrized(module, tensor_name):
        module.parametrizations[tensor_name].append(parametrization)
        return module
    held = ParametrizationList([parametrization])
    compute_by(module, tensor_name, held)
    if isinstance(inverse, Tensor):
        tensor.data = inverse
        _register(held, "original", tensor, tensor)
    else:
        for i, part in enumerate(inverse):
            _register(held, f"original{i}", part, tensor)
    if not is_parametrized(module):
        module.parametrizations = ModuleDict()
    module.parametrizations[tensor_name] = held
    return module


def is_parametrized(module: Module, tensor_name: str | None = None) -> bool:
    """Whether the tensor of that name, or any, has a parametrization."""
    held: Any = module._modules.get("parametrizations") or ()
    return len(held) > 0 if tensor_name is None else tensor_name in held


def remove_parametrizations(module: M, tensor_name: str, leave_parametrized: bool = True) -> M:
    """Makes a parametrized tensor the module's own again, and returns the module.

    leave_parametrized: with the value that it has; otherwise with that of the original, which must be one.

    Raises: ArgumentError.
    """
    if not is_parametrized(module, tensor_name):
        raise ArgumentError(f"{type(module).__name__}: {tensor_name!r} is not parametrized")
    held = module.parametrizations[tensor_name]
    original, *others = held.originals(module)
    if others and not leave_parametrized:
        raise ArgumentError(f"leave_parametrized=False: {tensor_name!r} has {len(others) + 1} originals, not one")
    tensor = original
    if leave_parametrized:
        with no_grad():
            tensor = held()
        if not others:
            original.data = tensor
            tensor = original
    del module.parametrizations[tensor_name], module._parametrized_[tensor_name]
    if not is_parametrized(module):
        del module.parametrizations
    _register(module, tensor_name, tensor, original)
    return module
