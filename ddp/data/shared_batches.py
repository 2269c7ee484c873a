"""Batches between a worker and its consumer: arrays lie in shared memory, and only their description is sent.

A worker takes one of its blocks, collates arrays into it, and sends the block's descriptor once; the
consumer maps the block and makes arrays over the same memory. What holds the arrays (tuples, dicts, a class of the
user's) is pickled with a number in the place of each array. When the last array over a block has gone, its `Lease`
ends, and the worker may use the block again. So neither side allocates or faults pages in for each batch.
"""

from __future__ import annotations

import io
import math
import pickle
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp._block import Array, Block, block_of
from ddp._device import CPU
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import bfloat16

_GRAIN = 1 << 16  # bytes: sizes are rounded up to it, so that batches of about one size share blocks
_ALIGNMENT = 64  # bytes: a line of the cache
_LONG = 1024  # bytes of a pickle that go into the block, too: results in the socket do not block a worker while its
#              consumer sends it a long task, so neither waits for the other for ever (see `worker._LONG`)
_HELD = 32  # blocks of one worker that the consumer may keep; of what it keeps beyond that it gets copies

_BFLOAT16 = bfloat16.name


class Lease:
    """A block while arrays over it are in use: `weakref.finalize` on a lease says when the last of them has gone.

    That may be in any thread, wherever the garbage collector finds them: let it do next to nothing.
    """

    __slots__ = ("__weakref__", "block")

    def __init__(self, block: Block) -> None:
        self.block = block

    def array(self, dtype: Any, shape: Any, offset: int = 0) -> Array:
        """An array over the block, as `Block.array` makes it, that keeps the lease alive."""
        return self.block.array(dtype, shape, offset, keep=self)


class PackedBatch(NamedTuple):
    """What is sent of a batch.

    token, nbytes: of its block, "" if it needs none; new: whether the block's descriptor goes along
    content: the pickle of (arrays, pickle of the batch), empty if it is long; long: where in the block it lies then
    arrays: of each its offset in the block, dtype and shape, and whether a tensor is around it
    """

    token: str
    nbytes: int
    new: bool
    content: bytes
    long: tuple[int, int] | None


