"""Which classes and functions a file may name: those of `ddp.nn`, and those that the reader lists.

A file holds names alone. They are looked up here, and nothing is imported or called for one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_listed: dict[str, Any] = {}


def reference(value: Any) -> str:
    """How a file names a class or a function."""
    return f"{value.__module__}:{value.__qualname__}"


def found(name: str) -> Any:
    """The class or function of that name, None if no file may name it."""
    module, _, attribute = name.partition(":")
    if module.startswith(("ddp.nn.", "ddp._tensor.functions.")):
        value = getattr(sys.modules.get(module), attribute, None)
        return value if callable(value) and reference(value) == name else None
    return _listed.get(name)


def add_safe_globals(safe_globals: Iterable[Any]) -> None:
    """From now on `load` also makes modules of these classes, and takes these functions for their attributes."""
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
