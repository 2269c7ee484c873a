"""GPU memory shared between processes by CUDA IPC: the receiver maps the allocation that contains the sender's array.

CUDA does not count references across processes, so the sender has to keep the array until no other process uses it. A
pipe tells the sender when: the pipe's write end is sent along with the handle, and the receiver closes that end when it
has dropped its last array over the memory. If the receiver dies, or the message is never read, the operating system
closes the end.

The sender waits for its current stream, so that all writes are done before the receiver reads. When the receiver drops
an array, the mapping stays until the work that was launched on its current stream is done.

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
    """The write end of the pipe. While it is open, the sender keeps the array.

    token: identifies the array in the sender; pid: of the sender
    """

    __slots__ = ("__weakref__", "_fd", "pid", "token")

    def __init__(self, fd: int, token: str, pid: int) -> None:
        self._fd = fd
        self.token = token
        self.pid = pid

    def fileno(self) -> int:
        """The file descriptor of the pipe's end."""
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


class _Exported:
    """The arrays that this process has sent, and that others may still use. By token: array, read end of its pipe."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[Array, int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._arrays)

    def add(self, array: Array) -> IpcReference:
        """Keeps `array` alive until the reference and all its copies are closed, and `collect` is called."""
        read_end, write_end = os.pipe()
        reference = IpcReference(write_end, os.urandom(8).hex(), os.getpid())
        with self._lock:
            self._arrays[reference.token] = (array, read_end)
        return reference

    def collect(self) -> int:
        """Drops the arrays that no other process uses any more. Returns how many are left."""
        with self._lock:
            poll = select.poll()
            for _, fd in self._arrays.values():
                poll.register(fd, 0)  # with no event: poll always reports a closed write end
            closed = {fd for fd, _ in poll.poll(0)}
            for token, (_, fd) in list(self._arrays.items()):
                if fd in closed:
                    del self._arrays[token]
                    os.close(fd)
            return len(self._arrays)

    def find(self, token: str) -> Array:
        """The array with this token. Raises: SharingError if it has been dropped."""
        with self._lock:
            if token not in self._arrays:
                raise SharingError("GPU memory came back to its process after that had let go of it")
            return self._arrays[token][0]

    def clear_after_fork(self) -> None:
        """Empties the table in a forked child: the arrays belong to the parent."""
        self._lock = threading.Lock()
        for _, fd in self._arrays.values():
            with contextlib.suppress(OSError):  # the code that forked may have closed it
                os.close(fd)
        self._arrays = {}


exported = _Exported()
os.register_at_fork(after_in_child=exported.clear_after_fork)


class ExportedArray(NamedTuple):
    """The message by which another process finds an array. strides: in bytes

    handle: CUDA's handle of the allocation, empty for an empty array
    offset, nbytes: bytes from the start of the allocation to the array's first element, and to the array's end
    uuid: identifies the device, which may have another number in the receiver
    """

    device: device
    reference: IpcReference
    handle: bytes
    offset: int
    nbytes: int
    uuid: bytes
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def export_array(array: Array, device: device) -> ExportedArray:
    """The message from which `import_array` makes the array in another process.

    Waits for the current stream. Raises: SharingError if CUDA cannot share this memory, or while a graph is captured.
    """
    exported.collect()
    xp = device.xp
    low, high = _address_bounds(array)
    with on(device):
        stream = stream_order.current(xp)
        if stream.capturing:
            raise SharingError("a tensor cannot be sent while a graph is captured: nothing is in it before a replay")
        stream.cupy_stream.synchronize()
        owner = getattr(array.data.mem, "_owner", None)
        layout = (array.dtype, array.shape, array.strides)
        if isinstance(owner, _ImportedMemory):  # memory of a third process: passes on its handle
            base = owner.lease.mapping.pointer
            handle = owner.handle if high > low else b""
            extent = (array.data.ptr - base, high - base)
            return ExportedArray(device, owner.lease.reference, handle, *extent, owner.uuid, *layout)
        base = allocation_start(low) if high > low else low
        try:
            handle = xp.cuda.runtime.ipcGetMemHandle(base) if high > low else b""
        except RuntimeError as error:  # CUDARuntimeError
            raise SharingError(
                f"CUDA cannot share this memory with other processes ({error}): it can share what cudaMalloc gave, as "
                "the pool does, and neither what cudaMallocAsync gave (ddp.cuda.memory.use('async')) nor managed "
                "memory"
            ) from error
    extent = (array.data.ptr - base, high - base)
    return ExportedArray(device, exported.add(array), bytes(handle), *extent, _uuid(xp, stream.device), *layout)


def import_array(message: ExportedArray) -> Array:
    """The array that another process exported; in the exporting process, that array itself or a view of its memory.

    Raises: SharingError if CUDA cannot open the memory, or this process does not have the device; DeviceError without a
    GPU.
    """
    xp = message.device.xp
    reference = message.reference
    if reference.pid == os.getpid():  # CUDA does not open a handle in the process that made it
        return _view(xp, exported.find(reference.token), message)
    index = _find_device(xp, message.uuid, message.device, reference.pid)
    with xp.cuda.Device(index):
        if not message.handle:
            return xp.empty(message.shape, message.dtype)
        lease = _Lease(_mapping(xp, index, message.handle, reference.pid), reference)
    memory = _ImportedMemory(lease, message)
    # When `memory` is dropped, the finalizer passes the lease to `keep_alive`. At exit the driver unmaps instead.
    weakref.finalize(memory, _end_lease, xp, index, lease).atexit = False
    unowned = xp.cuda.UnownedMemory(lease.mapping.pointer, message.nbytes, memory, index)
    return xp.ndarray(message.shape, message.dtype, xp.cuda.MemoryPointer(unowned, message.offset), message.strides)


def _view(xp: Any, array: Array, message: ExportedArray) -> Array:
    """The array of a message that came back to the exporting process: `array`, or a view of the same allocation."""
    if (array.dtype, array.shape, array.strides) == (message.dtype, message.shape, message.strides):
        return array
    if not message.handle:
        return xp.empty(message.shape, message.dtype)
    start = allocation_start(array.data.ptr) + message.offset
    return xp.ndarray(message.shape, message.dtype, array.data + (start - array.data.ptr), message.strides)


class _Mapping:
    """An allocation of another process that is mapped into this one, until no array uses it."""

    def __init__(self, xp: Any, index: int, handle: bytes, pid: int) -> None:
        runtime = xp.cuda.runtime
        try:
            self.pointer = runtime.ipcOpenMemHandle(handle)
        except RuntimeError as error:
            raise SharingError(
                f"GPU memory of process {pid} cannot be opened here ({error}): the process has ended or let go of it, "
                "or CUDA IPC does not work between the two, as in containers of their own"
            ) from error
        weakref.finalize(self, _unmap, xp, index, self.pointer).atexit = False  # at exit the driver unmaps


class _Lease:
    """Keeps a mapping and its pipe open. A dropped lease releases the mapping before it closes the pipe."""

    def __init__(self, mapping: _Mapping, reference: IpcReference) -> None:
        self.mapping = mapping
        self.reference = reference

    def __del__(self) -> None:
        del self.mapping
        del self.reference


class _ImportedMemory:
    """Owns memory of another process: CuPy's arrays over that memory keep this object alive."""

    def __init__(self, lease: _Lease, message: ExportedArray) -> None:
        # Keeps only parts of `message`: `message.reference` would keep the pipe open longer than the lease.
        self.lease = lease
        self.handle = message.handle
        self.uuid = message.uuid


