"""Pickling for another process: bytes, and with them the file descriptors of what is not copied.

Tensors become handles here: which block, where in it, what shape and strides. Two pickles make use of that: the one of
our own connections, where descriptors travel with the message, and the standard ForkingPickler, which packs a process's
arguments; pickle.dumps and copy.deepcopy know nothing of it."""

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

_SMALL = 1 << 16  # bytes

# The blocks that tensors of this process lie in, so that what comes twice is mapped once, and what comes home is found.
_known: weakref.WeakValueDictionary[str, Block] = weakref.WeakValueDictionary()


class PackedObject:
    """A packed object. fd_owners: what stands behind its descriptors, each with a `fileno()`; received, the numbers."""

    __slots__ = ("data", "fd_owners")

    def __init__(self, data: Any, fd_owners: list[Any]) -> None:
        self.data, self.fd_owners = data, fd_owners

    def open(self) -> Any:
        """The object of a message that was received; to be called once. Descriptors that it left over are closed."""
        outer, _unpacking.fds = _unpacking.fds, self.fd_owners
        try:
            return pickle.loads(self.data)
        finally:
            _unpacking.fds = outer
            self.close()

    def close(self) -> None:
        """Closes the descriptors that were not taken."""
        for fd in self.fd_owners:
            if fd >= 0:
                os.close(fd)
        self.fd_owners = []


class _Unpacking(threading.local):
    fds: list[int] | None = None  # of the message that this thread is opening


_unpacking = _Unpacking()


def take_fd(index: int) -> int:
    """The descriptor of that index of the message being unpacked, whose owner the caller becomes."""
    fds = _unpacking.fds
    assert fds is not None, "only a channel's message holds such a thing"
    fd, fds[index] = fds[index], -1
    return fd


class SentFd:
    """The descriptor of an object, its `owner`, on its way to another process, where it is unpickled as a number."""

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
    """An object as `SharingConnection.post` sends it; its tensors move to shared memory.

    Raises: GraphError for a tensor that is the result of an op.
    """
    share_small_tensors(obj)
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(obj)
    return PackedObject(file.getbuffer(), packer.fd_owners)


def share_small_tensors(obj: Any) -> None:
    """Moves small tensors in nested lists and dicts, and whole modules there, to one block: a descriptor less for each.

    A block lives as long as one tensor in it, so larger ones get their own.
    """
    found: list[TensorBase] = []
    seen: set[int] = set()
    left = [obj]
    while left:
        each = left.pop()
        if isinstance(each, TensorBase):
            if each.array.nbytes <= _SMALL:
                found.append(each)
        elif hasattr(type(each), "share_memory"):  # a Module; to import ddp.nn would cost who needs none
            each.share_memory()
        elif isinstance(each, list | tuple | dict) and id(each) not in seen:
            seen.add(id(each))
            left += each.values() if isinstance(each, dict) else each
    move_to_shared_memory(found)


def _reduce_tensor(x: Any) -> tuple[Any, ...]:
    check_leaf(x, "sending")
    state = x.__dict__ or None
    rebuilt = type(x), x.edge is not None
    if x.device is not CPU:
        return _rebuild_tensor, (*rebuilt, ipc.import_array, ipc.export_array(x.array, x.device)), state
    move_to_shared_memory([x])
    found = block_of(x.array)
    assert found is not None
    block, at = found
    _known[block.token] = block
    array = x.array
    layout = (array.dtype, array.shape, at, array.strides, array.flags.writeable)
    return _rebuild_tensor, (*rebuilt, _shared_array, block, *layout), state


def _rebuild_tensor(kind: type[Any], requires_grad: bool, make: Callable[..., Any], *where: Any) -> Any:
    """The tensor of that class around the array that `make(*where)` gives."""
    array = make(*where)
    made = as_subclass(kind, wrap(array, device_of(array)))  # a GPU may have another number here
    return made.requires_grad_() if requires_grad else made


def _shared_array(block: Block, dtype: Any, shape: Any, at: int, strides: Any, writeable: bool) -> Any:
    array = np.ndarray(shape, dtype, block.array(np.uint8, block.nbytes), at, strides)
    array.flags.writeable = writeable
    return array


def _open_block(fd: int, token: str, nbytes: int) -> Block:
    """The block behind a descriptor that this process has got."""
    block = _known.get(token)
    if block is None or block.closed:
        block = _known[token] = Block.adopt(fd, token, nbytes)
    else:
        os.close(fd)
    return block


def _block_by_fd(block: Block) -> tuple[Any, ...]:
    return _open_block, (SentFd(block), block.token, block.nbytes)


# The standard ForkingPickler packs the arguments of a process that is started, and what others' queues and pipes carry.


def _reduce_for_process(x: Any) -> Any:
    """A tensor in a process's arguments goes by handle; others' queues and pipes carry contents."""
    return _reduce_tensor(x) if context.get_spawning_popen() is not None else x.__reduce__()


def _reduce_reference(reference: IpcReference) -> tuple[Any, ...]:
    return IpcReference, (SentFd(reference), reference.token, reference.pid)


def _reduce_fd(sent: SentFd) -> tuple[Any, ...]:
    popen = context.get_spawning_popen()
    if popen is not None:
        vars(popen).setdefault("fd_owners", []).append(sent.owner)  # to stay open until the child has it
    return _fd_from_parent, (reduction.DupFd(sent.owner.fileno()),)


def _fd_from_parent(inherited: Any) -> int:
    fd: int = inherited.detach()
    os.set_inheritable(fd, False)
    return fd


reduction.register(Block, _block_by_fd)
reduction.register(IpcReference, _reduce_reference)
reduction.register(SentFd, _reduce_fd)
for_each_class(lambda kind: reduction.register(kind, _reduce_for_process))
