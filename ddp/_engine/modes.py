"""Whether ops are recorded: a switch of each thread, turned by context managers and decorators."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

Fn = TypeVar("Fn", bound=Callable[..., Any])


class Casting(Protocol):
    """What autocast does to the inputs of an op."""

    def __call__(self, op: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs in the dtype to use."""

    def spares(self, op: Any, x: Any) -> bool:
        """Whether the op takes x in 16 bits, and is to give float32."""


class Mode(threading.local):
    """What is on in a thread; the class has what is on unless said otherwise."""

    enabled = True  # ops are recorded
    inference = False
    anomaly = False  # gradients are checked for nan as they come
    guarded = False  # inside an op that looks after its device: see `ddp._tensor.device_guard`
    quiet = False  # somebody above has silenced floating-point warnings already
    observers: tuple[Callable[[Any], None], ...] = ()  # see every new node: anomaly mode, checkpointed regions
    reached: Callable[[Sequence[Any]], None] | None = None  # sees the leaves of a backward: CUDA graphs
    autocast: Casting | None = None


state = Mode()


def _turn(mode: bool) -> None:
    state.enabled = mode and not state.inference


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
        _turn(mode)

    def __enter__(self) -> None:
        _turn(self.mode)

    def __exit__(self, *exc: object) -> None:
        state.enabled = self.before

    def __call__(self, function: Fn) -> Fn:
        state.enabled = self.before  # used as a decorator: only calls of the function are meant
        return _decorated(function, self.mode)


class _Scope:
    """A grad mode for a `with` block or a decorated function; one object may be entered again inside itself."""

    mode: bool

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        # `@no_grad` without the parentheses, as PyTorch has it.
        return cls()(arguments[0]) if arguments and callable(arguments[0]) else super().__new__(cls)

    def __init__(self) -> None:
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(state.enabled)
        _turn(self.mode)

    def __exit__(self, *exc: object) -> None:
        state.enabled = self.before.pop()

    def __call__(self, function: Fn) -> Fn:
        return _decorated(function, self.mode)


class no_grad(_Scope):
    """Ops inside are not recorded: `with no_grad(): ...` or `@no_grad()`. Per thread."""

    mode = False


class inference_mode(_Scope):
    """As no_grad, and enable_grad inside does not turn recording on again. `mode=False` changes nothing."""

    mode = False

    def __init__(self, mode: bool = True) -> None:
        super().__init__()
        self.wanted = mode
        self.outer: list[bool] = []

    def __enter__(self) -> None:
        self.outer.append(state.inference)
        self.before.append(state.enabled)
        if self.wanted:
            state.inference, state.enabled = True, False

    def __exit__(self, *exc: object) -> None:
        state.inference = self.outer.pop()
        state.enabled = self.before.pop()

    def __call__(self, function: Fn) -> Fn:
        wanted = self.wanted
        if inspect.isgeneratorfunction(function):
            return _stepped(function, lambda: inference_mode(wanted))

        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with inference_mode(wanted):
                return function(*args, **kwargs)

        return cast(Fn, inner)


def is_inference_mode_enabled() -> bool:
    """Whether this thread is inside inference_mode."""
    return state.inference


class enable_grad(_Scope):
    """Ops inside are recorded, also within no_grad: `with enable_grad(): ...` or `@enable_grad()`. Per thread."""

    mode = True


def _decorated(function: Fn, mode: bool) -> Fn:
    if inspect.isgeneratorfunction(function):
        return _stepped(function, enable_grad if mode else no_grad)

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        before = state.enabled
        _turn(mode)
        try:
            return function(*args, **kwargs)
        finally:
            state.enabled = before

    return cast(Fn, inner)


def _stepped(function: Fn, scope: Callable[[], Any]) -> Fn:
    """A generator function whose steps run in `scope`; what its caller does between them does not."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        resume, given = generator.send, None
        try:
            while True:
                try:
                    with scope():
                        item = resume(given)
                except StopIteration as stop:
                    return stop.value
                try:
                    resume, given = generator.send, (yield item)
                except GeneratorExit:
                    raise
                except BaseException as error:
                    resume, given = generator.throw, error
        finally:
            with scope():
                generator.close()

    return cast(Fn, inner)
