"""Memory that a loader shares with its workers: their batches, and the dataset that they start with.

A worker takes one of its blocks, collates arrays into it, and sends the block's descriptor once; the
consumer maps the block and makes arrays over the same memory. What holds the arrays (tuples, dicts, a class of the
user's) is pickled with a number in the place of each array. When the last array over a block has gone, its `Lease`
ends, and the worker may use the block again. So neither side allocates or faults pages in for each batch.

The dataset and functions are pickled into one block, with large arrays behind the pickle. Every worker maps it for
itself: workers share its pages as long as they only read, and what one writes it has for itself, as after a fork.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import os
import pickle
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from ddp._block import Array, Block, block_of
from ddp._device import CPU
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import bfloat16
from ddp.errors import ArgumentError

_GRAIN = 1 << 16  # bytes: sizes are rounded up to it, so that batches of about one size share blocks
_ALIGNMENT = 64  # bytes: a line of the cache
_HELD = 32  # blocks of one worker that the consumer may keep; of what it keeps beyond that it gets copies

_LARGE = 4096  # bytes from which on an array of a dataset is laid behind the pickle
_SCRIPT = b"\x8c\x08__main__"  # how a pickle names the module

_BFLOAT16 = bfloat16.name
# NumPy would write a byte for each byte that it compares.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


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
    """What is sent of a batch. slot: of its block in the worker, None if it needs none

    new: token and size of the block, if its descriptor goes along; leaves: of each array its offset in the block, dtype
    and shape, and whether a tensor is around it; content: the pickle of the batch without them
    """

    slot: int | None
    new: tuple[str, int] | None
    leaves: list[tuple[int, str, tuple[int, ...], bool]]
    content: bytes


class BatchWriter:
    """A worker's side: memory for its batches, and what is to be sent of them.

    Blocks have numbers, their slots. One that has become too small is replaced in its slot, there and here.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._free: list[int] = []
        self._slot: int | None = None  # of the batch that is being made
        self._used = 0  # bytes of it
        self._usual = 0  # bytes of the largest batch so far

    def begin(self) -> None:
        """A batch is about to be made."""
        self.abandon()
        if self._usual:
            self._slot = self._take(self._usual)

    def abandon(self) -> None:
        """There will be no batch of what was begun."""
        if self._slot is not None:
            self._free.append(self._slot)
        self._slot, self._used = None, 0

    def give_back(self, slots: list[int]) -> None:
        """The consumer has done with the batches in these blocks."""
        self._free += slots

    def _take(self, nbytes: int) -> int:
        """The slot of a free block of at least `nbytes` bytes, whose contents vary."""
        slot = self._free[-1] if self._free else len(self._blocks)
        if not self._free or self._blocks[slot].nbytes < nbytes:
            self._blocks[slot : slot + 1] = [Block.create(max(1, -(-nbytes // _GRAIN)) * _GRAIN)]
        if self._free:
            self._free.pop()
        return slot

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array for the batch, in the block if it fits there; what it holds is arbitrary."""
        start = _aligned(self._used)
        end = start + math.prod(shape) * np.dtype(dtype).itemsize
        if self._slot is None or end > self._blocks[self._slot].nbytes:
            return np.empty(shape, dtype)
        self._used = end
        return self._blocks[self._slot].array(dtype, shape, start)

    def pack(self, batch: Any) -> tuple[PackedBatch, list[int]]:
        """What is sent of a batch, and the descriptors to send with it and to close.

        Raises: what pickling raises for something that cannot be.
        """
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(batch)
        arrays = [array for array, _ in pickler.arrays]
        if not arrays:
            self.abandon()
            return PackedBatch(None, None, [], file.getvalue()), []
        starts = self._starts(arrays) or self._move(arrays)
        self._usual = max(self._usual, self._used)
        slot, self._slot = self._slot, None
        assert slot is not None
        leaves = [
            (start, _BFLOAT16 if array.dtype == bfloat16 else array.dtype.str, array.shape, is_tensor)
            for start, (array, is_tensor) in zip(starts, pickler.arrays, strict=True)
        ]
        block, new, fds = self._blocks[slot], None, []
        if not block.closed:
            new, fds = (block.token, block.nbytes), [os.dup(block.fileno())]
            block.close()  # the mapping is all that is needed here, once the consumer has a descriptor
        return PackedBatch(slot, new, leaves, file.getvalue()), fds

    def _starts(self, arrays: list[Array]) -> list[int] | None:
        """Where the arrays lie in the block; None if one lies elsewhere, or not in the order of its elements."""
        starts = []
        for array in arrays:
            found = block_of(array) if self._slot is not None and array.flags.c_contiguous else None
            if found is None or self._slot is None or found[0] is not self._blocks[self._slot]:
                return None
            starts.append(found[1])
        return starts

    def _move(self, arrays: list[Array]) -> list[int]:
        """Copies all arrays of the batch into one block that is large enough. Returns where each begins."""
        starts, end = [], 0
        for array in arrays:
            starts.append(_aligned(end))
            end = starts[-1] + array.nbytes
        left = self._slot if self._used else None  # the arrays in it are still to be copied
        if left is None:
            self.abandon()
        self._slot = self._take(end)
        for array, start in zip(arrays, starts, strict=True):
            self._blocks[self._slot].array(array.dtype, array.shape, start)[...] = array
        if left is not None:
            self._free.append(left)
        self._used = end
        return starts


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


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
        self._blocks: dict[int, Block] = {}  # by slot
        self._back: deque[int] = deque()  # slots of blocks whose arrays have gone
        self._held = 0

    def returned(self) -> list[int]:
        """Slots of blocks that the worker may use again and that were not returned yet."""
        slots = [self._back.popleft() for _ in range(len(self._back))]
        self._held -= len(slots)
        return slots

    def unpack(self, batch: PackedBatch, fd: int = -1) -> Any:
        """The batch, its arrays over the worker's memory. fd: the block's, which is closed, if that is new here."""
        slot, new, leaves, content = batch
        lease = None
        if slot is not None:
            if new is not None:
                self._blocks[slot] = Block.adopt(fd, *new)
                self._blocks[slot].close()  # the mapping is all that is needed
            lease = Lease(self._blocks[slot])
            weakref.finalize(lease, self._back.append, slot).atexit = False
            self._held += 1
        copied = self._held - len(self._back) > _HELD
        return _Unpickler(content, leaves, lease, copied).load()


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


# -- what workers start with


class PayloadLayout(NamedTuple):
    """What lies where in a payload: the pickle first, then arrays, each (offset, bytes, read-only)."""

    pickled: int
    arrays: list[tuple[int, int, bool]]


class Payload:
    """The pickled configuration of workers, laid out for shared memory.

    needs_script: whether the user's script defines a part of it

    Raises: ArgumentError, with the reason as its cause, if it cannot be pickled.
    """

    def __init__(self, content: Any) -> None:
        buffers: list[memoryview] = []
        file = io.BytesIO()

        def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= _LARGE:
                buffers.append(raw)
            return raw.nbytes < _LARGE

        try:
            _PayloadPickler(file, protocol=5, buffer_callback=keep_in_pickle).dump(content)
        except Exception as error:  # a __reduce__ of the user's may raise anything
            raise ArgumentError(
                f"num_workers: the dataset, collate_fn or worker_init_fn cannot be sent to a worker process: {error}."
                " What is sent must be picklable: functions and classes of a module, no lambdas and no open files"
            ) from error
        pickled = file.getvalue()
        self.needs_script = _SCRIPT in pickled
        self._pieces, arrays, end = [(0, memoryview(pickled))], [], len(pickled)
        for raw in buffers:
            start = _aligned(end)
            end = start + raw.nbytes
            self._pieces.append((start, raw))
            arrays.append((start, raw.nbytes, raw.readonly))
        self.layout, self._nbytes = PayloadLayout(len(pickled), arrays), end
        self._block: Block | None = None

    def allocate(self, previous: Payload | None = None) -> Block:
        """The shared memory that `write` will put it into: that of `previous`, if that holds the same, byte for byte.

        So workers of a next pass start in half the time (benchmarks/dataloader.py, "start").
        """
        block = previous._block if previous is not None and previous.layout == self.layout else None
        if block is not None and self._lies_in(block):
            self._pieces = []
        else:
            block = Block.create(self._nbytes)
        self._block = block
        return block

    def write(self) -> None:
        """Writes it, if it does not lie there."""
        assert self._block is not None
        for at, piece in self._pieces:
            while piece:  # by the system: through the mapping, each page would be a fault
                written = os.pwrite(self._block.fileno(), piece, at)
                piece, at = piece[written:], at + written
        self._pieces = []

    def _lies_in(self, block: Block) -> bool:
        start = _address(block.array(np.uint8, self._nbytes))
        pieces = ((at, np.frombuffer(piece, np.uint8)) for at, piece in self._pieces)
        return not any(_memcmp(start + at, _address(piece), piece.nbytes) for at, piece in pieces)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def load_payload(fd: int, layout: PayloadLayout) -> Any:
    """The content of the payload behind a descriptor, which is closed."""
    whole = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    os.close(fd)
    pieces = [(whole[start : start + size], read_only) for start, size, read_only in layout.arrays]
    buffers = [piece.toreadonly() if read_only else piece for piece, read_only in pieces]
    return pickle.loads(whole[: layout.pickled], buffers=buffers)


class _PayloadPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.memmap and obj.flags.c_contiguous and obj.size:
            found = _memmap_arguments(obj)
            if found is not None:
                return np.memmap, found
        return NotImplemented


def _memmap_arguments(array: np.memmap[Any, Any]) -> tuple[Any, ...] | None:
    """By what another process maps the same part of the file; None if that is not known."""
    whole: Any = array
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    if not isinstance(whole.base, mmap.mmap) or whole.filename is None:
        return None
    # A view's own `offset` is that of what it was made from.
    distance = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    mode = "r+" if whole.mode == "w+" else whole.mode
    return str(whole.filename), array.dtype, mode, whole.offset + distance, array.shape
