"""A module that is known by name now, and executed when first looked into: nobody pays for what he never uses.

`from package import module` hands out such a module as any other; `from package.module import name` looks into it.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    def __getattribute__(self, name: str) -> Any:
        if object.__getattribute__(self, "__class__") is _Later:
            _execute(self)
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__  # noqa: B018  # executes it: what is set must not be overwritten then
        setattr(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__  # noqa: B018
        delattr(self, name)


def _execute(module: ModuleType) -> None:
    # From here on it is a module as any other, also to those that it imports, and which look into it.
    object.__setattr__(module, "__class__", ModuleType)
    name = module.__name__
    package = name.rpartition(".")[0]
    spec = PathFinder.find_spec(name, sys.modules[package].__path__)
    assert spec is not None, name
    assert spec.loader is not None, name
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, package
    module.__file__, module.__cached__ = spec.origin, spec.cached  # type: ignore[attr-defined]
    try:
        spec.loader.exec_module(module)
    except BaseException:
        object.__setattr__(module, "__class__", _Later)
        raise


def later(name: str) -> ModuleType:
    """The module of this full name, to be executed when first looked into; or as it is, if it was imported already."""
    found = sys.modules.get(name)
    if found is None:
        found = sys.modules[name] = _Later(name)
    return found


def executed(name: str) -> bool:
    """Whether the module of this full name was executed in this process."""
    return name in sys.modules and type(sys.modules[name]) is not _Later
