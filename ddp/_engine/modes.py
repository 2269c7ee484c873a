"""Whether ops are recorded: a switch of each thread, turned by context managers and decorators."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

Fn = TypeVar("Fn", bound=Callable[..., Any])


class _Mode(threading.local):
    enabled = True


state = _Mode()


def is_grad_enabled() -> bool:
    """Whether ops of this thread are recorded for backward."""
    return state.enabled


class set_grad_enabled:
    """Turns recording on or off in this thread: as a context manager, a decorator, or called as a statement.

    As in PyTorch, `set_grad_enabled(False)` takes effect at once; `with` restores what was before it.
    """

    def __init__(self, mode: bool) -> None:
        self.mode = mode
        self.before = state.enabled
        state.enabled = mode

    def __enter__(self) -> None:
        state.enabled = self.mode

    def __exit__(self, *exc: object) -> None:
        state.enabled = self.before

    def __call__(self, function: Fn) -> Fn:
        state.enabled = self.before  # used as a decorator: only calls of the function are meant
        return _decorated(function, self.mode)


class _Scope:
    """A grad mode for a `with` block or a decorated function; one object may be entered again inside itself."""

    mode: bool

    def __init__(self) -> None:
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(state.enabled)
        state.enabled = self.mode

    def __exit__(self, *exc: object) -> None:
        state.enabled = self.before.pop()

    def __call__(self, function: Fn) -> Fn:
        return _decorated(function, self.mode)


class no_grad(_Scope):
    """Ops inside are not recorded: `with no_grad(): ...` or `@no_grad()`. Per thread."""

    mode = False


class enable_grad(_Scope):
    """Ops inside are recorded, also within no_grad: `with enable_grad(): ...` or `@enable_grad()`. Per thread."""

    mode = True


def _decorated(function: Fn, mode: bool) -> Fn:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        before = state.enabled
        state.enabled = mode
        try:
            return function(*args, **kwargs)
        finally:
            state.enabled = before

    return cast(Fn, inner)
