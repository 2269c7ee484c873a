"""Modules that hold modules or parameters: lists, dicts, and a wrapper of one module."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar, overload

from ddp._tensor.core import Tensor
from ddp.errors import DtypeError, RangeError, warn_once
from ddp.nn.module import Module, note_registration
from ddp.nn.parameter import Parameter

L = TypeVar("L", bound="_Sequence")


class _Container(Module):
    """The base of containers of modules or parameters. `_entries`: the modules or parameters, by name"""

    _entries = property(operator.attrgetter("_modules"))

    def __len__(self) -> int:
        return len(self._entries)


class _Sequence(_Container):
    """A list of modules or parameters, named by their positions (in a Sequential made from a dict, by its keys)."""

    def _set(self, name: str, value: Any) -> None:
        """Registers an entry. Raises: DtypeError."""
        raise NotImplementedError

    def _like(self, items: list[tuple[str, Any]]) -> Any:
        """A container of this class with these entries."""
        cls: Any = type(self)
        return cls([value for _, value in items])

    def _position(self, index: int, inserting: bool = False) -> int:
        """Converts an index, which may be negative, to a position. Raises: RangeError."""
        n = len(self)
        i = operator.index(index)
        if not -n <= i < n + inserting:
            raise RangeError(f"{type(self).__name__} of {n} entries has no entry {i}")
        return i + n if i < 0 else i

    def _name(self, index: int) -> str:
        return next(itertools.islice(self._entries, self._position(index), None))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries.values())

    @overload
    def __getitem__(self: L, index: int) -> Any: ...
    @overload
    def __getitem__(self: L, index: slice) -> L: ...
    def __getitem__(self: L, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._like(list(self._entries.items())[index])
        return self._entries[self._name(index)]

    def __setitem__(self, index: int, value: Any) -> None:
        self._set(self._name(index), value)

    def __iadd__(self: L, other: Iterable[Any]) -> L:
        return self.extend(other)

    def append(self: L, value: Any) -> L:
        """Adds an entry at the end, and returns this container."""
        self._set(str(len(self)), value)
        return self

    def extend(self: L, values: Iterable[Any]) -> L:
        """Adds entries at the end, and returns this container.

        Raises: DtypeError if `values` is not iterable, or is a string, bytes or a tensor, or if an entry has another
        type.
        """
        if not isinstance(values, Iterable) or isinstance(values, str | bytes | Tensor):
            raise DtypeError(f"{type(self).__name__}: expected a sequence, got {type(values).__name__}")
        for value in list(values):
            self.append(value)
        return self


class _ModuleSequence(_Sequence):
    """The base of Sequential and ModuleList: a list of modules, which are its children."""

    def _set(self, name: str, value: Any) -> None:
        self.add_module(name, value)

    def _refill(self, modules: Iterable[Any]) -> None:
        """Replaces all children by `modules`, whose names are their positions. Raises: DtypeError for another type."""
        children = list(modules)
        for module in children:
            if module is not None and not isinstance(module, Module):
                raise DtypeError(f"{type(self).__name__}: expected a Module, got {type(module).__name__}")
        self._modules.clear()
        self._modules.update((str(i), module) for i, module in enumerate(children))
        note_registration()

    def __delitem__(self, index: int | slice) -> None:
        modules = list(self._modules.values())
        del modules[index if isinstance(index, slice) else self._position(index)]
        self._refill(modules)

    def insert(self: L, index: int, module: Module) -> L:
        """Adds a module before position `index`, and returns this container. Names all children by their positions.

        Raises: RangeError, DtypeError.
        """
        modules = list(self._modules.values())
        modules.insert(self._position(index, inserting=True), module)
        self._refill(modules)
        return self

    def pop(self, key: int) -> Any:
        """Removes the module at position `key`, and returns it. Names the remaining modules by their positions.

        Raises: RangeError.
        """
        module = self[key]
        del self[key]
        return module


class Sequential(_ModuleSequence):
    """Modules applied one after another: Sequential(a, b), or Sequential({"first": a, "second": b})."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        named = modules[0].items() if len(modules) == 1 and isinstance(modules[0], dict) else enumerate(modules)
        for name, module in named:
            self.add_module(str(name), module)

    def forward(self, input: Any) -> Any:
        """input: what the first module takes. Returns the result of the last module."""
        for module in self._modules.values():
            assert module is not None
            input = module(input)
        return input

    def _like(self, items: list[tuple[str, Any]]) -> Any:
        return type(self)(dict(items))

    def __add__(self, other: Sequential) -> Sequential:
        if not isinstance(other, Sequential):
            raise DtypeError(f"Sequential + {type(other).__name__}: expected a Sequential")
        return Sequential(*self, *other)

    def __mul__(self, times: int) -> Sequential:
        return Sequential(*(module for _ in range(times) for module in self))

    __rmul__ = __mul__


