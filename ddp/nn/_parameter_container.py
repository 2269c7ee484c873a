"""Modules that hold parameters: ParameterList behaves like a list, ParameterDict like a dict."""

from __future__ import annotations

import operator
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from ddp._tensor.core import Tensor
from ddp.errors import DtypeError, RangeError
from ddp.nn._module import Module, Parameter


def _parameter(value: Any, name: str) -> Parameter:
    """A parameter, made of a tensor where it is not one. Raises: DtypeError."""
    if isinstance(value, Parameter):
        return value
    if not isinstance(value, Tensor):
        raise DtypeError(f"{name}: expected a Parameter or a Tensor, got {type(value).__name__}")
    return Parameter(value, requires_grad=value.is_floating_point())


class _Held(Module):
    def extra_repr(self) -> str:
        return "\n".join(
            f"  ({name}): Parameter containing: [ddp.{value.dtype.name} of size {'x'.join(map(str, value.shape))}]"
            for name, value in self._parameters.items()
            if value is not None
        )

    def __len__(self) -> int:
        return len(self._parameters)


class ParameterList(_Held):
    """A list of parameters, which a module that holds it trains; tensors become parameters.

    Raises: DtypeError for what is no tensor; RangeError for an index that is not there.
    """

    def __init__(self, values: Iterable[Any] | None = None) -> None:
        super().__init__()
        if values is not None:
            self.extend(values)

    def _name(self, index: int) -> str:
        n, i = len(self), operator.index(index)
        if not -n <= i < n:
            raise RangeError(f"ParameterList of {n} parameters has no parameter {i}")
        return str(i % n)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return ParameterList(list(self)[index])
        return self._parameters[self._name(index)]

    def __setitem__(self, index: int, value: Any) -> None:
        self.register_parameter(self._name(index), _parameter(value, "ParameterList"))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parameters.values())

    def __iadd__(self, values: Iterable[Any]) -> ParameterList:
        return self.extend(values)

    def append(self, value: Any) -> ParameterList:
        """Adds a parameter at the end, and returns this list."""
        self.register_parameter(str(len(self)), _parameter(value, "ParameterList"))
        return self

    def extend(self, values: Iterable[Any]) -> ParameterList:
        """Adds parameters at the end, and returns this list."""
        if not isinstance(values, Iterable) or isinstance(values, Tensor):
            raise DtypeError(f"ParameterList: expected a sequence of parameters, got {type(values).__name__}")
        for value in list(values):
            self.append(value)
        return self


class ParameterDict(_Held):
    """Parameters by name, which a module that holds it trains; tensors become parameters.

    Raises: DtypeError for what is no tensor; KeyError for a name that is not there.
    """

    def __init__(self, parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None) -> None:
        super().__init__()
        if parameters is not None:
            self.update(parameters)

    def __getitem__(self, key: str) -> Any:
        return self._parameters[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.register_parameter(key, _parameter(value, "ParameterDict"))

    def __delitem__(self, key: str) -> None:
        del self._parameters[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._parameters)

    def __contains__(self, key: object) -> bool:
        return key in self._parameters

    def __or__(self, other: ParameterDict) -> ParameterDict:
        return ParameterDict({**dict(self.items()), **dict(other.items())})

    def __ior__(self, other: ParameterDict) -> ParameterDict:
        self.update(other.items())
        return self

    def copy(self) -> ParameterDict:
        """Another dict of the same parameters."""
        return ParameterDict(self.items())

    def clear(self) -> None:
        """Takes all parameters out."""
        self._parameters.clear()

    def get(self, key: str, default: Any = None) -> Any:
        """The parameter of that name, or `default`."""
        return self._parameters.get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The parameter of that name, put there if it is not there yet."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str) -> Any:
        """Takes a parameter out, and returns it."""
        return self._parameters.pop(key)

    def popitem(self) -> tuple[str, Any]:
        """Takes the last parameter out, and returns it with its name."""
        return self._parameters.popitem()

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._parameters.keys()

    def items(self) -> ItemsView[str, Any]:
        """The names and parameters."""
        return self._parameters.items()

    def values(self) -> ValuesView[Any]:
        """The parameters."""
        return self._parameters.values()

    def update(self, parameters: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Adds parameters, replacing those of the same names."""
        pairs: Any = parameters.items() if isinstance(parameters, Mapping | ParameterDict) else parameters
        for key, value in pairs:
            self[key] = value
