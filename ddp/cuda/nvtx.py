"""Ranges and marks that NVIDIA's profilers show on their time line; nothing without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ddp._device import found_cupy

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]

_depth = [0]


def _nvtx() -> Any:
    xp = found_cupy()
    return None if xp is None or not getattr(xp.cuda.nvtx, "available", True) else xp.cuda.nvtx


def mark(msg: str) -> None:
    """A point in time."""
    if (nvtx := _nvtx()) is not None:
        nvtx.Mark(msg)


def range_push(msg: str) -> int:
    """Begins a range inside those of this thread; returns how many it is inside."""
    if (nvtx := _nvtx()) is not None:
        nvtx.RangePush(msg)
    _depth[0] += 1
    return _depth[0] - 1


def range_pop() -> int:
    """Ends the innermost range; returns how many it was inside."""
    if (nvtx := _nvtx()) is not None:
        nvtx.RangePop()
    _depth[0] = max(0, _depth[0] - 1)
    return _depth[0]


def range_start(msg: str) -> int:
    """Begins a range that may end in another thread; returns its number, for `range_end`."""
    return 0 if (nvtx := _nvtx()) is None else int(nvtx.RangeStart(msg, None))


def range_end(range_id: int) -> None:
    """Ends the range of this number."""
    if (nvtx := _nvtx()) is not None:
        nvtx.RangeEnd(range_id)


@contextlib.contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """A range around a `with` block or a decorated function; the arguments go into the text, by str.format."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()
