"""Pickling for another process: makes bytes, and lists the file descriptors of the memory that is not copied.

A tensor on the CPU is pickled as a handle: its block of shared memory, the offset in it, dtype, shape and strides. The
handle of a tensor on a GPU is made by CUDA IPC. Two picklers make handles: the one of our own connections, where
descriptors travel with the message, and the standard ForkingPickler for the arguments of a process that is started.
pickle.dumps and copy.deepcopy copy the contents as usual.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any

import numpy as np

from ddp._block import Block, block_of
from ddp._cuda import ipc
from ddp._cuda.ipc import IpcReference
from ddp._device import CPU, device_of
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.storage import as_subclass, check_leaf, for_each_class, move_to_shared_memory

# Size in bytes up to which tensors share a block.
_SMALL = 1 << 16

# This process's blocks by token: a block that is received twice is mapped once, and a block that comes back is found.
_blocks: weakref.WeakValueDictionary[str, Block] = weakref.WeakValueDictionary()


class PackedObject:
    """A pickled object with its descriptors.

    fd_owners: at the sender, the objects that own the descriptors, each with a `fileno()`; at the receiver, the
    descriptors
    """

    __slots__ = ("data", "fd_owners")

    def __init__(self, data: Any, fd_owners: list[Any]) -> None:
        self.data = data
        self.fd_owners = fd_owners

    def open(self) -> Any:
        """Unpickles a received message; call it once. Closes the descriptors that no object took over."""
        outer = _unpacking.fds
        _unpacking.fds = self.fd_owners
        try:
            return pickle.loads(self.data)
        finally:
            _unpacking.fds = outer
            self.close()

    def close(self) -> None:
        """Closes the descriptors that no object took over."""
        for fd in self.fd_owners:
            if fd >= 0:
                os.close(fd)
        self.fd_owners = []


class _Unpacking(threading.local):
    fds: list[int] | None = None  # of the message that this thread is opening


_unpacking = _Unpacking()


def take_fd(index: int) -> int:
    """Takes a descriptor of the message that is being unpickled; the caller owns it from now on."""
    fds = _unpacking.fds
    assert fds is not None, "only a channel's message holds such a thing"
    fd = fds[index]
    fds[index] = -1
    return fd


class SentFd:
    """The descriptor of `owner` in a pickle. The receiving process unpickles it as the number of its own descriptor."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner


class _Packer(reduction.ForkingPickler):
    """The pickler of our connections."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.fd_owners: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TensorBase):
            return _reduce_tensor(obj)
        if type(obj) is not SentFd:
            return NotImplemented
        self.fd_owners.append(obj.owner)
        return take_fd, (len(self.fd_owners) - 1,)


def pack(obj: Any) -> PackedObject:
    """Pickles an object for `SharingConnection.send_packed`. Its tensors on the CPU move to shared memory.

    Raises: GraphError for a tensor that is the result of an op; SharingError if there is no shared memory.
    """
    share_small_tensors(obj)
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(obj)
    return PackedObject(file.getbuffer(), packer.fd_owners)


def share_small_tensors(obj: Any) -> None:
    """Moves the small tensors in nested lists, tuples and dicts to one shared block, which needs one descriptor.

    Each Module in them gets a block of its own. Larger tensors are left out: a block lives as long as any tensor in it.
    """
    small: list[TensorBase] = []
    visited: set[int] = set()
    pending = [obj]
    while pending:
        value = pending.pop()
        if isinstance(value, TensorBase):
            if value.array.nbytes <= _SMALL:
                small.append(value)
        elif hasattr(type(value), "share_memory"):  # a Module: recognized without importing ddp.nn, which takes time
            value.share_memory()
        elif isinstance(value, list | tuple | dict) and id(value) not in visited:
            visited.add(id(value))
            pending += value.values() if isinstance(value, dict) else value
    move_to_shared_memory(small)


def _reduce_tensor(x: Any) -> tuple[Any, ...]:
    check_leaf(x, "sending")
    state = x.__dict__ or None
    properties = type(x), x.edge is not None
    if x.device is not CPU:
        return _rebuild_tensor, (*properties, ipc.import_array, ipc.export_array(x.array, x.device)), state
    move_to_shared_memory([x])
    place = block_of(x.array)
    assert place is not None
    block, offset = place
    _blocks[block.token] = block
    array = x.array
    layout = (array.dtype, array.shape, offset, array.strides, array.flags.writeable)
    return _rebuild_tensor, (*properties, _shared_array, block, *layout), state


def _rebuild_tensor(cls: type[Any], requires_grad: bool, open_array: Callable[..., Any], *handle: Any) -> Any:
    """A tensor of class `cls` around the array `open_array(*handle)`."""
    array = open_array(*handle)
    x = as_subclass(cls, wrap(array, device_of(array)))  # the same GPU may have another number in this process
    return x.requires_grad_() if requires_grad else x


def _shared_array(block: Block, dtype: Any, shape: Any, offset: int, strides: Any, writeable: bool) -> Any:
    array = np.ndarray(shape, dtype, block.array(np.uint8, block.nbytes), offset, strides)
    array.flags.writeable = writeable
    return array


def _open_block(fd: int, token: str, nbytes: int) -> Block:
    """Returns the block of a received descriptor. Maps it unless that was done before. Takes over the descriptor."""
    block = _blocks.get(token)
    if block is None or block.closed:
        block = _blocks[token] = Block.adopt(fd, token, nbytes)
    else:
        os.close(fd)
    return block


def _block_by_fd(block: Block) -> tuple[Any, ...]:
    return _open_block, (SentFd(block), block.token, block.nbytes)


# The standard ForkingPickler pickles the arguments of a process that is started, and objects in the standard library's
# own queues and pipes.


def _reduce_for_process(x: Any) -> Any:
    """Pickles a tensor in a process's arguments as a handle, and in the standard library's queues with its contents."""
    return _reduce_tensor(x) if context.get_spawning_popen() is not None else x.__reduce__()


def _reduce_reference(reference: IpcReference) -> tuple[Any, ...]:
    return IpcReference, (SentFd(reference), reference.token, reference.pid)


def _reduce_fd(sent: SentFd) -> tuple[Any, ...]:
    popen = context.get_spawning_popen()
    if popen is not None:
        vars(popen).setdefault("fd_owners", []).append(sent.owner)  # keeps the descriptor open until the child has it
    return _fd_from_parent, (reduction.DupFd(sent.owner.fileno()),)


def _fd_from_parent(inherited: Any) -> int:
    fd: int = inherited.detach()
    os.set_inheritable(fd, False)
    return fd


reduction.register(Block, _block_by_fd)
reduction.register(IpcReference, _reduce_reference)
reduction.register(SentFd, _reduce_fd)
for_each_class(lambda cls: reduction.register(cls, _reduce_for_process))
