"""The names of PyTorch's compilers. `ddp.compile` and `ddp.jit.script` return their argument, which runs as Python.

`ddp.cuda.graphed_step` captures whole steps on a GPU.
"""

from __future__ import annotations

from typing import Any

from ddp.errors import warn_once

__all__ = ["export", "ignore", "is_scripting", "script", "trace", "unused"]


def _say() -> None:
    warn_once(
        "ddp.compile and ddp.jit compile nothing: functions and modules run as they are. "
        "ddp.cuda.graphed_step captures whole training steps on a GPU",
        stacklevel=3,
    )


def compile(model: Any = None, **ignored: Any) -> Any:
    """Returns `model` itself; without it, a decorator that returns its argument. Warns once: nothing is compiled.

    ignored: PyTorch's mode, backend, fullgraph and others
    """
    _say()
    return model if model is not None else lambda model: model


def script(obj: Any, *ignored: Any, **also_ignored: Any) -> Any:
    """Returns `obj` itself (a function, module or class); examples are not run. Warns once: nothing is compiled."""
    _say()
    return obj


trace = script


def ignore(drop: Any = False, **ignored: Any) -> Any:
    """Returns the function itself; called with options, a decorator that returns its argument. Nothing is compiled."""
    return drop if callable(drop) else lambda fn: fn


def unused(fn: Any) -> Any:
    """Returns the function itself: nothing is compiled."""
    return fn


export = unused


def is_scripting() -> bool:
    """Returns False: nothing is compiled."""
    return False
