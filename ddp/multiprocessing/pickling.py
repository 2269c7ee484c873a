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

from ddp._block import Block, Handle, block_of
from ddp._cuda import ipc
from ddp._cuda.ipc import IpcReference
from ddp._device import CPU, device, device_of
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.storage import as_subclass, check_leaf, for_each_class, move_to_shared_memory

_SMALL = 1 << 16  # bytes

# The blocks that tensors of this process lie in, so that what comes twice is mapped once, and what comes home is found.
_known: weakref.WeakValueDictionary[str, Block] = weakref.WeakValueDictionary()
_connection_from_fd: dict[type, Callable[[Any], tuple[Any, tuple[Any, ...]]]] = {}


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


def register_fd_type(kind: type, reduce: Callable[[Any], tuple[Any, tuple[Any, ...]]]) -> None:
    """Says how channels pack objects of `kind`, which have a `fileno()`: a function and its arguments for the receiver.

    The function is called with the index of the descriptor, for `taken`, and those arguments.
    """
    _connection_from_fd[kind] = reduce


class _Packer(reduction.ForkingPickler):
    """The pickle of our channels."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.fd_owners: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TensorBase):
            return _reduce_tensor(obj)
        reduce = _connection_from_fd.get(type(obj))
        if reduce is None:
            return NotImplemented
        self.fd_owners.append(obj)
        rebuild, arguments = reduce(obj)
        return rebuild, (len(self.fd_owners) - 1, *arguments)


def pack(obj: Any) -> PackedObject:
    """An object for `Channel.ship`; its tensors move to shared memory. Raises: GraphError for one in a graph."""
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
    state = getattr(x, "__dict__", None)
    if x.device is not CPU:
        where = ipc.export_array(x.array, x.device)
        return _gpu_tensor, (type(x), *where, x.edge is not None), state
    move_to_shared_memory([x])
    found = block_of(x.array)
    assert found is not None
    block, at = found
    _known[block.token] = block
    array = x.array
    layout = (array.dtype, array.shape, at, array.strides, array.flags.writeable)
    return _tensor, (type(x), block, *layout, x.edge is not None), state


def _tensor(
    kind: type[Any],
    block: Block,
    dtype: Any,
    shape: tuple[int, ...],
    at: int,
    strides: tuple[int, ...],
    writeable: bool,
    requires_grad: bool,
) -> Any:
    array = np.ndarray(shape, dtype, block.array(np.uint8, block.nbytes), at, strides)
    array.flags.writeable = writeable
    x = as_subclass(kind, wrap(array, CPU))
    return x.requires_grad_() if requires_grad else x


def _gpu_tensor(
    kind: type[Any],
    where: device,
    claim: Any,
    memory: Any,
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
) -> Any:
    array = ipc.import_array(where, claim, memory, dtype, shape, strides)
    x = as_subclass(kind, wrap(array, device_of(array)))  # its number may be another one here
    return x.requires_grad_() if requires_grad else x


def _open_block(fd: int, token: str, nbytes: int) -> Block:
    """The block behind a descriptor that this process has got."""
    block = _known.get(token)
    if block is not None and not block.closed:
        os.close(fd)
        return block
    os.set_inheritable(fd, False)
    block = _known[token] = Block.adopt(fd, token, nbytes)
    return block


def _block_from_connection(index: int, token: str, nbytes: int) -> Block:
    return _open_block(take_fd(index), token, nbytes)


def _block_from_parent(fd: Any, token: str, nbytes: int) -> Block:
    return _open_block(fd.detach(), token, nbytes)


def _open_handle(handle: Handle) -> Block:
    block = _known.get(handle.token)
    if block is None:
        block = _known[handle.token] = Block.open(handle)
    return block


def _claim_from_connection(index: int, token: str, pid: int) -> IpcReference:
    return IpcReference(take_fd(index), token, pid)


def _claim_from_parent(fd: Any, token: str, pid: int) -> IpcReference:
    claim = IpcReference(fd.detach(), token, pid)
    os.set_inheritable(claim.fileno(), False)
    return claim


register_fd_type(Block, lambda block: (_block_from_connection, (block.token, block.nbytes)))
register_fd_type(IpcReference, lambda claim: (_claim_from_connection, (claim.token, claim.pid)))


# The standard ForkingPickler:


def _reduce_for_process(x: Any) -> Any:
    """A tensor in a process's arguments goes by handle; in others' queues and pipes only if its memory is shared."""
    if context.get_spawning_popen() is not None or (x.device is CPU and x.is_shared()):
        return _reduce_tensor(x)
    return x.__reduce__()


def _reduce_block(block: Block) -> tuple[Any, ...]:
    popen: Any = context.get_spawning_popen()
    if popen is None:
        return _open_handle, (block.handle(),)
    return _block_from_parent, (popen.DupFd(popen.duplicate_for_child(block.fileno())), block.token, block.nbytes)


def _reduce_claim(claim: Any) -> tuple[Any, ...]:
    popen: Any = context.get_spawning_popen()
    assert popen is not None, "others' channels copy what is on a GPU"
    vars(popen).setdefault("claims", []).append(claim)  # to stay open until the child has it
    return _claim_from_parent, (popen.DupFd(popen.duplicate_for_child(claim.fileno())), claim.token, claim.pid)


reduction.register(Block, _reduce_block)
reduction.register(IpcReference, _reduce_claim)
for_each_class(lambda kind: reduction.register(kind, _reduce_for_process))