class DataParallel(Module):
    """Stands in for PyTorch's nn.DataParallel: calls `module` on one device, and warns of that once.

    device_ids, output_device and dim are ignored. For several devices, use `ddp.DataParallel` under ddp-launch.
    Paths in the state dict begin with "module.".
    """

    def __init__(self, module: Module, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        super().__init__()
        warn_once(
            "nn.DataParallel: a process computes on one device here, and the module runs on it alone. "
            "For several, wrap it in ddp.DataParallel and start the script with ddp-launch"
        )
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Returns the result of the module."""
        return self.module(*inputs, **options)


class ModuleList(_ModuleSequence):
    """A list of modules. `parameters()` finds their parameters. A list cannot be called, unlike a Sequential."""

    def __init__(self, modules: Iterable[Module] | None = None) -> None:
        super().__init__()
        if modules is not None:
            self.extend(modules)

    def __add__(self, other: Iterable[Module]) -> ModuleList:
        return ModuleList([*self, *other])

    def _children_text(self) -> list[str]:
        lines = []
        start = 0
        for text, run in itertools.groupby(map(repr, self)):
            count = len(list(run))
            lines.append(f"({start}): {text}" if count == 1 else f"({start}-{start + count - 1}): {count} x {text}")
            start += count
        return lines


_mapping: Any = MutableMapping


class _Dict(_Container):
    """The base of ModuleDict and ParameterDict."""

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    # An entry cannot have the name of a method. So this class does not inherit from MutableMapping, but has only the
    # methods of PyTorch's ModuleDict: these, `clear` and `update`.
    keys = _mapping.keys
    values = _mapping.values
    items = _mapping.items
    pop = _mapping.pop

    def clear(self) -> None:
        """Removes all entries."""
        self._entries.clear()


class ModuleDict(_Dict):
    """Modules by name, in the order of insertion; `parameters()` finds their parameters.

    Raises: DtypeError if a value is not a module; ArgumentError for a name that is empty, has a dot or belongs to a
    method; KeyError for a missing name.
    """

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] | None = None) -> None:
        super().__init__()
        self.update(modules or ())

    def __setitem__(self, key: str, module: Module) -> None:
        self.add_module(key, module)

    def update(self, modules: Any) -> None:
        """Adds the modules of a mapping, or of pairs of name and module."""
        _mapping.update(self, modules)


def _as_parameter(value: Any, name: str) -> Parameter:
    """Returns `value`, a tensor, as a parameter. Raises: DtypeError if it is not a tensor."""
    if isinstance(value, Parameter):
        return value
    if not isinstance(value, Tensor):
        raise DtypeError(f"{name}: expected a Parameter or a Tensor, got {type(value).__name__}")
    return Parameter(value, requires_grad=value.is_floating_point())


def _parameter_lines(module: Module) -> str:
    return "\n".join(
        f"  ({name}): Parameter containing: [ddp.{value.dtype.name} of size {'x'.join(map(str, value.shape))}]"
        for name, value in module._parameters.items()
        if value is not None
    )


class ParameterDict(_Dict):
    """Parameters by name. They belong to the module that holds the dict. Tensors become parameters.

    Raises: DtypeError if a value is not a tensor; ArgumentError for a name that is empty, has a dot or belongs to a
    method; KeyError for a missing name.
    """

    _entries = property(operator.attrgetter("_parameters"))

    def __init__(self, parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None) -> None:
        super().__init__()
        self.update(parameters or ())

    def __setitem__(self, key: str, value: Any) -> None:
        self.register_parameter(key, _as_parameter(value, "ParameterDict"))

    def update(self, parameters: Any) -> None:
        """Adds the parameters of a mapping, or of pairs of name and parameter."""
        _mapping.update(self, parameters)

    get = _mapping.get

    def popitem(self) -> tuple[str, Any]:
        """Removes the last entry, and returns its name and its parameter."""
        return self._entries.popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Returns the entry `key`; if there is none, adds `default` first."""
        if key not in self._entries:
            self[key] = default
        return self._entries[key]

    def __or__(self, other: ParameterDict) -> ParameterDict:
        return ParameterDict({**dict(self.items()), **dict(other.items())})

    def __ior__(self, other: ParameterDict) -> ParameterDict:
        self.update(other.items())
        return self

    def copy(self) -> ParameterDict:
        """Returns another dict of the same parameters."""
        return ParameterDict(self.items())

    def extra_repr(self) -> str:
        return _parameter_lines(self)


class ParameterList(_Sequence):
    """A list of parameters. They belong to the module that holds the list. Tensors become parameters.

    Raises: DtypeError if a value is not a tensor; RangeError for an index out of range.
    """

    _entries = property(operator.attrgetter("_parameters"))

    def __init__(self, values: Iterable[Any] | None = None) -> None:
        super().__init__()
        if values is not None:
            self.extend(values)

    def _set(self, name: str, value: Any) -> None:
        self.register_parameter(name, _as_parameter(value, "ParameterList"))

    def extra_repr(self) -> str:
        return _parameter_lines(self)
