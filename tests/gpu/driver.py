"""Devices, streams, events and the runtime's functions, on the queues of a `Machine`."""

from __future__ import annotations

import ctypes
import time
import weakref
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.collectives.backends.device.machine import Mark
from tests.gpu.memory import CUDARuntimeError, blocks_of

if TYPE_CHECKING:
    from tests.gpu.standin import Cupy

WAITS = "host waits"  # in the machine's log
_TICK = 1e-5  # s that one piece of simulated work takes, whichever stream it is on
_SUCCESS, _NOT_READY = 0, 600


def driver(cupy: Cupy) -> dict[str, Any]:
    """`Device`, `Stream`, `Event`, … of `cupy.cuda`."""
    machine = cupy.machine
    record = cupy.record

    class Device:
        def __init__(self, device: Any = None) -> None:
            self.id = cupy.local.device if device is None else int(device)

        def use(self) -> None:
            if self.id >= cupy.devices:
                raise CUDARuntimeError(101, "cudaErrorInvalidDevice")
            cupy.local.device = self.id
            cupy.enter_context()

        def __enter__(self) -> Device:
            cupy.local.left.append(cupy.local.device)
            self.use()
            return self

        def __exit__(self, *_: object) -> None:
            cupy.local.device = cupy.local.left.pop()
            cupy.enter_context()

        compute_capability = "90"

        def synchronize(self) -> None:
            cupy.refuse_capture("cudaDeviceSynchronize")
            record.wait("Device.synchronize")
            for handle in cupy.streams_of(self.id):
                cupy.finish(handle)

    class Event:
        def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
            self.timed = not disable_timing
            self.at = 0.0  # s
            self.stream = ""
            self.mark: Mark | None = None
            self.ptr = id(self)
            events[self.ptr] = self

        def record(self, stream: Any = None) -> None:
            stream = cupy.current() if stream is None else stream
            mark = self.mark = Mark()
            self.stream = machine.queues[cupy.handle(stream.ptr)].name
            if cupy.captures.record(cupy.handle(stream.ptr), mark):
                return

            def passed() -> None:
                self.at = (
                    time.perf_counter() if machine.eager else _TICK * sum(q.finished for q in machine.queues.values())
                )
                mark.done = True

            cupy.put(stream.ptr, "record", passed if self.timed else (lambda: setattr(mark, "done", True)))

        @property
        def done(self) -> bool:
            cupy.captures.ask(self.mark)
            cupy.refuse_capture("cudaEventQuery")
            return self.mark is None or machine.glance(self.mark)

        def synchronize(self) -> None:
            cupy.captures.ask(self.mark)
            cupy.refuse_capture("cudaEventSynchronize")
            record.wait("Event.synchronize")
            machine.log.append((self.stream, f"{WAITS} for an event"))
            wait_for(self)

    def wait_for(event: Event) -> None:
        deadline = time.monotonic() + 20
        while event.mark is not None and not machine.glance(event.mark):
            assert time.monotonic() < deadline, "an event that never comes"

    class Stream:
        null: Any
        ptds: Any

        def __init__(
            self,
            null: bool = False,
            non_blocking: bool = False,
            ptds: bool = False,
            priority: Any = None,
            *,
            name: str = "",
        ) -> None:
            assert machine.eager or non_blocking, "a blocking stream waits for the default stream behind our back"
            self.device = self.device_id = cupy.local.device
            self.is_non_blocking = non_blocking
            self.priority = priority or 0
            self.ptr = machine.queue(name or cupy.naming(self.device))
            cupy.owners[self.ptr] = self.device

        def wait_event(self, event: Any) -> None:
            if event.mark is not None and not cupy.captures.wait(cupy.handle(self.ptr), event.mark):
                cupy.put(self.ptr, "wait", waits=event.mark)

        def synchronize(self) -> None:
            cupy.refuse_capture("cudaStreamSynchronize")
            record.wait("Stream.synchronize")
            cupy.finish(self.ptr)

        def __enter__(self) -> Stream:
            self._check()
            here = cupy.local.device
            cupy.local.entered.append(here)
            cupy.local.stacks.setdefault(here, []).append(self)
            cupy.local.streams[here] = self
            return self

        def __exit__(self, *_: object) -> None:
            # What is on the stack below is current now, and not what was current before, which `use` may have set.
            stack = cupy.local.stacks[cupy.local.entered.pop()]
            stack.pop()
            below = stack[-1] if stack else cupy.null
            cupy.local.streams[cupy.local.device if below.device < 0 else below.device] = below

        def use(self) -> Stream:
            self._check()
            cupy.local.streams[cupy.local.device] = self
            return self

        def _check(self) -> None:
            if self.device not in (-1, cupy.local.device):
                raise RuntimeError(
                    f"The device that the stream is created on ({self.device}) does not match with the current device "
                    f"({cupy.local.device})"
                )

        def is_capturing(self) -> bool:
            return self.ptr in cupy.capturing

        def begin_capture(self, mode: int | None = None) -> None:
            cupy.captures.begin(self.ptr, mode)

        def end_capture(self) -> Any:
            return cupy.captures.end(self.ptr)

    class ExternalStream(Stream):
        def __init__(self, ptr: int, device_id: int = -1) -> None:
            self.ptr = ptr
            self.device = self.device_id = cupy.owners[cupy.handle(ptr)] if device_id < 0 else device_id
            self.is_non_blocking = True
            self.priority = 0

    events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
    cupy.events = events
    for each in range(cupy.devices):
        cupy.defaults[each] = machine.queue(f"default {each}.")
        cupy.owners[cupy.defaults[each]] = each
    # One object for the default streams of all devices: it is that of the device that is current.
    null = object.__new__(Stream)
    null.ptr = 0
    null.device = -1
    null.device_id = -1
    null.is_non_blocking = False
    null.priority = 0
    Stream.null = Stream.ptds = cupy.null = null

    def elapsed(start: Event, end: Event) -> float:
        for each in (start, end):
            assert each.timed, "an event that keeps no time"
            assert each.mark is not None, "not recorded"
            assert each.mark.done, "not passed yet"
        return 1e3 * max(end.at - start.at, 0.0)

    return {
        "Device": Device,
        "Event": Event,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "get_current_stream": cupy.current,
        "get_elapsed_time": elapsed,
        "is_available": lambda: True,
    }


