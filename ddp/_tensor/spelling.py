"""NumPy's names of arguments, which PyTorch takes as well: axis for dim, keepdims for keepdim."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ddp.errors import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])

_OURS = {"axis": "dim", "keepdims": "keepdim"}


def spelled(function: F) -> F:
    """`function`, which takes dim and keepdim, under NumPy's names of them too. Raises: ArgumentError for both."""

    @functools.wraps(function)
    def also(*given: Any, **named: Any) -> Any:
        if named and not _OURS.keys().isdisjoint(named):
            for theirs, ours in _OURS.items():
                if theirs in named:
                    if ours in named:
                        raise ArgumentError(f"{function.__name__}: {theirs} and {ours} are one argument")
                    named[ours] = named.pop(theirs)
        return function(*given, **named)

    return cast(F, also)
