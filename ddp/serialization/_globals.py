"""Which classes and functions a file may name: those of `ddp.nn`, and those that the reader lists.

A file holds names alone. They are looked up here, and nothing is imported or called for one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from ddp.errors import ArgumentError

#: Where classes and functions have their public names, which stay when files are renamed.
_PUBLIC = ("ddp.nn", "ddp.nn.functional", "ddp")
_OURS = ("ddp.nn.", "ddp._tensor.functions", "ddp._tensor.joining", "ddp._tensor.contraction")

_listed: dict[str, Any] = {}


def reference(value: Any) -> str:
    """How a file names a class or a function: `package.module:Class`, by its public name if it is one of ours.

    Raises: ArgumentError for anything else.
    """
    if not isinstance(value, (type, FunctionType)):
        raise ArgumentError(f"safe_globals: expected classes and functions themselves, got {value!r:.80}")
    name: str = value.__qualname__
    for module in _PUBLIC:
        if getattr(sys.modules.get(module), name, None) is value:
            return f"{module}:{name}"
    return f"{value.__module__}:{name}"


def found(name: str) -> Any:
    """The class or function of that name, None if no file may name it."""
    module, _, attribute = name.partition(":")
    if module in _PUBLIC or module.startswith(_OURS):
        value: Any = getattr(sys.modules.get(module), attribute, None)
        known = isinstance(value, type | FunctionType) and value.__module__.startswith(_OURS)
        return value if known and reference(value) == name else None
    return _listed.get(name)


def add_safe_globals(safe_globals: Iterable[Any]) -> None:
    """From now on `load` also makes modules of these classes, and takes these functions for their attributes.

    Raises: ArgumentError for something else, such as a name.
    """
    _listed.update({reference(each): each for each in safe_globals})


@contextlib.contextmanager
def safe_globals(safe_globals: Iterable[Any]) -> Iterator[None]:
    """As `add_safe_globals`, inside alone; in all threads."""
    before = dict(_listed)
    add_safe_globals(safe_globals)
    try:
        yield
    finally:
        _listed.clear()
        _listed.update(before)
