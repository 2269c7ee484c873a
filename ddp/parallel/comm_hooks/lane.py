r"""A stream beside the computation: what a communication hook does to a bucket must not stand in backward's own way.

On a GPU a hook's kernels, and its waits for what communication brings, are put on a stream of their own, between two
edges: behind the kernels that made the bucket, and before those that read it when backward has ended. The host waits
for neither. Host arrays are computed on when they are, and there is nothing to order.

    backward's stream   ── bucket made ── mark ── older layers ────────── join ── optimizer
                                              \                          /
    the lane            ────────────────── after ── hook ── hook ── hook
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np


class Lane(Protocol):
    """Where a hook computes. one_by_one: communicators share what is below them, and want one order of all calls"""

    one_by_one: bool

    def mark(self) -> Any:
        """What the calling thread's stream holds now."""

    def after(self, mark: Any) -> None:
        """What comes on the lane from now on comes behind that."""

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, this thread computes on the lane."""

    def join(self) -> None:
        """What comes on the calling thread's stream from now on comes behind all that is on the lane."""


class HostLane:
    """For host arrays."""

    one_by_one = False

    def mark(self) -> None:
        return None

    def after(self, mark: None) -> None:
        return

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def join(self) -> None:
        return


class DeviceLane:
    """For arrays of CuPy (`xp`), on its current device."""

    one_by_one = True

    def __init__(self, xp: Any) -> None:
        self._cuda = xp.cuda
        self._stream = xp.cuda.Stream(non_blocking=True)

    def mark(self) -> Any:
        return self._marked(self._cuda.get_current_stream())

    def after(self, mark: Any) -> None:
        self._stream.wait_event(mark)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        before = self._cuda.get_current_stream()
        try:
            with self._stream:
                yield
        finally:
            before.use()  # CuPy's context ends on the stream whose context is around it, and `before` may be another

    def join(self) -> None:
        self._cuda.get_current_stream().wait_event(self._marked(self._stream))

    def _marked(self, stream: Any) -> Any:
        event = self._cuda.Event(block=False, disable_timing=True)
        event.record(stream)
        return event


def lane_of(xp: Any) -> Lane:
    """The lane for arrays of that module."""
    return HostLane() if xp is np else DeviceLane(xp)
