"""The state that a captured step depends on: its inputs, the modes of the thread, its modules and optimizers.

The state is compared before every launch. To make that fast, it consists of a few tuples, and the module tree is walked
again only after a module, parameter or buffer was registered in any module.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from operator import attrgetter
from typing import Any

from ddp._engine.modes import state
from ddp._tensor.base import TensorBase
from ddp.errors import ArgumentError

# Maximum number of references that are followed, one after another, from a step function to a module or an optimizer.
_DEPTH = 4


def tensors_of(value: Any, tensors: list[TensorBase]) -> list[TensorBase]:
    """Appends the tensors in nested tuples, lists and dicts to `tensors`. Returns `tensors`."""
    if isinstance(value, TensorBase):
        tensors.append(value)
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            tensors_of(item, tensors)
    return tensors


def arguments_key(value: Any) -> Hashable:
    """Returns a hashable key of the arguments.

    The key holds the shape, dtype and requires_grad of a tensor, and every other value itself.
    Raises: ArgumentError for a value that cannot be hashed.
    """
    if isinstance(value, TensorBase):
        array = value.array
        dtype = array.dtype.char if array.dtype.kind != "V" else "bfloat16"
        return TensorBase, array.shape, dtype, value.edge is not None
    if isinstance(value, tuple | list):
        return type(value), *map(arguments_key, value)
    if isinstance(value, dict):
        return dict, *[(name, arguments_key(item)) for name, item in value.items()]
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"graphed_step: a {type(value).__name__} is an argument that cannot be compared with that of the next "
            "call; give tensors, numbers, strings, and tuples, lists and dicts of these"
        ) from None
    return type(value), value


def replace_tensors(value: Any, tensors: Iterable[Any]) -> Any:
    """`value` with its tensors replaced by `tensors`, in the order of `tensors_of`."""
    replacements = iter(tensors)

    def build(value: Any) -> Any:
        if isinstance(value, TensorBase):
            return next(replacements)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[build(item) for item in value])
        if isinstance(value, tuple | list):
            return type(value)([build(item) for item in value])
        if isinstance(value, dict):
            return {key: build(item) for key, item in value.items()}
        return value

    return build(value)


def modes_now() -> Hashable:
    """This thread's modes: grad, inference, anomaly and autocast."""
    rules = getattr(state.autocast, "rules", None)
    casts = None if rules is None else tuple([(device_type, dtype.name) for device_type, dtype in rules.items()])
    return state.enabled, state.inference, state.anomaly, casts


class StepState:
    """The modules and optimizers that a step uses: those in its closure, in its globals, and in a method's object."""

    def __init__(self, fn: Any, modules: Iterable[Any] = ()) -> None:
        self._roots: list[Any] = []
        self._optimizers: list[Any] = []
        self._find([*modules, *_used_by(fn)], _DEPTH, set())
        self._modules: list[Any] = []
        self._tensors: list[TensorBase] = []
        self._registrations = -1

    def _find(self, values: Iterable[Any], depth: int, seen: set[int]) -> None:
        for value in values:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if hasattr(value, "named_modules") and hasattr(value, "named_buffers"):
                self._roots.append(value)
            elif isinstance(getattr(value, "param_groups", None), list):
                self._optimizers.append(value)
            elif depth > 1:
                self._find(_used_by(value), depth - 1, seen)

    def now(self) -> Hashable:
        """A key of the modules' mode, memory and requires_grad, and of the optimizers' settings."""
        registrations = self._roots[0].registration_count() if self._roots else 0
        if registrations != self._registrations:
            self._registrations = registrations
            self._modules = [module for root in self._roots for module in root.modules()]
            self._tensors = [tensor for module in self._modules for tensor in _own_tensors(module)]
        return (
            tuple(map(_training, self._modules)),
            tuple(map(id, map(_array, self._tensors))),
            tuple(map(_edge, self._tensors)),
            # Optimizers with a formula are left out: before each launch they upload changed settings.
            self.settings([optimizer for optimizer in self._optimizers if not hasattr(optimizer, "formula")]),
        )

    def settings(self, optimizers: Iterable[Any] | None = None) -> Hashable:
        """A key of the settings of these optimizers; None: of all. A captured step must not change a setting."""
        if optimizers is None:
            optimizers = self._optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return tuple(
            [tuple([(name, _comparable(v)) for name, v in group.items() if name != "params"]) for group in groups]
        )

    def replaced(self) -> list[str]:
        """The paths of the modules' tensors that were not there in the last call of `now`."""
        known = set(map(id, self._tensors))
        paths = []
        for root in self._roots:
            tensors = [*root.named_parameters(), *root.named_buffers()]
            paths += [path for path, tensor in tensors if id(tensor) not in known]
        return paths


_training = attrgetter("training")
_array = attrgetter("array")
_edge = attrgetter("edge")

# Classes and Python modules, whose contents are not searched.
_SKIPPED = (type, type(functools))


def _own_tensors(module: Any) -> list[TensorBase]:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return [tensor for tensor in tensors if tensor is not None]


def _used_by(value: Any) -> list[Any]:
    """The objects that a function, a collection or an object refers to."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, list | tuple | dict):
        return [*value.values()] if isinstance(value, dict) else [*value]
    objects: list[Any] = [value.__self__] if hasattr(value, "__self__") else []
    code = getattr(value, "__code__", None)
    if code is not None:
        scope = value.__globals__
        objects += [scope[name] for name in code.co_names if name in scope and not isinstance(scope[name], _SKIPPED)]
        for cell in value.__closure__ or ():
            try:
                objects.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
    elif hasattr(value, "__dict__") and not isinstance(value, _SKIPPED) and type(value).__module__ != "builtins":
        objects += vars(value).values()
    return objects


def _comparable(value: Any) -> Hashable:
    if isinstance(value, TensorBase):
        return id(value.array)
    if isinstance(value, list):
        return tuple(value)
    return value if isinstance(value, Hashable) else id(value)
