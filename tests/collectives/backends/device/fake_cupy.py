"""As much of CuPy as `collectives.backends.device` uses: arrays whose kernels run when the `Machine` gets to them."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.collectives.backends.device.machine import GARBAGE, Machine, Mark

_TO_HOST, _TO_DEVICE = 2, 1


class Local(threading.local):
    """What is current in a thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Any] = {}
        self.stack: list[Any] = []  # the streams whose contexts this thread is in


class Memory:
    """A piece of a stream's arena, given back when nobody holds it any more."""

    def __init__(self, machine: Machine, handle: int, nbytes: int) -> None:
        self.raw = machine.allocate(handle, nbytes)
        weakref.finalize(self, machine.free, handle, self.raw).atexit = False


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """`cupy.ndarray`. Its numbers are in `_host`, which only the machine may look at."""

    def __init__(self, cupy: Any, host: Any, memory: Any, device: int = -1) -> None:
        if not isinstance(cupy, FakeCupy):  # (shape, dtype, where): in memory that is not CuPy's
            shape, dtype, where = cupy, np.dtype(host), memory
            memory, cupy, device = where.outside, where.cupy, where.outside.device
            nbytes = int(np.prod(shape)) * dtype.itemsize
            host = np.frombuffer((ctypes.c_char * nbytes).from_address(memory.pointer), dtype).reshape(shape)
        self._cupy = cupy
        self._host = host
        self._memory = memory
        self.device = SimpleNamespace(id=device)
        self.shape, self.dtype, self.strides = host.shape, host.dtype, host.strides
        self.ndim, self.size, self.itemsize, self.nbytes = host.ndim, host.size, host.itemsize, host.nbytes
        self.flags = SimpleNamespace(c_contiguous=host.flags.c_contiguous, f_contiguous=host.flags.f_contiguous)
        self.data = SimpleNamespace(ptr=host.__array_interface__["data"][0])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": self.strides,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.id

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, index: Any) -> Any:
        part = self._host[index]
        assert isinstance(part, np.ndarray), "a fake array is cut by slices only"
        assert part.size == 0 or np.shares_memory(part, self._host), "a fake array is cut by slices only"
        return self._view(part)

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self._host[index]
        value = value._host if isinstance(value, ndarray) else value
        self._cupy.launch("setitem", lambda: target.__setitem__(..., value))

    @property
    def T(self) -> Any:
        return self._view(self._host.T)

    def _view(self, host: Any) -> Any:
        return ndarray(self._cupy, host, self._memory, self.device.id)

    def view(self, dtype: Any) -> Any:
        return self._view(self._host.view(dtype))

    def reshape(self, *shape: Any) -> Any:
        reshaped = self._host.reshape(*shape)
        assert reshaped.size == 0 or np.may_share_memory(reshaped, self._host), "a reshape that copies"
        return self._view(reshaped)

    def copy(self, order: str = "C") -> Any:
        return self.astype(self.dtype, order)

    def astype(self, dtype: Any, order: str = "C") -> Any:
        made = self._cupy.empty(self.shape, dtype)
        source, target = self._host, made._host
        self._cupy.launch("astype", lambda: np.copyto(target, source, casting="unsafe"))
        return made

    def get(self) -> Any:
        stream = self._cupy.cuda.get_current_stream()
        came: list[Any] = []
        source = self._host
        self._cupy.launch("get", lambda: came.append(source.copy()))
        self._cupy.machine.synchronize(stream.ptr, "host waits")
        return came[0]

    def __float__(self) -> float:
        return float(self.get())

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        assert method == "__call__", method
        kinds = [np.empty((0,), each.dtype) if isinstance(each, ndarray) else each for each in inputs]
        dtype = ufunc(*kinds, **{key: value for key, value in kwargs.items() if key == "dtype"}).dtype
        shape = np.broadcast_shapes(*[each.shape if isinstance(each, ndarray) else np.shape(each) for each in inputs])
        made = self._cupy.empty(shape, dtype) if out is None else out[0]
        target = made._host
        sources = [each._host if isinstance(each, ndarray) else each for each in inputs]

        def run() -> None:
            with np.errstate(all="ignore"):
                ufunc(*sources, out=target, **kwargs)

        self._cupy.launch(ufunc.__name__, run)
        return made


class Outside:
    """`cupy.cuda.UnownedMemory`: holds its owner."""

    def __init__(self, pointer: int, nbytes: int, owner: Any, device: int) -> None:
        self.pointer, self.nbytes, self.owner, self.device = pointer, nbytes, owner, device