def _end_lease(xp: Any, index: int, lease: _Lease) -> None:
    """Drops the lease when the work that was launched on the current stream is done."""
    stream_order.keep_alive(stream_order.current(xp, index), lease)


def _unmap(xp: Any, index: int, pointer: int) -> None:
    with xp.cuda.Device(index):
        xp.cuda.runtime.ipcCloseMemHandle(pointer)


# The mappings that are in use, by device and handle.
_mappings: weakref.WeakValueDictionary[tuple[int, bytes], _Mapping] = weakref.WeakValueDictionary()


def _mapping(xp: Any, index: int, handle: bytes, pid: int) -> _Mapping:
    """The mapping of an allocation. All arrays share it, because a process can map an allocation only once."""
    mapping = _mappings.get((index, handle))
    if mapping is None:
        mapping = _Mapping(xp, index, handle, pid)
        _mappings[index, handle] = mapping
    return mapping


@functools.cache  # CUDA needs a millisecond to answer
def _uuid(xp: Any, index: int) -> bytes:
    """The identity of a device, which is the same in every process."""
    return bytes(xp.cuda.runtime.getDeviceProperties(index).get("uuid", b""))


def _find_device(xp: Any, uuid: bytes, device: device, pid: int) -> int:
    """The number of a device in this process. Raises: SharingError if this process does not have the device."""
    preferred = device.index or 0
    count = xp.cuda.runtime.getDeviceCount()
    for index in sorted(range(count), key=lambda n: n != preferred):
        if _uuid(xp, index) == uuid:
            return index
    raise SharingError(
        f"a tensor on {device} of process {pid} cannot come here: this process does not have that GPU among its "
        f"{count} (CUDA_VISIBLE_DEVICES)"
    )


def _address_bounds(array: Array) -> tuple[int, int]:
    """The lowest address of an array's bytes, and the address after the highest."""
    start = array.data.ptr
    if array.size == 0:
        return start, start
    extents = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    low = start + sum(min(extent, 0) for extent in extents)
    return low, start + sum(max(extent, 0) for extent in extents) + array.itemsize


def allocation_start(address: int) -> int:
    """The first address of the allocation that contains an address. An allocation may hold several arrays.

    Raises: SharingError if CUDA knows no such allocation.
    """
    base = ctypes.c_uint64()
    size = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if code:
        raise SharingError(f"CUDA knows no allocation at {address:#x}: cuMemGetAddressRange answered {code}")
    return base.value
