"""What decides whether a captured step fits a call: its inputs, the modes of the thread, and the state of the modules.

Everything here is read before every launch, so it is a few tuples, and no walk over a tree that has not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from operator import attrgetter
from typing import Any

from ddp._engine.modes import state
from ddp._tensor.base import TensorBase
from ddp.errors import ArgumentError

_DEPTH = 3  # how far into the objects of a step modules are looked for


def flatten(value: Any, tensors: list[TensorBase]) -> Hashable:
    """Puts the tensors of nested tuples, lists and dicts into `tensors`. Returns: everything else, to compare by.

    Raises: ArgumentError for what cannot be compared.
    """
    if isinstance(value, TensorBase):
        tensors.append(value)
        array = value.array
        return (_TensorPlace, array.shape, array.dtype.char if array.dtype.kind != "V" else "bfloat16")
    if isinstance(value, tuple | list):
        return (type(value), *[flatten(each, tensors) for each in value])
    if isinstance(value, dict):
        return (dict, *[(key, flatten(each, tensors)) for key, each in value.items()])
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"graphed_step: a {type(value).__name__} is an argument that cannot be compared with that of the next "
            "call; give tensors, numbers, strings, and tuples, lists and dicts of these"
        ) from None
    return type(value), value


class _TensorPlace:
    """In the place of a tensor."""


def rebuilt(value: Any, tensors: Iterable[Any]) -> Any:
    """`value` with other tensors in the places of its own, in the order of `flatten`."""
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
    """The modes of this thread that ops look at: gradients, inference, autocast."""
    rules = getattr(state.autocast, "rules", None)
    casting = None if rules is None else tuple([(kind, dtype.name) for kind, dtype in rules.items()])
    return state.enabled, state.inference, state.anomaly, casting


class Surroundings:
    """The modules and optimizers that a step function uses, found in what it closes over, its globals and its self."""

    def __init__(self, fn: Any, modules: Iterable[Any] = ()) -> None:
        self.roots: list[Any] = []
        self.optimizers: list[Any] = []
        self.tensors: list[TensorBase] = []
        self._modules: list[Any] = []
        self._mark = -1
        seen: set[int] = set()
        for each in modules:
            self._look(each, _DEPTH, seen)
        for each in _used_by(fn):
            self._look(each, _DEPTH, seen)

    def _look(self, value: Any, depth: int, seen: set[int]) -> None:
        if id(value) in seen or depth < 0:
            return
        seen.add(id(value))
        if hasattr(value, "named_modules") and hasattr(value, "named_buffers"):
            self.roots.append(value)
        elif isinstance(getattr(value, "param_groups", None), list):
            self.optimizers.append(value)
        elif isinstance(value, list | tuple):
            for each in value:
                self._look(each, depth - 1, seen)
        elif isinstance(value, dict):
            for each in value.values():
                self._look(each, depth - 1, seen)
        elif callable(value) and hasattr(value, "__code__"):
            for each in _used_by(value):
                self._look(each, depth - 1, seen)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and type(value).__module__ != "builtins":
            for each in vars(value).values():
                self._look(each, depth - 1, seen)

    def state(self) -> Hashable:
        """Which modules train, which tensors they hold, which of these want gradients; the optimizers' settings."""
        mark = self.roots[0].registration_count() if self.roots else 0
        if mark != self._mark:
            self._mark = mark
            self._walk()
        tensors = self.tensors
        return (
            tuple(map(_training, self._modules)),
            tuple(map(id, map(_array, tensors))),
            tuple(map(_edge, tensors)),
            tuple([_settings(each) for each in self.optimizers]),
        )

    def settings(self) -> Hashable:
        """All settings of the optimizers: the step may not change them, as that would not happen again."""
        return tuple([_all_settings(each) for each in self.optimizers])

    def _walk(self) -> None:
        self._modules = [module for root in self.roots for module in root.modules()]
        self.tensors = [
            tensor
            for module in self._modules
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if tensor is not None
        ]

    def replaced(self) -> list[str]:
        """The paths of tensors that modules hold now in the place of others."""
        known = set(map(id, self.tensors))
        return [
            path
            for root in self.roots
            for path, tensor in (*root.named_parameters(), *root.named_buffers())
            if id(tensor) not in known
        ]


_training, _array, _edge = attrgetter("training"), attrgetter("array"), attrgetter("edge")


def _used_by(fn: Any) -> list[Any]:
    """The objects that a function can reach by name, or that it is bound to."""
    if isinstance(fn, functools.partial):
        return [fn.func, *fn.args, *fn.keywords.values()]
    found: list[Any] = []
    if hasattr(fn, "__self__"):
        found.append(fn.__self__)
    code = getattr(fn, "__code__", None)
    if code is None:
        return [*found, *vars(fn).values()] if hasattr(fn, "__dict__") else found
    scope = fn.__globals__
    found += [scope[name] for name in code.co_names if name in scope and not isinstance(scope[name], _NOT_LOOKED_INTO)]
    for cell in fn.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return found


_NOT_LOOKED_INTO = (type, type(functools))


def _settings(optimizer: Any) -> Hashable:
    """The settings of an optimizer; nothing of one that has them in device memory, where they are kept up to date."""
    return None if hasattr(optimizer, "formula") else _all_settings(optimizer)


def _all_settings(optimizer: Any) -> Hashable:
    return tuple(
        [
            tuple([(name, _plain(value)) for name, value in group.items() if name != "params"])
            for group in optimizer.param_groups
        ]
    )


def _plain(value: Any) -> Hashable:
    if isinstance(value, TensorBase):
        return id(value.array)
    return tuple(value) if isinstance(value, list) else value if isinstance(value, Hashable) else id(value)
