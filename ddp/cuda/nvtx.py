"""Ranges and marks for the time line of NVIDIA's profilers. Does nothing without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ddp._device import found_cupy

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]

# The number of ranges in this process that `range_push` has begun and `range_pop` has not ended.
_depth = [0]


def _nvtx() -> Any:
    xp = found_cupy()
    return None if xp is None or not getattr(xp.cuda.nvtx, "available", True) else xp.cuda.nvtx


def mark(msg: str) -> None:
    """Marks a point in time."""
    if (nvtx := _nvtx()) is not None:
        nvtx.Mark(msg)


def range_push(msg: str) -> int:
    """Begins a range inside the open ones. Returns: the number of ranges around it."""
    if (nvtx := _nvtx()) is not None:
        nvtx.RangePush(msg)
    _depth[0] += 1
    return _depth[0] - 1


def range_pop() -> int:
    """Ends the innermost range. Returns: the number of ranges around it."""
    if (nvtx := _nvtx()) is not None:
        nvtx.RangePop()
    _depth[0] = max(0, _depth[0] - 1)
    return _depth[0]


def range_start(msg: str) -> int:
    """Begins a range that may end in another thread. Returns: its number, for `range_end`."""
    return 0 if (nvtx := _nvtx()) is None else int(nvtx.RangeStart(msg, None))


def range_end(range_id: int) -> None:
    """Ends the range with this number."""
    if (nvtx := _nvtx()) is not None:
        nvtx.RangeEnd(range_id)


@contextlib.contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """A range around a `with` block or a decorated function. Its text is msg.format(*args, **kwargs)."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()
