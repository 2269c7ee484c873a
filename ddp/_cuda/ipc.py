"""Who looks at GPU memory that this process has sent: each has an end of a pipe, which the kernel always closes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import select
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from ddp._cuda import stream_order
from ddp._device import device, on
from ddp.errors import SharingError

Array = Any  # cupy.ndarray


class IpcReference:
    """The receiver's end of the pipe that keeps the sender's array alive.

    token: names the array; pid: of the process whose it is
    """

    __slots__ = ("__weakref__", "_fd", "pid", "token")

    def __init__(self, fd: int, token: str, pid: int) -> None:
        self._fd, self.token, self.pid = fd, token, pid

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


class _Exported:
    """What this process has sent and others may still look at, by token: the array, our end of its pipe, its event."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[Array, int, Any]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._arrays)

    def hold(self, array: Array, event: Any = None) -> IpcReference:
        """Keeps `array` and the event of its writes until the claim and all its copies are closed."""
        ours, theirs = os.pipe()
        claim = IpcReference(theirs, os.urandom(8).hex(), os.getpid())
        with self._lock:
            self._arrays[claim.token] = (array, ours, event)
        return claim

    def sweep(self) -> int:
        """Lets go of what nobody claims any more; how many arrays are left."""
        with self._lock:
            poll = select.poll()
            for _, fd, _ in self._arrays.values():
                poll.register(fd, 0)  # that the other end is closed is always told
            closed = {fd for fd, _ in poll.poll(0)}
            for token, (_, fd, _) in list(self._arrays.items()):
                if fd in closed:
                    del self._arrays[token]
                    os.close(fd)
            return len(self._arrays)

    def find(self, token: str) -> tuple[Array, Any]:
        """The array that was sent under that token, and its event. Raises: SharingError if it has been let go of."""
        with self._lock:
            if token not in self._arrays:
                raise SharingError("GPU memory came back to its process after that had let go of it")
            array, _, event = self._arrays[token]
            return array, event

    def forget(self) -> None:
        """In a forked child: these are the parent's."""
        self._lock = threading.Lock()
        for _, fd, _ in self._arrays.values():
            with contextlib.suppress(OSError):  # closed by whoever forked
                os.close(fd)
        self._arrays = {}


exported = _Exported()
os.register_at_fork(after_in_child=exported.forget)


# GPU memory by CUDA IPC: another process opens the allocation that an array lies in, and looks at the same bytes.
#
# CUDA counts no references across processes: the sender has to keep what it sent until nobody looks at it any more. How
# it learns that: with the handle goes one end of a pipe, and the receiver closes it when its last array over the memory
# has gone. The kernel does so for one that dies, and for a message that is never read, so the other end tells the
# truth.
#
# Nobody waits but streams: an event goes with the handle, after which the receiver's stream goes on; and when an array
# of the receiver's has gone, a thread waits in its place until the stream that it was last current on has used it.
#
# Source: CUDA C++ Programming Guide, "Interprocess Communication"; CUDA driver API, cuMemGetAddressRange.


class IpcMemory(NamedTuple):
    """Where an array is for others.

    handle: CUDA's of the allocation; offset: of the array in it, nbytes: as far as it reaches there; event: CUDA's
    handle of what its writes are done at, b"" if they are; uuid: of the device, whatever its number is elsewhere
    """

    handle: bytes
    offset: int
    nbytes: int
    event: bytes = b""
    uuid: bytes = b""


def export_array(
    array: Array, where: device
) -> tuple[device, IpcReference, IpcMemory, Any, tuple[int, ...], tuple[int, ...]]:
    """What `accept` needs in another process: device, claim, memory, dtype, shape, strides.

    The receiver's stream will go on when the current one has done what was asked of it so far.
    Raises: SharingError if CUDA cannot share this memory.
    """
    exported.sweep()
    xp = where.xp
    low, high = _reach(array)
    with on(where):
        lane = stream_order.current(xp)
        if lane.capturing:
            raise SharingError("a tensor cannot be sent while a graph is captured: nothing is in it before a replay")
        theirs = getattr(array.data.mem, "_owner", None)
        if isinstance(theirs, _Held):
            # Their event would have to live until it is waited for, and who forwards is not told when that is.
            lane.stream.synchronize()
            return where, theirs.claim, theirs.part(array, low, high), array.dtype, array.shape, array.strides
        base = address_range(low) if high > low else low
        event, mark = _mark(lane)
        try:
            handle = xp.cuda.runtime.ipcGetMemHandle(base) if high > low else b""
        except RuntimeError as error:  # CUDARuntimeError
            raise SharingError(
                f"CUDA cannot share this memory with other processes ({error}): it can share what cudaMalloc gave, as "
                "the pool does, and neither what cudaMallocAsync gave (ddp.cuda.memory.use('async')) nor managed "
                "memory"
            ) from error
    memory = IpcMemory(bytes(handle), array.data.ptr - base, high - base, mark, _uuid(xp, lane.device))
    return where, exported.hold(array, event), memory, array.dtype, array.shape, array.strides


