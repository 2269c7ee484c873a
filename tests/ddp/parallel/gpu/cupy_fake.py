"""CuPy as a whole model needs it, on the streams of a `Machine`: what NumPy computes, when the machine gets to it.

A function's result is allocated when it is called, in the current stream's order, and filled by a piece of work on that
stream. Its shape and dtype are found by calling the function on arrays of ones. What CuPy refuses is refused, and
whatever makes the host wait for the device leaves a line in the machine's log.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.collectives.gpu import cupy_fake
from tests.collectives.gpu.machine import Machine, Mark
from tests.ddp.cuda import emulation

WAITS = "host waits"  # in the machine's log
_PATIENCE = 20.0  # s; how long an event waits for other ranks' threads
_TICK = 0.01  # ms that one piece of work takes, whichever stream it is on
_VIEWS = {"broadcast_to", "expand_dims", "moveaxis", "squeeze", "swapaxes", "transpose"}
_METADATA = {"can_cast", "dtype", "finfo", "iinfo", "may_share_memory", "promote_types", "result_type", "shares_memory"}


class ndarray(cupy_fake.ndarray):
    """`cupy.ndarray`."""

    base: Any = None  # whose memory this views
    __hash__ = None  # type: ignore[assignment]

    def _view(self, host: Any) -> Any:
        view = type(self)(self._cupy, host, self._memory, self.device.id)
        view.base = self if self.base is None else self.base
        return view

    def __getitem__(self, index: Any) -> Any:
        if not _indexes_by_array(index):
            part = self._host[index]
            if not isinstance(part, np.ndarray):  # 0-d, where NumPy has a number
                at = (*_tupled(index), ...)
                part = self._host[at]
            return self._view(part)
        return self._cupy.compute("getitem", lambda x, at: x[at], self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        assert not isinstance(value, np.ndarray) or value.ndim == 0, "an array of the host in one of the device"
        self._cupy.into("setitem", lambda x, at, new: x.__setitem__(at, new), self, index, value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        call = getattr(ufunc, method)
        if out is None:
            return self._cupy.compute(ufunc.__name__, call, *inputs, **kwargs)
        (target,) = out
        assert isinstance(target, ndarray), "out is an array of the host"
        self._cupy.into(ufunc.__name__, lambda t, *xs: call(*xs, out=t, **kwargs), target, *inputs)
        return target

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        reshaped = self._host.reshape(*shape)
        if reshaped.size == 0 or np.may_share_memory(reshaped, self._host):
            return self._view(reshaped)
        return self._cupy.compute("reshape", lambda x: x.reshape(*shape), self)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> Any:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return self._cupy.compute("astype", lambda x: x.astype(dtype), self)

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        stream = self._cupy.cuda.get_current_stream() if stream is None else stream
        target = np.full(self.shape, 77, self.dtype) if out is None else out
        assert target.shape == self.shape
        assert target.dtype == self.dtype
        source = self._host
        self._cupy.machine.put(stream.ptr, "copy down", lambda: np.copyto(target, source))
        if blocking:
            self._cupy.machine.synchronize(stream.ptr, WAITS)
        return target

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def fill(self, value: Any) -> None:
        self[...] = value

    def ravel(self) -> Any:
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> Any:
        return self._view(self._host.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> Any:
        return self._view(self._host.swapaxes(a, b))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in ("all", "any", "argmax", "max", "mean", "min", "prod", "sum", "var"):
            raise AttributeError(f"the fake CuPy's arrays have no {name}")
        return functools.partial(self._cupy.compute, name, lambda x, *more, **kw: getattr(x, name)(*more, **kw), self)


class Cupy(cupy_fake.FakeCupy):
    """The module `cupy`."""

    __name__ = "cupy"  # by which ops choose what they launch

    def __init__(self, machine: Machine, devices: int) -> None:
        super().__init__(machine, devices)
        self.ndarray = ndarray
        self.linalg = SimpleNamespace(qr=functools.partial(self.compute, "qr", lambda x: tuple(np.linalg.qr(x))))
        cupy, plain = self, self.cuda.Event

        class Event(plain):  # type: ignore[misc, valid-type]
            """One that may keep the time, as CuPy's does unless told not to."""

            def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
                super().__init__(block, disable_timing=True)
                self.timed = not disable_timing
                self.when: float | None = None
                self.stream = ""

            def record(self, stream: Any = None) -> None:
                stream = cupy.cuda.get_current_stream() if stream is None else stream
                mark = self.mark = Mark()
                self.stream = machine.queues[stream.ptr].name

                def run() -> None:
                    mark.done = True
                    self.when = _TICK * sum(each.finished for each in machine.queues.values())

                machine.put(stream.ptr, "record", run)

            def synchronize(self) -> None:
                with machine.lock:
                    machine.log.append((self.stream, f"{WAITS} for an event"))
                deadline = time.monotonic() + _PATIENCE
                while self.mark is not None and not machine.glance(self.mark):
                    assert time.monotonic() < deadline, "an event that never passes"
                    time.sleep(1e-5)

        def elapsed(start: Event, end: Event) -> float:
            assert start.timed
            assert end.timed
            assert start.when is not None, "not recorded, or not passed yet"
            assert end.when is not None, "not recorded, or not passed yet"
            return end.when - start.when

        self.cuda.Event = Event
        self.cuda.get_elapsed_time = elapsed

    # What runs on the device ------------------------------------------------------------------------------------------

    def compute(self, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What NumPy's `fn` returns for these, in new arrays."""
        with np.errstate(all="ignore"):
            shaped = fn(*_mapped(args, _ones), **_mapped(kwargs, _ones))
        several = isinstance(shaped, tuple)
        shapes = [np.asarray(each) for each in (shaped if several else (shaped,))]
        made = [self.empty(each.shape, each.dtype) for each in shapes]
        targets = [each._host for each in made]
        inside, named = _mapped(args, _host), _mapped(kwargs, _host)

        def run() -> None:
            with np.errstate(all="ignore"):
                found = fn(*inside, **named)
            for target, each in zip(targets, found if several else (found,), strict=True):
                target[...] = each

        self.launch(name, run)
        return tuple(made) if several else made[0]

    def into(self, name: str, fn: Callable[..., Any], target: Any, *args: Any) -> None:
        """Has `fn` write into an array of the device. Raises: what it raises for such arrays."""
        with np.errstate(all="ignore"):
            fn(*_mapped((target, *args), _ones))
        host, inside = target._host, _mapped(args, _host)

        def run() -> None:
            with np.errstate(all="ignore"):
                fn(host, *inside)

        self.launch(name, run)

    def RawKernel(self, code: str, name: str, options: tuple[str, ...] = ()) -> Callable[..., None]:
        kernel = emulation.RawKernel(code, name, options)

        def launch(grid: Any, block: Any, args: Any) -> None:
            inside = _mapped(tuple(args), _host)
            self.launch(name, lambda: kernel(grid, block, inside))

        return launch

    # What has a result in memory --------------------------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = np.float64) -> Any:
        plain = super().empty(shape, dtype)
        return ndarray(self, plain._host, plain._memory, plain.device.id)

    def empty_like(self, x: Any, dtype: Any = None) -> Any:
        return self.empty(x.shape, x.dtype if dtype is None else dtype)

    def asarray(self, x: Any, dtype: Any = None) -> Any:
        if not isinstance(x, ndarray):
            host = np.array(x, dtype)  # CuPy takes a copy of it, too, before it returns
            made = self.empty(host.shape, host.dtype)
            target = made._host
            self.launch("copy up", lambda: np.copyto(target, host))
            return made
        return x if dtype is None else x.astype(dtype, copy=False)

    def array(self, x: Any, dtype: Any = None) -> Any:
        return self.asarray(x, dtype).copy()

    def ascontiguousarray(self, x: Any, dtype: Any = None) -> Any:
        x = self.asarray(x, dtype)
        return x if x.flags.c_contiguous else x.copy()

    def copyto(self, target: Any, source: Any, casting: Any = "same_kind", where: Any = True) -> None:
        self.into("copyto", lambda t, s, w: np.copyto(t, s, casting=casting, where=w), target, source, where)

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, np.ufunc) or not callable(found) or isinstance(found, type):
            return found
        if name in _METADATA:
            return lambda *args: found(*_mapped(args, _host))
        if name in _VIEWS:
            return lambda x, *args, **kwargs: x._view(found(x._host, *args, **kwargs))
        return functools.partial(self.compute, name, found)


def _mapped(value: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(value, ndarray):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(each, fn) for each in value])
    if isinstance(value, dict):
        return {key: _mapped(each, fn) for key, each in value.items()}
    assert not isinstance(value, np.ndarray), "CuPy takes no array of the host"
    return value


def _ones(x: ndarray) -> Any:
    return np.ones(x.shape, x.dtype)


def _host(x: ndarray) -> Any:
    return x._host


def _tupled(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _indexes_by_array(index: Any) -> bool:
    return any(isinstance(each, (ndarray, list, np.ndarray)) for each in _tupled(index))
