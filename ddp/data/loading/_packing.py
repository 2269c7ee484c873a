"""Batches between processes: the arrays lie in shared memory, and only what they are and what holds them is sent.

What holds the arrays (tuples, dicts, a class of the user's) is pickled with a number in the place of each array. The
arrays that a worker has collated into its block stay where they are, others are copied there; the consumer makes arrays
over the same memory. When the last of these has gone, the block is used again.
"""

from __future__ import annotations

import io
import math
import pickle
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from ddp._block import Block, block_of
from ddp._device import CPU
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import bfloat16
from ddp.multiprocessing._blocks import BlockPool, Loan

Array = np.ndarray[Any, Any]

_ALIGNMENT = 64  # bytes: a line of the cache
_LONG = 4096  # bytes of a pickle that go into the block, too: a short message never waits for its reader
_HELD = 32  # blocks of one worker that the consumer may keep; of what it keeps beyond that it gets copies

_BFLOAT16 = bfloat16.name


class Leaf(NamedTuple):
    """An array of a batch: where it lies in the block, what it is, and whether a tensor is around it."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    tensor: bool


class Batch(NamedTuple):
    """What is sent of a batch.

    token, nbytes: of its block, "" if it needs none; new: whether the block's descriptor goes along
    long: where in the block the pickle lies, if it is long
    """

    token: str
    nbytes: int
    new: bool
    leaves: list[Leaf]
    pickled: bytes
    long: tuple[int, int] | None


class Outgoing:
    """A worker's side: memory for its batches, and what is to be sent of them."""

    def __init__(self) -> None:
        self.dropped: list[str] = []  # tokens of blocks that are no more, for the consumer to forget
        self.new: Block | None = None  # of the last batch, if the consumer does not have it yet: closed once it has
        self._pool = BlockPool(self.dropped.append)
        self._block: Block | None = None
        self._used = 0
        self._usual = 0  # bytes of the largest batch so far

    def begin(self) -> None:
        """A batch is about to be made."""
        self.abandon()
        self._used = 0
        if self._usual:
            self._block = self._pool.take(self._usual)

    def abandon(self) -> None:
        """There will be no batch of what was begun."""
        if self._block is not None:
            self._pool.give_back(self._block.token)
            self._block = None

    def give_back(self, tokens: list[str]) -> None:
        """The consumer has done with the batches in these blocks."""
        for token in tokens:
            self._pool.give_back(token)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array for the batch, in the block if that has room for it; what it holds is arbitrary."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        end = start + math.prod(shape) * np.dtype(dtype).itemsize
        if self._block is None or end > self._block.nbytes:
            return np.empty(shape, dtype)
        self._used = end
        return self._block.array(dtype, shape, start)

    def pack(self, batch: Any) -> Batch:
        """What is sent of a batch. Raises: what pickling raises for something that cannot be."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(batch)
        pickled = file.getvalue()
        if not pickler.arrays and len(pickled) <= _LONG:
            self.abandon()
            return Batch("", 0, False, [], pickled, None)
        leaves, offset = [], self._used
        strays: list[tuple[Array, int]] = []
        for array, is_tensor in pickler.arrays:
            start = self._start(array)
            if start is None:
                start = -(-offset // _ALIGNMENT) * _ALIGNMENT
                offset = start + array.nbytes
                strays.append((array, start))
            dtype = _BFLOAT16 if array.dtype == bfloat16 else array.dtype.str
            leaves.append(Leaf(start, dtype, array.shape, is_tensor))
        long = None
        if len(pickled) > _LONG:
            long = offset, len(pickled)
            strays.append((np.frombuffer(pickled, np.uint8), offset))
            offset += len(pickled)
            pickled = b""
        block = self._room(offset)
        for array, start in strays:
            block.array(array.dtype, array.shape, start)[...] = array
        self._usual = max(self._usual, offset)
        self._block = None
        self.new = None if block.closed else block
        return Batch(block.token, block.nbytes, not block.closed, leaves, pickled, long)

    def _start(self, array: Array) -> int | None:
        """Where the array lies in the block; None if it lies elsewhere, or not in the order of its elements."""
        found = block_of(array) if self._block is not None and array.flags.c_contiguous else None
        return found[1] if found is not None and found[0] is self._block else None

    def _room(self, nbytes: int) -> Block:
        """The batch's block, after its move to another one if it has less than `nbytes` bytes."""
        block = self._block
        if block is not None and block.nbytes >= nbytes:
            return block
        larger = self._pool.take(nbytes)
        if block is not None:
            larger.array(np.uint8, self._used)[...] = block.array(np.uint8, self._used)
            self._pool.give_back(block.token)
        return larger


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.arrays: list[tuple[Array, bool]] = []

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        if kind is Tensor:
            if obj._edge is not None or obj._device is not CPU:
                return None  # it pickles itself, or says why it cannot be
            array, is_tensor = obj._array, True
        elif kind is np.ndarray:
            array, is_tensor = obj, False
        else:
            return None
        if array.dtype.hasobject or array.dtype.fields or (array.dtype.kind == "V" and array.dtype != bfloat16):
            return None
        self.arrays.append((array, is_tensor))
        return len(self.arrays) - 1


class Incoming:
    """The consumer's side of one worker's batches."""

    def __init__(self) -> None:
        self._blocks: dict[str, Block] = {}
        self._back: deque[str] = deque()  # tokens of blocks whose arrays have gone
        self._held = 0

    def returned(self) -> list[str]:
        """Blocks that the worker may use again, each told once."""
        tokens = [self._back.popleft() for _ in range(len(self._back))]
        self._held -= len(tokens)
        return tokens

    def forget(self, tokens: list[str]) -> None:
        """The worker has dropped these blocks."""
        for token in tokens:
            self._blocks.pop(token, None)  # unmapped when its arrays have gone

    def unpack(self, batch: Batch, fd: int) -> Any:
        """The batch, its arrays over the worker's memory. fd: the block's, which is closed, if that is new here."""
        token, nbytes, new, leaves, pickled, long = batch
        loan = None
        if token:
            if new:
                block = self._blocks[token] = Block.adopt(fd, token, nbytes)
                block.close()  # the mapping is all that is needed
            loan = Loan(self._blocks[token])
            weakref.finalize(loan, self._back.append, token).atexit = False
            self._held += 1
        if long is not None:
            assert loan is not None
            pickled = loan.array(np.uint8, long[1], long[0]).tobytes()
        copied = self._held - len(self._back) > _HELD
        return _Unpickler(pickled, leaves, loan, copied).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, leaves: list[Leaf], loan: Loan | None, copied: bool) -> None:
        super().__init__(io.BytesIO(pickled))
        self._leaves, self._loan, self._copied = leaves, loan, copied

    def persistent_load(self, pid: int) -> Any:
        assert self._loan is not None
        offset, dtype, shape, is_tensor = self._leaves[pid]
        array = self._loan.array(bfloat16 if dtype == _BFLOAT16 else dtype, shape, offset)
        if self._copied:
            array = array.copy()
        return wrap(array, CPU) if is_tensor else array

    def find_class(self, module: str, name: str) -> Any:
        # In a worker the user's script has this name.
        return super().find_class("__main__" if module == "__mp_main__" else module, name)