class FakeCupy:
    """The module `cupy`, with as many devices as asked for. streams: the names of new streams, by device"""

    def __init__(self, machine: Machine, devices: int) -> None:
        self.machine = machine
        self.local = Local()
        self.ndarray = ndarray
        self.naming: Callable[[int], str] = lambda device: f"stream {device}."
        self.capturing: set[int] = set()
        cupy = self

        class Device:
            def __init__(self, device: int | None = None) -> None:
                self.id = cupy.local.device if device is None else device

            def use(self) -> None:
                cupy.local.device = self.id

            def synchronize(self) -> None:
                machine.settle()

            def __enter__(self) -> Device:
                self._before = cupy.local.device
                cupy.local.device = self.id
                return self

            def __exit__(self, *_: object) -> None:
                cupy.local.device = self._before

        class Event:
            def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
                assert disable_timing
                self.mark: Mark | None = None
                self.ptr = id(self)
                events[self.ptr] = self

            def record(self, stream: Any) -> None:
                mark = self.mark = Mark()
                machine.put(stream.ptr, "record", lambda: setattr(mark, "done", True))

            @property
            def done(self) -> bool:
                return self.mark is None or machine.glance(self.mark)

        class Stream:
            def __init__(self, non_blocking: bool = False, name: str | None = None) -> None:
                assert non_blocking, "a blocking stream waits for the default stream behind our back"
                self.device = cupy.local.device
                self.ptr = machine.queue(name or cupy.naming(self.device))

            def wait_event(self, event: Event) -> None:
                if event.mark is not None:
                    machine.put(self.ptr, "wait", waits=event.mark)

            def synchronize(self) -> None:
                machine.synchronize(self.ptr, "host waits")

            def __enter__(self) -> Stream:
                self.use()
                cupy.local.stack.append(self)
                return self

            def __exit__(self, *_: object) -> None:
                # What is on the stack below is current now, and not what was current before, which `use` may have set.
                cupy.local.stack.pop()
                below = [each for each in cupy.local.stack if each.device == self.device]
                cupy.local.streams[self.device] = below[-1] if below else None

            def use(self) -> None:
                assert self.device == cupy.local.device, "a stream of another device"
                cupy.local.streams[self.device] = self

        events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
        defaults = {}
        for each in range(devices):
            self.local.device = each
            defaults[each] = Stream(non_blocking=True, name=f"default {each}.")
        self.local.device = 0

        def current(device: int = -1) -> Stream:
            device = cupy.local.device if device < 0 else device
            return cupy.local.streams.get(device) or defaults[device]

        def pinned(nbytes: int) -> Any:
            raw = np.full(nbytes, GARBAGE, np.uint8)
            machine.memory.append(raw)
            pointer = (ctypes.c_char * nbytes).from_buffer(raw)
            # Host memory has no stream's order: it is somebody else's at once.
            weakref.finalize(pointer, raw.fill, GARBAGE).atexit = False
            return pointer

        def copy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
            way = {_TO_HOST: "copy down", _TO_DEVICE: "copy up"}[kind]
            machine.put(stream, way, lambda: ctypes.memmove(target, source, nbytes) and None)

        self.cuda = SimpleNamespace(
            Device=Device,
            Event=Event,
            Stream=Stream,
            UnownedMemory=Outside,
            MemoryPointer=lambda outside, at: SimpleNamespace(outside=outside, cupy=cupy),
            get_current_stream=current,
            alloc_pinned_memory=pinned,
            runtime=SimpleNamespace(
                memcpyDeviceToHost=_TO_HOST,
                memcpyHostToDevice=_TO_DEVICE,
                memcpyAsync=copy,
                eventQuery=lambda pointer: 0 if events[pointer].done else 600,
                streamIsCapturing=lambda pointer: pointer in self.capturing,
                getDevice=lambda: cupy.local.device,
                getDeviceCount=lambda: devices,
                getDeviceProperties=lambda device: {"uuid": bytes([device + 1] * 16)},
                deviceGetPCIBusId=lambda device: f"0000:{device:02x}:00.0",
            ),
        )

    def launch(self, name: str, run: Callable[[], None]) -> None:
        """Puts a kernel on the current stream."""
        self.machine.put(self.cuda.get_current_stream().ptr, name, run)

    def empty(self, shape: Any, dtype: Any = np.float64) -> Any:
        stream = self.cuda.get_current_stream()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = Memory(self.machine, stream.ptr, nbytes)
        return ndarray(self, memory.raw[:nbytes].view(dtype).reshape(shape), memory, self.local.device)

    def asarray(self, x: Any) -> Any:
        if isinstance(x, ndarray):
            return x
        if hasattr(x, "__cuda_array_interface__"):
            return x.array  # the tests' own wrapper
        host = np.array(x)  # CuPy copies, too, before it returns
        made = self.empty(host.shape, host.dtype)
        target = made._host
        self.launch("asarray", lambda: np.copyto(target, host))
        return made

    def copyto(self, target: Any, source: Any, casting: str = "same_kind", where: Any = None) -> None:
        assert isinstance(target, ndarray)
        source = source._host if isinstance(source, ndarray) else source
        into, mask = target._host, True if where is None else where._host

        def run() -> None:
            with np.errstate(all="ignore"):
                np.copyto(into, source, casting=casting, where=mask)

        self.launch("copyto", run)

    def __getattr__(self, name: str) -> Any:
        ufunc = getattr(np, name)
        assert isinstance(ufunc, np.ufunc), f"the fake CuPy has no {name}"
        return ufunc  # which ndarray.__array_ufunc__ catches
