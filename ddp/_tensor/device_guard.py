"""The device guard: an op where there are several GPUs, or where every op waits for its work.

An op launches on the GPU of its tensors, whichever one is current; with CUDA_LAUNCH_BLOCKING=1 an error names its op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ddp._device import CPU, device, on
from ddp._engine import stream_sync
from ddp._engine.anomaly import user_line
from ddp._engine.modes import state

F = TypeVar("F", bound=Callable[..., Any])


def needs_guard(where: device) -> bool:
    """Whether an op on a device that is watched has to be guarded, and is not yet."""
    if state.guarded:
        return False
    if where.watched == 2:
        return True
    stream_sync.switch.several_gpus = True
    return bool(where.xp.cuda.runtime.getDevice() != where.index)


def guarded_function(function: F) -> F:
    """A function that launches without `apply`, under the device of its first tensor, wherever among the arguments."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        operands = (*args, *kwargs.values())
        where = next((x._device for x in operands if hasattr(x, "_device")), CPU)
        if where.watched and needs_guard(where):
            arrays = [x.array for x in operands if hasattr(x, "_device")]
            return guarded_run(function.__name__, where, arrays, functools.partial(function, *args, **kwargs))
        return function(*args, **kwargs)

    cast(Any, inner).guarded = True
    return cast(F, inner)


def guard_methods(kind: type, names: str) -> None:
    """Puts methods that launch without `apply` under the device of their tensor; called once CUDA is used."""
    for name in names.split():
        owner = next(each for each in kind.__mro__ if name in vars(each))
        method = vars(owner)[name]
        if not hasattr(method, "guarded"):
            setattr(owner, name, guarded_function(method))


def guarded_run(name: str, where: device, arrays: Sequence[Any], run: Callable[[], Any]) -> Any:
    """What `run` returns, which launches op `name` on `arrays`. Raises: CudaError, where every op waits."""
    from ddp._cuda import cuda_errors, device_checks, stream_order

    blocking = cuda_errors.blocking()
    stream_sync.enable(blocking)
    before, state.guarded = state.guarded, True
    try:
        with on(where):
            result = run()
            lane = stream_order.current(where.xp)
            if blocking and not lane.capturing:
                lane.stream.synchronize()
                device_checks.raise_pending()
            return result
    except Exception as error:
        if blocking:
            inputs = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in arrays if hasattr(x, "shape"))
            named = cuda_errors.attribute_to_op(error, name, inputs or "numbers", f"it ran at {user_line()}")
            if named is not error:
                raise named from error
        raise
    finally:
        state.guarded = before
