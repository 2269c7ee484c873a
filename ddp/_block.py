"""Memory that processes share. It has no name in the file system, so nothing is left behind if a process is killed.

A block is a `memfd`. Other processes map it through a file descriptor that is passed to them. The block's token is sent
along, so that they recognize a block that they have mapped already. A block takes no space in /dev/shm. The kernel
frees it when the last descriptor and the last mapping are closed, also if a process was killed.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp.errors import SharingError

Array = np.ndarray[Any, Any]

_NAME = "ddp-block-"
# Prevents mmap from keeping a duplicate of the descriptor. Before Python 3.13 it always keeps one.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class Block:
    """Shared memory of `nbytes` bytes, mapped into this process; made by `create` and `adopt`.

    Arrays over the block keep the block and its mapping alive, also after `close`, which closes only the descriptor. A
    forked child shares the memory.
    """

    __slots__ = ("__weakref__", "_bytes", "_fd", "nbytes", "token")

    def __init__(self, fd: int, token: str, nbytes: int) -> None:
        self._bytes: Array = np.frombuffer(mmap.mmap(fd, nbytes or 1, **_UNTRACKED), np.uint8, nbytes)
        # Set after mmap: if mmap fails, the caller still owns `fd`, and closes it.
        self._fd = fd
        self.token = token
        self.nbytes = nbytes

    @classmethod
    def create(cls, nbytes: int) -> Block:
        """Creates a block of zeros. Raises: SharingError if nbytes is negative, or the system has no memory for it."""
        token = os.urandom(8).hex()
        try:
            fd = os.memfd_create(_NAME + token, os.MFD_CLOEXEC)
        except (AttributeError, OSError) as error:
            raise SharingError(f"the system gives no shared memory of {nbytes} bytes: {error}") from error
        try:
            os.ftruncate(fd, nbytes or 1)
            return cls(fd, token, nbytes)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise SharingError(f"the system gives no shared memory of {nbytes} bytes: {error}") from error

    @classmethod
    def adopt(cls, fd: int, token: str, nbytes: int) -> Block:
        """Makes a block of a descriptor of this process. The block owns the descriptor from now on.

        Raises: SharingError if it cannot be mapped; the descriptor is closed then.
        """
        try:
            return cls(fd, token, nbytes)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise SharingError(f"shared memory of {nbytes} bytes cannot be mapped: {error}") from error

    @property
    def closed(self) -> bool:
        """Whether the descriptor is closed, so that it cannot be passed to other processes any more."""
        return self._fd < 0

    def fileno(self) -> int:
        """The descriptor. Raises: SharingError if the block is closed."""
        if self._fd < 0:
            raise SharingError(f"a block of {self.nbytes} bytes is closed, so that no other process can open it")
        return self._fd

    def array(self, dtype: Any, shape: int | Sequence[int], offset: int = 0, *, keep: Any = None) -> Array:
        """An array over the block's memory from byte `offset` on, C-contiguous; it keeps the block alive.

        keep: an object that lives as long as the array and all its views, so that a `weakref.finalize` on it is called
        when the last of these is dropped. Raises: SharingError if the array does not fit into the block, or the offset
        is not aligned.
        """
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = math.prod(shape) * dtype.itemsize
        if not 0 <= offset <= self.nbytes - size:
            raise SharingError(f"{dtype} {shape} at byte {offset} does not fit a block of {self.nbytes} bytes")
        if offset % dtype.alignment:
            raise SharingError(f"{dtype} cannot begin at byte {offset}: that is no multiple of {dtype.alignment}")
        return np.asarray(_Holder(self, offset, size, keep)).view(dtype).reshape(shape)

    def close(self) -> None:
        """Closes the descriptor: no other process can open the block any more; arrays over it stay valid."""
        fd = self._fd
        self._fd = -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __repr__(self) -> str:
        return f"<Block of {self.nbytes} bytes{', closed' if self.closed else ''}>"


class _Holder:
    """The base of every array over a block: it lives as long as the last of these arrays."""

    __slots__ = ("__array_interface__", "block", "keep")

    def __init__(self, block: Block, offset: int, size: int, keep: Any) -> None:
        start = block._bytes.__array_interface__["data"][0] + offset
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (start, False)}
        self.block = block
        self.keep = keep


def block_of(array: Any) -> tuple[Block, int] | None:
    """The block that holds a NumPy array, and the byte at which the array starts there; None for other memory."""
    holder = _below(array)
    if type(holder) is not _Holder:
        return None
    start = array.__array_interface__["data"][0] - holder.block._bytes.__array_interface__["data"][0]
    return holder.block, start


def is_shared(array: Any) -> bool:
    """Whether an array is in a block that other processes can open, and was made without `keep`."""
    holder = _below(array)
    return type(holder) is _Holder and holder.keep is None and not holder.block.closed


def _below(array: Any) -> Any:
    """The object at the end of an array's chain of `base` attributes."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array