_MOST = 1000  # events at a time; beyond, the host waits, as PyTorch's does: CUDA has no unbounded number of them


def _mark(lane: stream_order.DeviceStream) -> tuple[Any, bytes]:
    """An event of now, and its handle for others; (None, b"") if all is done already, because it was waited for."""
    xp = lane.xp
    if len(exported) < _MOST:
        try:
            event = lane.record(xp.cuda.Event(disable_timing=True, interprocess=True))
            return event, bytes(xp.cuda.runtime.ipcGetEventHandle(event.ptr))
        except RuntimeError:  # CUDARuntimeError: not on this system, as under WSL
            pass
    lane.stream.synchronize()
    return None, b""


def import_array(
    where: device, claim: IpcReference, memory: IpcMemory, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Array:
    """The array that another process offered; in the process that did so, that array itself.

    Raises: SharingError if CUDA cannot open the memory, or this process does not have the device.
    """
    xp = where.xp
    if claim.pid == os.getpid():
        array, event = exported.find(claim.token)  # CUDA opens no handle where it was made
        if event is not None:
            stream_order.current(xp, array.device.id).wait(event)
        return _part(xp, array, memory, dtype, shape, strides)
    index = _find(xp, memory.uuid, where, claim.pid)
    with xp.cuda.Device(index):
        if not memory.handle:
            return xp.empty(shape, dtype)
        opened = _opened(xp, index, memory.handle, claim.pid)
        if memory.event:
            event = xp.cuda.runtime.ipcOpenEventHandle(memory.event)
            xp.cuda.runtime.streamWaitEvent(stream_order.current(xp).stream.ptr, event)
            xp.cuda.runtime.eventDestroy(event)  # CUDA keeps it for as long as the stream needs it
    lease = _Lease(opened, claim)
    held = _Held(lease, memory)
    weakref.finalize(held, _let_go, xp, index, lease).atexit = False  # all goes with the process
    pointer = xp.cuda.MemoryPointer(xp.cuda.UnownedMemory(opened.pointer, memory.nbytes, held, index), 0)
    return xp.ndarray(shape, dtype, pointer + memory.offset, strides)


def _part(
    xp: Any, array: Array, memory: IpcMemory, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Array:
    """What came home of `array`: itself, or a part of it that others have cut out."""
    if (array.dtype, array.shape, array.strides) == (dtype, shape, strides):
        return array
    if not memory.handle:
        return xp.empty(shape, dtype)
    start = address_range(array.data.ptr) + memory.offset
    return xp.ndarray(shape, dtype, array.data + (start - array.data.ptr), strides)


class _Opened:
    """An allocation of another process, mapped until the last array over it has gone."""

    def __init__(self, xp: Any, index: int, handle: bytes, pid: int) -> None:
        runtime = xp.cuda.runtime
        try:
            self.pointer = runtime.ipcOpenMemHandle(handle)
        except RuntimeError as error:
            raise SharingError(
                f"GPU memory of process {pid} cannot be opened here ({error}): the process has ended or let go of it, "
                "or CUDA IPC does not work between the two, as in containers of their own"
            ) from error
        weakref.finalize(self, _close, xp, index, self.pointer).atexit = False  # the context goes with the process


class _Lease:
    """The right to look at others' memory. It ends with its last reference: the mapping first, and then the claim."""

    def __init__(self, opened: _Opened, claim: IpcReference) -> None:
        self.opened: _Opened | None = opened
        self.claim: IpcReference | None = claim

    def __del__(self) -> None:
        self.opened = None
        self.claim = None


class _Held:
    """What arrays over others' memory keep alive, and what is to be told to whom they are sent on."""

    def __init__(self, lease: _Lease, memory: IpcMemory) -> None:
        self._lease, self._memory = weakref.ref(lease), memory

    @property
    def claim(self) -> IpcReference:
        """The claim, which ends with its last copy, in whatever process."""
        lease = self._lease()
        assert lease is not None
        assert lease.claim is not None, "it lives as long as this"
        return lease.claim

    def part(self, array: Array, low: int, high: int) -> IpcMemory:
        """Where an array is in the memory of the process that it came from."""
        lease = self._lease()
        assert lease is not None
        assert lease.opened is not None, "it lives as long as this"
        base = lease.opened.pointer
        handle = self._memory.handle if high > low else b""
        return self._memory._replace(handle=handle, offset=array.data.ptr - base, nbytes=high - base, event=b"")


def _let_go(xp: Any, index: int, lease: _Lease) -> None:
    """The lease ends when the current stream has got this far."""
    lane = stream_order.current(xp, index)
    if lane.capturing:
        stream_order.hold(lane, lease)
        return
    with xp.cuda.Device(index):
        event = xp.cuda.Event(block=True, disable_timing=True)  # the thread sleeps
    _leaving.put(xp, index, lane.record(event), lease)


class _Leaving:
    """What goes when an event has passed; a thread waits for these, so that nobody else has to."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, int, Any, _Lease]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, xp: Any, index: int, event: Any, lease: _Lease) -> None:
        """Ends the lease when the event of that device has passed."""
        self._queue.put((xp, index, event, lease))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ddp-cuda-ipc", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            xp, index, event, lease = self._queue.get()
            with contextlib.suppress(Exception), xp.cuda.Device(index):  # a device that has failed has lost all memory
                event.synchronize()
            del xp, event, lease

    def forget(self) -> None:
        """In a forked child: there is no such thread, and what was waited for is the parent's."""
        self.__init__()  # type: ignore[misc]  # as new


_leaving = _Leaving()
os.register_at_fork(after_in_child=_leaving.forget)


def _close(xp: Any, index: int, pointer: int) -> None:
    with xp.cuda.Device(index):
        xp.cuda.runtime.ipcCloseMemHandle(pointer)


_open: weakref.WeakValueDictionary[tuple[int, bytes], _Opened] = weakref.WeakValueDictionary()


def _opened(xp: Any, index: int, handle: bytes, pid: int) -> _Opened:
    """CUDA maps an allocation once a process, so all arrays in it share the mapping."""
    found = _open.get((index, handle))
    if found is None:
        found = _open[index, handle] = _Opened(xp, index, handle, pid)
    return found


@functools.cache  # CUDA takes a millisecond
def _uuid(xp: Any, index: int) -> bytes:
    """What names a device in every process; b"" where it has no such name."""
    return bytes(xp.cuda.runtime.getDeviceProperties(index).get("uuid", b""))


def _find(xp: Any, uuid: bytes, where: device, pid: int) -> int:
    """The number here of another process's device. Raises: SharingError if this process does not have it."""
    index = where.index or 0
    count = xp.cuda.runtime.getDeviceCount()
    if not uuid and index < count:
        return index
    for each in sorted(range(count), key=lambda n: n != index):
        if uuid and _uuid(xp, each) == uuid:
            return each
    raise SharingError(
        f"a tensor on {where} of process {pid} cannot come here: this process does not have that GPU among its {count} "
        "(CUDA_VISIBLE_DEVICES)"
    )


def _reach(array: Array) -> tuple[int, int]:
    """The addresses of an array's first byte and of the one after its last."""
    start = array.data.ptr
    if array.size == 0:
        return start, start
    reach = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    return start + sum(min(each, 0) for each in reach), start + sum(max(each, 0) for each in reach) + array.itemsize


def _address_range(address: int) -> int:
    """Where the allocation begins that an address of the current device lies in: a pool cuts these into pieces."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if code:
        raise SharingError(f"CUDA knows no allocation at {address:#x}: cuMemGetAddressRange answered {code}")
    return base.value


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


address_range: Callable[[int], int] = _address_range
