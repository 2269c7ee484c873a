"""The long way of an op on a GPU: where there are several, or where every op waits for its work.

An op launches on the GPU of its tensors, whichever one is current; and CUDA_LAUNCH_BLOCKING=1 names the op that failed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ddp._device import CPU, device, on
from ddp._engine import lanes
from ddp._engine.anomaly import user_line
from ddp._engine.modes import state

Method = TypeVar("Method", bound=Callable[..., Any])


def away(where: device) -> bool:
    """Of a device that is watched: whether an op there has to take the long way, and is not on it already."""
    if state.guarded:
        return False
    if where.watched == 2:
        return True
    lanes.switch.crowded = True
    return bool(where.xp.cuda.runtime.getDevice() != where.index)


def placed(method: Method) -> Method:
    """A method that launches on its own, not through `apply`: on the GPU of its tensor, too."""

    @functools.wraps(method)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        where = self._device
        if where.watched and away(where):
            return watched(method.__name__, where, (self.array,), functools.partial(method, self, *args, **kwargs))
        return method(self, *args, **kwargs)

    return cast(Method, inner)


def placed_by_any(function: Method) -> Method:
    """As `placed`, for functions whose first tensor may stand anywhere among the arguments."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        for x in args:
            where = getattr(x, "_device", None)
            if where is not None:
                break
        else:
            where = next((x._device for x in kwargs.values() if hasattr(x, "_device")), CPU)
        if where.watched and away(where):
            arrays = [x.array for x in (*args, *kwargs.values()) if hasattr(x, "_device")]
            return watched(function.__name__, where, arrays, functools.partial(function, *args, **kwargs))
        return function(*args, **kwargs)

    return cast(Method, inner)


def watched(name: str, where: device, arrays: Sequence[Any], run: Callable[[], Any]) -> Any:
    """What `run` returns, which launches op `name` on `arrays`. Raises: CudaError, where every op waits."""
    from ddp._gpu import alarms, faults, streams

    blocking = faults.blocking()
    lanes.begin(blocking)
    before, state.guarded = state.guarded, True
    try:
        with on(where):
            result = run()
            lane = streams.current(where.xp)
            if blocking and not lane.capturing:
                lane.stream.synchronize()
                alarms.listen()
            return result
    except Exception as error:
        if blocking:
            inputs = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in arrays if hasattr(x, "shape"))
            named = faults.pinned_down(error, name, inputs or "numbers", f"it ran at {user_line()}")
            if named is not error:
                raise named from error
        raise
    finally:
        state.guarded = before
