"""The module `cupy`: NumPy's functions on memory of a device, as work of the current stream."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from tests.collectives.backends.device.machine import Machine
from tests.gpu import capturing, driver, kernels, memory, randoms
from tests.gpu.arrays import Array
from tests.gpu.indexing import Indexing
from tests.gpu.kinds import names
from tests.gpu.making import Making
from tests.gpu.record import Record
from tests.gpu.ufuncs import Numpys, function
from tests.gpu.working import quietly

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Local(threading.local):
    """What is current in a thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Any] = {}
        self.stacks: dict[int, list[Any]] = {}  # by device, the streams whose contexts this thread is in
        self.entered: list[int] = []  # the devices of these, in the order of the contexts
        self.left: list[int] = []  # devices that will be current again
        self.allocator: Any = None


class Cupy(ModuleType, Indexing, Making):
    """A stand-in with devices of its own. capacity: bytes of each device"""

    def __init__(self, machine: Machine, devices: int = 2, capacity: int = 8 << 30) -> None:
        super().__init__("cupy")
        self.__path__: list[str] = []
        self.machine = machine
        self.devices = devices
        self.capacity = capacity
        self.local = Local()
        self.record = Record()
        self.pinned = memory.Pinned()
        self.held = dict.fromkeys(range(devices), 0)
        self.contexts: dict[threading.Thread, set[int]] = {}  # the devices of which each thread made one, or used it
        self.capturing: set[int] = set()
        self.loaded: set[str] = set()  # kernels: each is loaded when it is first launched
        self.captures = capturing.Captures(self, memory.CUDARuntimeError)
        self.owners: dict[int, int] = {}  # the device of each stream
        self.defaults: dict[int, int] = {}  # the machine's handle of each device's default stream
        self.null: Any = None
        self.blocks: dict[int, Any] = {}  # what cudaMalloc gave, by address
        self.places: dict[int, int] = {}
        self.naming: Callable[[int], str] = lambda device: f"stream {device}."
        self.fault: Exception | None = None  # what the next call that waits raises
        self.__version__ = "14.2.0"
        self.ndarray = type("ndarray", (Array,), {"_cupy": self, "__module__": "cupy"})
        self.ndarray.__doc__ = "Of the stand-in."

        self.cuda = cuda = ModuleType("cupy.cuda")
        cuda.__path__ = []  # type: ignore[attr-defined]
        vars(cuda).update(memory.pool_classes(self) | driver.driver(self))
        self.pool = cuda.MemoryPool()
        self._allocator = self.pool.malloc
        cuda.runtime = driver.runtime(self)
        cuda.memory = types.ModuleType("cupy.cuda.memory")
        cuda.memory.OutOfMemoryError = memory.OutOfMemoryError  # type: ignore[attr-defined]
        cuda.set_allocator = self._set_allocator
        cuda.get_allocator = lambda: self.allocator
        cuda.using_allocator = self._using_allocator
        self.fft = Numpys(self, "fft", np.fft)
        self.linalg = Numpys(self, "linalg", np.linalg)
        self.lib = ModuleType("cupy.lib")
        self.lib.stride_tricks = Numpys(self, "lib.stride_tricks", np.lib.stride_tricks)  # type: ignore[attr-defined]
        self.random = randoms.module(self)
        self.RawKernel = kernels.raw(self)

    def enter_context(self) -> None:
        """What CUDA does in most calls, and in setDevice: the context of this thread's current device is there now."""
        self.contexts.setdefault(threading.current_thread(), set()).add(self.local.device)

    # Streams --------------------------------------------------------------------------------------------------------

    def current(self, device: int = -1) -> Any:
        """The stream that is current on a device in this thread."""
        device = self.local.device if device is None or device < 0 else device
        return self.local.streams.get(device) or self.null

    def handle(self, stream: int) -> int:
        """The machine's handle of a stream: the default one is that of the current device."""
        return stream if stream > 2 else self.defaults[self.local.device]  # 1, 2: CUDA's handles of default streams

    def finish(self, stream: int) -> None:
        """Goes on when the stream has done all that it has now. Raises: what a kernel met."""
        self.machine.synchronize(self.handle(stream), "host waits")
        if self.fault is not None:
            raise self.fault

    def device_at(self, address: int) -> int:
        """The device whose memory an address is in; -1 if it is the host's."""
        for start, raw in list(self.blocks.items()):
            if start <= address < start + raw.size:
                return self.places[start]
        return -1

    def streams_of(self, device: int) -> list[int]:
        """The handles of all streams of a device."""
        return [handle for handle, owner in self.owners.items() if owner == device]

    @property
    def deferred(self) -> bool:
        """Whether what is put on the current stream is done later."""
        machine = self.machine
        stream = self.handle(self.current().ptr)
        at_once = machine.eager and machine.before is None and not machine.queues[stream].pieces
        return not at_once or stream in self.capturing

    def put(self, stream: int, kind: str, run: Any = None, waits: Any = None, meeting: Any = None) -> None:
        """Adds work to a stream."""
        stream = self.handle(stream)
        machine = self.machine
        quiet = run if run is None or kind == "free" else lambda: quietly(run)
        if self.capturing and stream in self.capturing and kind != "free":
            assert waits is None
            assert meeting is None
            self.captures.add(stream, kind, quiet)
            return
        if machine.eager and machine.before is None and waits is None and meeting is None:
            with machine.lock:
                queue = machine.queues[stream]
                if not queue.pieces:
                    if kind != "free":
                        machine.log.append((queue.name, kind))
                    queue.added += 1
                    queue.finished += 1
                    if quiet is not None:
                        quiet()
                    return
        machine.put(stream, kind, quiet, waits, meeting)

    def wait(self, kind: str) -> None:
        """The host waits until the current stream is done."""
        self.refuse_capture(kind)
        self.record.wait(kind)
        self.finish(self.current().ptr)

    def refuse_capture(self, what: str) -> None:
        """Raises if this thread's current stream is being captured."""
        if self.capturing and self.handle(self.current().ptr) in self.capturing:
            if what == "cuBLAS":
                raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
            raise memory.CUDARuntimeError(900, f"cudaErrorStreamCaptureUnsupported: {what}")

    # Allocators -----------------------------------------------------------------------------------------------------

    @property
    def allocator(self) -> Callable[[int], Any]:
        """What gives memory for arrays."""
        return self.local.allocator or self._allocator

    def _set_allocator(self, allocator: Any = None) -> None:
        if self.local.allocator is not None:
            raise ValueError("Can't change the global allocator inside `using_allocator` context manager")
        self._allocator = allocator or (lambda size: memory.MemoryPointer(self.cuda.Memory(size), 0))

    @contextmanager
    def _using_allocator(self, allocator: Any = None) -> Iterator[None]:
        before = self.local.allocator
        self.local.allocator = allocator or (lambda size: memory.MemoryPointer(self.cuda.Memory(size), 0))
        try:
            yield
        finally:
            self.local.allocator = before

    # All other names ------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in names()["cupy"] or not hasattr(np, name):
            raise AttributeError(f"module 'cupy' has no attribute {name!r}, as the stand-in knows it")
        ufunc = function(self, name, getattr(np, name))
        setattr(self, name, ufunc)
        return ufunc
