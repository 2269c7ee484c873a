"""Modules that hold modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

from ddp.errors import RangeError
from ddp.nn._module import Module


class Sequential(Module):
    """Modules applied one after another: Sequential(a, b), or Sequential({"first": a, "second": b})."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        named = modules[0].items() if len(modules) == 1 and isinstance(modules[0], dict) else enumerate(modules)
        for name, module in named:
            self.add_module(str(name), module)

    def forward(self, input: Any) -> Any:
        """input: what the first module takes; returns what the last one does."""
        for module in self._modules.values():
            assert module is not None
            input = module(input)
        return input

    def append(self, module: Module) -> Sequential:
        """Adds a module at the end, and returns this one."""
        self.add_module(str(len(self)), module)
        return self

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequential: ...
    def __getitem__(self, index: int | slice) -> Any:
        items = list(self._modules.items())
        if isinstance(index, slice):
            return Sequential(dict(items[index]))
        if not -len(items) <= index < len(items):
            raise RangeError(f"Sequential of {len(items)} modules has no module {index}")
        return items[index][1]
