"""Garbage collections, in which other threads and finalizers may run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def called_at_collections(function: Callable[[], object]) -> Iterator[None]:
    """Calls `function` at every garbage collection, of which there is one for every second container that is made."""

    def call(phase: str, info: dict[str, Any]) -> None:
        function()

    thresholds = gc.get_threshold()
    gc.callbacks.append(call)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(call)