class BatchWriter:
    """A worker's side: memory for its batches, and what is to be sent of them."""

    def __init__(self) -> None:
        self.dropped: list[str] = []  # tokens of blocks that are no more, for the consumer to forget
        self.new: Block | None = None  # of the last batch, if the consumer does not have it yet: closed once it has
        self._free: list[Block] = []
        self._taken: dict[str, Block] = {}  # by token
        self._block: Block | None = None
        self._used = 0
        self._usual = 0  # bytes of the largest batch so far

    def begin(self) -> None:
        """A batch is about to be made."""
        self.abandon()
        self._used = 0
        if self._usual:
            self._block = self._take(self._usual)

    def abandon(self) -> None:
        """There will be no batch of what was begun."""
        if self._block is not None:
            self.give_back([self._block.token])
            self._block = None

    def give_back(self, tokens: list[str]) -> None:
        """The consumer has done with the batches in these blocks."""
        self._free += [self._taken.pop(token) for token in tokens]

    def _take(self, nbytes: int) -> Block:
        """A block of at least `nbytes` bytes: the smallest free one that will do, else a new one; its contents vary.

        Where none of the free ones will do, the largest is dropped for the new one: sizes that grow leave no trail.
        """
        self._free.sort(key=lambda block: block.nbytes)
        block = next((block for block in self._free if block.nbytes >= nbytes), None)
        if block is not None:
            self._free.remove(block)
        else:
            if self._free:
                self.dropped.append(self._free.pop().token)
            block = Block.create(max(1, -(-nbytes // _GRAIN)) * _GRAIN)
        self._taken[block.token] = block
        return block

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array for the batch, in the block if it fits there; what it holds is arbitrary."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        end = start + math.prod(shape) * np.dtype(dtype).itemsize
        if self._block is None or end > self._block.nbytes:
            return np.empty(shape, dtype)
        self._used = end
        return self._block.array(dtype, shape, start)

    def pack(self, batch: Any) -> PackedBatch:
        """What is sent of a batch. Raises: what pickling raises for something that cannot be."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(batch)
        pickled = file.getvalue()
        leaves, offset = [], self._used
        strays: list[tuple[Array, int]] = []
        for array, is_tensor in pickler.arrays:
            start = self._start(array)
            if start is None:
                start = -(-offset // _ALIGNMENT) * _ALIGNMENT
                offset = start + array.nbytes
                strays.append((array, start))
            dtype = _BFLOAT16 if array.dtype == bfloat16 else array.dtype.str
            leaves.append((start, dtype, array.shape, is_tensor))
        content, long = pickle.dumps((leaves, pickled), 5), None
        if len(content) > _LONG:
            long = offset, len(content)
            strays.append((np.frombuffer(content, np.uint8), offset))
            offset += len(content)
            content = b""
        elif not leaves:
            self.abandon()
            return PackedBatch("", 0, False, content, None)
        block = self._fitting_block(offset)
        for array, start in strays:
            block.array(array.dtype, array.shape, start)[...] = array
        self._usual = max(self._usual, offset)
        self._block = None
        self.new = None if block.closed else block
        return PackedBatch(block.token, block.nbytes, not block.closed, content, long)

    def _start(self, array: Array) -> int | None:
        """Where the array lies in the block; None if it lies elsewhere, or not in the order of its elements."""
        found = block_of(array) if self._block is not None and array.flags.c_contiguous else None
        return found[1] if found is not None and found[0] is self._block else None

    def _fitting_block(self, nbytes: int) -> Block:
        """The batch's block, after its move to another one if it has less than `nbytes` bytes."""
        block = self._block
        if block is not None and block.nbytes >= nbytes:
            return block
        larger = self._take(nbytes)
        if block is not None:
            larger.array(np.uint8, self._used)[...] = block.array(np.uint8, self._used)
            self.give_back([block.token])
        return larger


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.arrays: list[tuple[Array, bool]] = []

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        if kind is Tensor:
            if obj.edge is not None or obj.device is not CPU:
                return None  # it pickles itself, or says why it cannot be
            array, is_tensor = obj.array, True
        elif kind is np.ndarray:
            array, is_tensor = obj, False
        else:
            return None
        if array.dtype.hasobject or array.dtype.fields or (array.dtype.kind == "V" and array.dtype != bfloat16):
            return None
        self.arrays.append((array, is_tensor))
        return len(self.arrays) - 1


class BatchReader:
    """The consumer's side of one worker's batches."""

    def __init__(self) -> None:
        self._blocks: dict[str, Block] = {}
        self._back: deque[str] = deque()  # tokens of blocks whose arrays have gone
        self._held = 0

    def returned(self) -> list[str]:
        """Blocks that the worker may use again and that were not returned yet."""
        tokens = [self._back.popleft() for _ in range(len(self._back))]
        self._held -= len(tokens)
        return tokens

    def forget(self, tokens: Sequence[str]) -> None:
        """The worker has dropped these blocks."""
        for token in tokens:
            self._blocks.pop(token, None)  # unmapped when its arrays have gone

    def unpack(self, batch: PackedBatch, fd: int = -1) -> Any:
        """The batch, its arrays over the worker's memory. fd: the block's, which is closed, if that is new here."""
        token, nbytes, new, content, long = batch
        lease = None
        if token:
            if new:
                block = self._blocks[token] = Block.adopt(fd, token, nbytes)
                block.close()  # the mapping is all that is needed
            lease = Lease(self._blocks[token])
            weakref.finalize(lease, self._back.append, token).atexit = False
            self._held += 1
        if long is not None:
            assert lease is not None
            content = lease.array(np.uint8, long[1], long[0]).tobytes()
        leaves, pickled = pickle.loads(content)
        copied = self._held - len(self._back) > _HELD
        return _Unpickler(pickled, leaves, lease, copied).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, leaves: list[Any], lease: Lease | None, copied: bool) -> None:
        super().__init__(io.BytesIO(pickled))
        self._leaves, self._lease, self._copied = leaves, lease, copied

    def persistent_load(self, pid: int) -> Any:
        assert self._lease is not None
        offset, dtype, shape, is_tensor = self._leaves[pid]
        array = self._lease.array(bfloat16 if dtype == _BFLOAT16 else dtype, shape, offset)
        if self._copied:
            array = array.copy()
        return wrap(array, CPU) if is_tensor else array

    def find_class(self, module: str, name: str) -> Any:
        # In a worker the user's script has this name.
        return super().find_class("__main__" if module == "__mp_main__" else module, name)
