"""What decides whether a captured step fits a call: its inputs, the modes of the thread, and the state of the modules.

Everything here is read before every launch, so it is a few tuples, and no walk over a module tree that has not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from operator import attrgetter
from typing import Any

from ddp._engine.modes import state
from ddp._tensor.base import TensorBase
from ddp.errors import ArgumentError

_DEPTH = 4  # how far into the objects of a step modules are looked for


def tensors_of(value: Any, tensors: list[TensorBase]) -> list[TensorBase]:
    """Puts the tensors of nested tuples, lists and dicts into `tensors`."""
    if isinstance(value, TensorBase):
        tensors.append(value)
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            tensors_of(each, tensors)
    return tensors


def signature(value: Any) -> Hashable:
    """Everything but the numbers of tensors, to compare by. Raises: ArgumentError for what cannot be compared."""
    if isinstance(value, TensorBase):
        array = value.array
        return TensorBase, array.shape, array.dtype.char if array.dtype.kind != "V" else "bfloat16"
    if isinstance(value, tuple | list):
        return type(value), *map(signature, value)
    if isinstance(value, dict):
        return dict, *[(key, signature(each)) for key, each in value.items()]
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"graphed_step: a {type(value).__name__} is an argument that cannot be compared with that of the next "
            "call; give tensors, numbers, strings, and tuples, lists and dicts of these"
        ) from None
    return type(value), value


def replace_tensors(value: Any, tensors: Iterable[Any]) -> Any:
    """`value` with other tensors in the places of its own, in the order of `tensors_of`."""
    source = iter(tensors)

    def build(value: Any) -> Any:
        if isinstance(value, TensorBase):
            return next(source)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[build(each) for each in value])
        if isinstance(value, tuple | list):
            return type(value)([build(each) for each in value])
        if isinstance(value, dict):
            return {key: build(each) for key, each in value.items()}
        return value

    return build(value)


def modes_now() -> Hashable:
    """The modes of this thread that ops depend on: gradients, inference, autocast."""
    rules = getattr(state.autocast, "rules", None)
    casting = None if rules is None else tuple([(kind, dtype.name) for kind, dtype in rules.items()])
    return state.enabled, state.inference, state.anomaly, casting


class StepState:
    """The modules and optimizers that a step function uses, found in its closure, its globals and its object."""

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
        """Which modules train, which memory they hold, what of it wants gradients; the optimizers' settings."""
        registrations = self._roots[0].registration_count() if self._roots else 0
        if registrations != self._registrations:
            self._registrations = registrations
            self._modules = [module for root in self._roots for module in root.modules()]
            self._tensors = [tensor for module in self._modules for tensor in _own_tensors(module)]
        return (
            tuple(map(_training, self._modules)),
            tuple(map(id, map(_array, self._tensors))),
            tuple(map(_edge, self._tensors)),
            # Our own optimizers have their settings in device memory, where they are kept up to date.
            self.settings([each for each in self._optimizers if not hasattr(each, "formula")]),
        )

    def settings(self, optimizers: Iterable[Any] | None = None) -> Hashable:
        """All settings of the optimizers: a captured step may not change them, as that would not happen again."""
        groups = [
            group for each in (self._optimizers if optimizers is None else optimizers) for group in each.param_groups
        ]
        return tuple([tuple([(k, _comparable(v)) for k, v in group.items() if k != "params"]) for group in groups])

    def replaced(self) -> list[str]:
        """The paths of tensors that modules hold now in the place of others."""
        known = set(map(id, self._tensors))
        return [
            path
            for root in self._roots
            for path, tensor in (*root.named_parameters(), *root.named_buffers())
            if id(tensor) not in known
        ]


_training, _array, _edge = attrgetter("training"), attrgetter("array"), attrgetter("edge")


def _own_tensors(module: Any) -> list[TensorBase]:
    held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return [tensor for tensor in held if tensor is not None]


def _used_by(value: Any) -> list[Any]:
    """The objects that a function, a collection or an object can reach in one step."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, list | tuple | dict):
        return [*value.values()] if isinstance(value, dict) else [*value]
    found: list[Any] = [value.__self__] if hasattr(value, "__self__") else []
    code = getattr(value, "__code__", None)
    if code is not None:
        scope = value.__globals__
        found += [scope[name] for name in code.co_names if name in scope and not isinstance(scope[name], _SKIPPED)]
        for cell in value.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
    elif hasattr(value, "__dict__") and not isinstance(value, _SKIPPED) and type(value).__module__ != "builtins":
        found += vars(value).values()
    return found


_SKIPPED = (type, type(functools))  # classes and modules


def _comparable(value: Any) -> Hashable:
    if isinstance(value, TensorBase):
        return id(value.array)
    return tuple(value) if isinstance(value, list) else value if isinstance(value, Hashable) else id(value)
