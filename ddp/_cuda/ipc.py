"""GPU memory by CUDA IPC: another process opens the allocation that an array lies in, and uses the same bytes.

CUDA counts no references across processes: the sender has to keep what it sent until no process uses it any more. So
one end of a pipe goes with the handle, and the receiver closes it when its last array over the memory has gone. The
kernel closes it for a receiver that dies, and for a message that is never read.

The sender waits for its current stream, so that the receiver finds all writes. When an array of the receiver's has
gone, the mapping is held until the stream that was current there is past it.

Source: CUDA C++ Programming Guide, "Interprocess Communication"; CUDA driver API, cuMemGetAddressRange.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import threading
import weakref
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
    """What this process has sent and others may still use, by token: the array, and our end of its pipe."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[Array, int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._arrays)

    def hold(self, array: Array) -> IpcReference:
        """Keeps `array` until the reference and all its copies are closed."""
        ours, theirs = os.pipe()
        reference = IpcReference(theirs, os.urandom(8).hex(), os.getpid())
        with self._lock:
            self._arrays[reference.token] = (array, ours)
        return reference

    def sweep(self) -> int:
        """Drops arrays that no process refers to any more; returns how many are left."""
        with self._lock:
            poll = select.poll()
            for _, fd in self._arrays.values():
                poll.register(fd, 0)  # that the other end is closed is always reported
            closed = {fd for fd, _ in poll.poll(0)}
            for token, (_, fd) in list(self._arrays.items()):
                if fd in closed:
                    del self._arrays[token]
                    os.close(fd)
            return len(self._arrays)

    def find(self, token: str) -> Array:
        """The array that was sent under that token. Raises: SharingError if it has been dropped."""
        with self._lock:
            if token not in self._arrays:
                raise SharingError("GPU memory came back to its process after that had let go of it")
            return self._arrays[token][0]

    def forget(self) -> None:
        """In a forked child: these are the parent's."""
        self._lock = threading.Lock()
        for _, fd in self._arrays.values():
            with contextlib.suppress(OSError):  # closed by whoever forked
                os.close(fd)
        self._arrays = {}


exported = _Exported()
os.register_at_fork(after_in_child=exported.forget)


class ExportedArray(NamedTuple):
    """An array as other processes find it. strides: in bytes

    handle: CUDA's of the allocation; offset: of the array in it, nbytes: as far as it reaches there; uuid: of the
    device, whatever its number is elsewhere
    """

    where: device
    reference: IpcReference
    handle: bytes
    offset: int
    nbytes: int
    uuid: bytes
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def export_array(array: Array, where: device) -> ExportedArray:
    """What `import_array` needs in another process.

    Waits for the current stream. Raises: SharingError if CUDA cannot share this memory.
    """
    exported.sweep()
    xp = where.xp
    low, high = _reach(array)
    with on(where):
        stream = stream_order.current(xp)
        if stream.capturing:
            raise SharingError("a tensor cannot be sent while a graph is captured: nothing is in it before a replay")
        stream.stream.synchronize()
        owner = getattr(array.data.mem, "_owner", None)
        layout = array.dtype, array.shape, array.strides
        if isinstance(owner, _Borrowed):
            base, handle = owner.lease.opened.pointer, owner.handle if high > low else b""
            place = array.data.ptr - base, high - base
            return ExportedArray(where, owner.lease.reference, handle, *place, owner.uuid, *layout)
        base = address_range(low) if high > low else low
        try:
            handle = xp.cuda.runtime.ipcGetMemHandle(base) if high > low else b""
        except RuntimeError as error:  # CUDARuntimeError
            raise SharingError(
                f"CUDA cannot share this memory with other processes ({error}): it can share what cudaMalloc gave, as "
                "the pool does, and neither what cudaMallocAsync gave (ddp.cuda.memory.use('async')) nor managed "
                "memory"
            ) from error
    place = array.data.ptr - base, high - base
    return ExportedArray(where, exported.hold(array), bytes(handle), *place, _uuid(xp, stream.device), *layout)


def import_array(given: ExportedArray) -> Array:
    """The array that another process exported; in the process that did so, that array itself.

    Raises: SharingError if CUDA cannot open the memory, or this process does not have the device.
    """
    xp, reference = given.where.xp, given.reference
    if reference.pid == os.getpid():  # CUDA opens no handle where it was made
        return _part(xp, exported.find(reference.token), given)
    index = _find(xp, given.uuid, given.where, reference.pid)
    with xp.cuda.Device(index):
        if not given.handle:
            return xp.empty(given.shape, given.dtype)
        borrowed = _Borrowed(_Lease(_opened(xp, index, given.handle, reference.pid), reference), given)
    # The finalizer holds the lease, and passes it on to the stream's order.
    weakref.finalize(borrowed, _end_lease, xp, index, borrowed.lease).atexit = False  # all goes with the process
    unowned = xp.cuda.UnownedMemory(borrowed.lease.opened.pointer, given.nbytes, borrowed, index)
    return xp.ndarray(given.shape, given.dtype, xp.cuda.MemoryPointer(unowned, given.offset), given.strides)


def _part(xp: Any, array: Array, given: ExportedArray) -> Array:
    """What came back of `array`: itself, or a part of it that another process has cut out."""
    if (array.dtype, array.shape, array.strides) == (given.dtype, given.shape, given.strides):
        return array
    if not given.handle:
        return xp.empty(given.shape, given.dtype)
    start = address_range(array.data.ptr) + given.offset
    return xp.ndarray(given.shape, given.dtype, array.data + (start - array.data.ptr), given.strides)


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
    """The right to use another process's memory. It ends with its last reference: the mapping before the pipe."""

    def __init__(self, opened: _Opened, reference: IpcReference) -> None:
        self.opened, self.reference = opened, reference

    def __del__(self) -> None:
        del self.opened, self.reference


class _Borrowed:
    """What arrays over another process's memory keep alive."""

    def __init__(self, lease: _Lease, given: ExportedArray) -> None:
        # Not the reference in `given`: the lease alone says when that ends.
        self.lease, self.handle, self.uuid = lease, given.handle, given.uuid


def _end_lease(xp: Any, index: int, lease: _Lease) -> None:
    """The lease ends when the current stream has got this far."""
    stream_order.hold(stream_order.current(xp, index), lease)


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
    """What names a device in every process."""
    return bytes(xp.cuda.runtime.getDeviceProperties(index).get("uuid", b""))


def _find(xp: Any, uuid: bytes, where: device, pid: int) -> int:
    """The number here of another process's device. Raises: SharingError if this process does not have it."""
    index = where.index or 0
    count = xp.cuda.runtime.getDeviceCount()
    for each in sorted(range(count), key=lambda n: n != index):
        if _uuid(xp, each) == uuid:
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


def address_range(address: int) -> int:
    """Where the allocation begins that an address of the current device lies in: a pool cuts these into pieces."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if code:
        raise SharingError(f"CUDA knows no allocation at {address:#x}: cuMemGetAddressRange answered {code}")
    return base.value
