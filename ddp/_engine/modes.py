"""The modes of a thread, such as whether ops are recorded, and the context managers and decorators that set them."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

Fn = TypeVar("Fn", bound=Callable[..., Any])


class Casting(Protocol):
    """The object that casts the inputs of each op under autocast."""

    def __call__(self, op: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns the inputs in the dtypes in which the op is to run."""

    def spares(self, op: Any, x: Any) -> bool:
        """Whether autocast leaves x in 16 bits, although the result of the op is to be float32."""


class Mode(threading.local):
    """The modes of a thread; class attributes are the defaults."""

    enabled = True  # ops are recorded
    inference = False
    anomaly = False  # backward checks every gradient for nan
    guarded = False  # inside `ddp._tensor.base.guarded_run`
    # Called with every new node except `SelectOutput`: for anomaly mode, checkpointed regions, CUDA streams and CUDA
    # graphs.
    observers: tuple[Callable[[Any], None], ...] = ()
    # Called with the leaves that a backward reaches: for CUDA graphs.
    reached: Callable[[Sequence[Any]], None] | None = None
    autocast: Casting | None = None


state = Mode()


def is_grad_enabled() -> bool:
    """Whether ops of this thread are recorded for backward."""
    return state.enabled


def is_inference_mode_enabled() -> bool:
    """Whether this thread is inside inference_mode."""
    return state.inference


def _change(settings: dict[str, Any]) -> dict[str, Any]:
    """Changes attributes of `state`, and returns what they were."""
    before = {name: getattr(state, name) for name in settings}
    for name, value in settings.items():
        setattr(state, name, value)
    return before


class Scope:
    """Settings of this thread for a `with` block or a decorated function; blocks of one object may be nested."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        # Allows `@no_grad` without parentheses, as PyTorch does.
        return cls()(arguments[0]) if arguments and callable(arguments[0]) else super().__new__(cls)

    def __init__(self) -> None:
        self.before: list[dict[str, Any]] = []

    def settings(self) -> dict[str, Any]:
        """Returns new values of attributes of `state`, by name."""
        raise NotImplementedError

    def __enter__(self) -> None:
        self.before.append(_change(self.settings()))

    def __exit__(self, *exc: object) -> None:
        _change(self.before.pop())

    def __call__(self, function: Fn) -> Fn:
        return cast(Fn, _in_steps(function, self) if inspect.isgeneratorfunction(function) else self._around(function))

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            before = _change(self.settings())
            try:
                return function(*args, **kwargs)
            finally:
                _change(before)

        return inner


def _in_steps(function: Callable[..., Any], scope: Scope) -> Callable[..., Any]:
    """Makes the steps of a generator function run in `scope`; the caller's code between two steps runs outside it."""

    @scope
    def step(resume: Callable[[Any], Any], value: Any) -> Any:
        return resume(value)

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        resume = generator.send
        value = None
        try:
            while True:
                try:
                    item = step(resume, value)
                except StopIteration as stop:
                    return stop.value
                try:
                    value = yield item
                    resume = generator.send
                except GeneratorExit:
                    raise
                except BaseException as error:
                    resume = generator.throw
                    value = error
        finally:
            scope(generator.close)()

    return inner


class Assignment(Scope):
    """Settings that hold as soon as the object exists; a `with` block restores the earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        super().__enter__()

    def __enter__(self) -> None:
        _change(self.settings())

    def __exit__(self, *exc: object) -> None:
        _change(self.before[0])

    def __call__(self, function: Fn) -> Fn:
        _change(self.before[0])  # used as a decorator: the settings are only for calls of the function
        return super().__call__(function)


class set_grad_enabled(Assignment):
    """Turns recording on or off in this thread: as a context manager, a decorator, or called as a statement.

    As in PyTorch, `set_grad_enabled(False)` takes effect at once; a `with` block restores the earlier setting. Within
    inference_mode, recording stays off.
    """

    def __init__(self, mode: bool) -> None:
        self.mode = mode
        super().__init__()

    def settings(self) -> dict[str, Any]:
        return {"enabled": self.mode and not state.inference}


class no_grad(Scope):
    """Ops inside are not recorded: `with no_grad(): ...` or `@no_grad()`. Per thread."""

    def settings(self) -> dict[str, Any]:
        return {"enabled": False}


class enable_grad(Scope):
    """Ops inside are recorded, also within no_grad, but not within inference_mode. Per thread.

    `with enable_grad(): ...` or `@enable_grad()`.
    """

    def settings(self) -> dict[str, Any]:
        return {"enabled": not state.inference}


class inference_mode(Scope):
    """As no_grad, but enable_grad inside does not turn recording on. `mode=False` changes nothing."""

    def __init__(self, mode: bool = True) -> None:
        super().__init__()
        self.mode = mode

    def settings(self) -> dict[str, Any]:
        return {"inference": True, "enabled": False} if self.mode else {}