def runtime(cupy: Cupy) -> ModuleType:
    """`cupy.cuda.runtime`."""
    machine = cupy.machine
    module = ModuleType("cupy.cuda.runtime")
    malloc, free = blocks_of(cupy)
    to_device, to_host, within = 1, 2, 3

    def copy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        cupy.enter_context()
        way = {to_host: "copy down", to_device: "copy up", within: "copy"}[kind]
        host = target if kind == to_host else source
        assert kind == within or host in cupy.pinned, "a copy of pageable memory would wait"
        cupy.record.launches[way] += 1
        cupy.put(stream, way, lambda: ctypes.memmove(target, source, nbytes) and None)

    def register(address: int, nbytes: int, flags: int = 0) -> None:
        cupy.pinned.add(address, nbytes)

    def properties(device: int) -> dict[str, Any]:
        return {
            "name": b"Stand-in GPU",
            "uuid": bytes([device + 1] * 16),
            "totalGlobalMem": cupy.capacity,
            "major": 9,
            "minor": 0,
        }

    def event_query(pointer: int) -> int:
        cupy.enter_context()
        return _SUCCESS if cupy.events[pointer].done else _NOT_READY

    def stream_query(stream: int) -> int:
        return _NOT_READY if machine.queues[cupy.handle(stream)].pieces else _SUCCESS

    def pointer_attributes(address: int) -> Any:
        kind = 1 if address in cupy.pinned else 2 if cupy.device_at(address) >= 0 else 0
        return SimpleNamespace(device=max(cupy.device_at(address), 0), devicePointer=address, hostPointer=0, type=kind)

    members: dict[str, Any] = {
        "CUDARuntimeError": CUDARuntimeError,
        "malloc": malloc,
        "free": free,
        "memcpyHostToDevice": to_device,
        "memcpyDeviceToHost": to_host,
        "memcpyAsync": copy,
        "memoryTypeHost": 1,
        "memGetInfo": lambda: (cupy.capacity - cupy.held[cupy.local.device], cupy.capacity),
        "eventQuery": event_query,
        "eventRecord": lambda event, stream: cupy.events[event].record(SimpleNamespace(ptr=stream)),
        "streamWaitEvent": lambda stream, event: cupy.cuda.ExternalStream(stream).wait_event(cupy.events[event]),
        "streamQuery": stream_query,
        "streamIsCapturing": lambda pointer: pointer in cupy.capturing,
        "getDevice": lambda: cupy.local.device,
        "setDevice": lambda device: cupy.cuda.Device(device).use(),
        "getDeviceCount": lambda: cupy.devices,
        "getDeviceProperties": properties,
        "deviceGetPCIBusId": lambda device: f"0000:{device:02x}:00.0",
        "deviceCanAccessPeer": lambda device, peer: 1,
        "runtimeGetVersion": lambda: 12090,
        "hostRegister": register,
        "pointerGetAttributes": pointer_attributes,
    }
    vars(module).update(members)
    return module
