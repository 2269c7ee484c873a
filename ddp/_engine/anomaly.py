"""Anomaly mode: if the backward of an op computes nan, names the line of user code that ran the op."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from ddp._engine.graph import Node
from ddp._engine.modes import Assignment, Scope, state
from ddp.errors import AnomalyError

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


def user_line() -> str:
    """Returns the line of user code that is running now: `train.py:88 in forward: y = x.log()`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    import linecache  # imported only here, because few programs need it

    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}: {line}"


def _trace(node: Node) -> None:
    node.ensure_metadata().trace = user_line()


def _settings(on: bool, check_nan: bool) -> dict[str, Any]:
    others = tuple(observer for observer in state.observers if observer is not _trace)
    return {"observers": (_trace, *others) if on else others, "anomaly": on and check_nan}


class set_detect_anomaly(Assignment):
    """Turns anomaly mode of this thread on or off: as a statement, a context manager or a decorator.

    In this mode each recorded op stores the line of user code that ran it. If the backward of an op computes nan, an
    error that names this line stops backward. The mode is slow: use it for debugging.

    mode: turns it on or off; check_nan: False: backward does not look for nan

    Raises, in backward: AnomalyError if a gradient is nan.
    """

    def __init__(self, mode: bool = True, check_nan: bool = True) -> None:
        self.mode = mode
        self.check_nan = check_nan
        super().__init__()

    def settings(self) -> dict[str, Any]:
        return _settings(self.mode, self.check_nan)


class detect_anomaly(Scope):
    """Anomaly mode for a `with` block or a decorated function: see `set_detect_anomaly`."""

    def __init__(self, check_nan: bool = True) -> None:
        super().__init__()
        self.check_nan = check_nan

    def settings(self) -> dict[str, Any]:
        return _settings(True, self.check_nan)


def check_gradients(node: Node, results: Sequence[Any]) -> None:
    """Checks the gradients that `node` computed. Raises: AnomalyError, naming the op's forward line, if one is nan."""
    for i, g in enumerate(results):
        if g is not None and hasattr(g, "dtype") and bool(node.xp.isnan(g).any()):
            raise AnomalyError(
                f"{node.op.name}: the gradient of input {i}, shape {g.shape}, is nan; {forward_line(node)}"
            )


def forward_line(node: Node) -> str:
    """Says which line of user code ran the op of `node`, or that the line is not known."""
    trace = None if node.metadata is None else node.metadata.trace
    return "it ran outside anomaly mode, so its line is not known" if trace is None else f"it ran at {trace}"
