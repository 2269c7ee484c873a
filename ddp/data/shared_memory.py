"""Memory that a loader shares with its workers: for their batches, and for the dataset that they start with.

A worker takes one of its blocks, collates arrays into it, and sends the block's descriptor once; the consumer maps the
block and makes arrays over the same memory. The containers of the arrays (tuples, dicts, objects of the user's classes)
are pickled with a number in the place of each array. When the last array over a block is freed, the block's `Lease`
ends, and the worker may use the block again. So neither side allocates or faults pages in for each batch.

The dataset and functions are pickled into one block, with large arrays behind the pickle. Every worker maps it for
itself: workers share its pages as long as they only read. A page that a worker writes becomes its own, as after a fork.
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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ddp._block import Array, Block, block_of
from ddp._device import CPU
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import bfloat16
from ddp.errors import ArgumentError

_GRAIN = 1 << 16  # bytes: block sizes are multiples of this, so that batches of similar sizes can use the same block
_ALIGNMENT = 64  # bytes: a cache line
_HELD = 32  # maximum number of blocks of one worker that the consumer keeps; beyond that, it copies batches

_LARGE = 4096  # bytes: a dataset's arrays are stored after the pickle if they have at least this size
_SCRIPT = b"\x8c\x08__main__"  # how a pickle refers to the user's script

# NumPy's `==` would write one byte for each byte that it compares.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Lease:
    """An object that all arrays over a block keep alive. `weakref.finalize` calls back when the last array is freed.

    The callback may run in any thread, whenever the garbage collector runs, so it must do very little.
    """

    __slots__ = ("__weakref__",)


class PackedBatch(NamedTuple):
    """A batch as it is sent. slot: the slot of its block in the worker; None: the batch has no arrays

    new: size of the block (bytes) if its descriptor is sent along, otherwise 0
    leaves: for each array its offset in the block, its dtype and shape, and whether it is that of a tensor
    content: the pickle of the batch without the arrays
    """

    slot: int | None
    new: int
    leaves: list[tuple[int, str, tuple[int, ...], bool]]
    content: bytes


class BatchWriter:
    """The worker's side: allocates memory for batches, and packs them for sending.

    Blocks have numbers, their slots. If a block has become too small, a larger one takes its slot, here and in the
    consumer.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._free: list[int] = []
        self._slot: int | None = None  # the block of the batch that is being made
        self._used = 0  # bytes in use in the block `_slot`
        self._usual = 0  # bytes of the largest batch so far

    def begin(self, returned: Iterable[int] = ()) -> None:
        """Prepares for the next batch. returned: slots of batches that the consumer no longer uses"""
        if self._slot is not None:
            self._free.append(self._slot)
        self._slot = None
        self._used = 0
        self._free += returned

    def _take(self, nbytes: int) -> int:
        """Takes a free block of at least `nbytes` bytes, or creates one, and returns its slot."""
        slot = self._free.pop() if self._free else len(self._blocks)
        if slot == len(self._blocks) or self._blocks[slot].nbytes < nbytes:
            self._blocks[slot : slot + 1] = [Block.create(max(1, -(-nbytes // _GRAIN)) * _GRAIN)]
        return slot

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Returns an uninitialized array for the batch, in the block if it fits there."""
        if self._slot is None and self._usual:
            self._slot = self._take(self._usual)
        start = _aligned(self._used)
        end = start + math.prod(shape) * np.dtype(dtype).itemsize
        if self._slot is None or end > self._blocks[self._slot].nbytes:
            return np.empty(shape, dtype)
        self._used = end
        return self._blocks[self._slot].array(dtype, shape, start)

    def pack(self, batch: Any) -> tuple[PackedBatch, list[int]]:
        """Packs a batch. Returns it, and the descriptors to send with it, which the caller closes afterwards.

        Raises: the error of pickling, of any class, for an object that cannot be pickled; SharingError if the system
        provides no memory.
        """
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(batch)
        if not pickler.arrays:
            return PackedBatch(None, 0, [], file.getvalue()), []
        starts = self._placed([array for array, _ in pickler.arrays])
        self._usual = max(self._usual, self._used)
        slot = self._slot
        self._slot = None
        assert slot is not None
        leaves = [
            (start, array.dtype.name if array.dtype.kind == "V" else array.dtype.str, array.shape, is_tensor)
            for start, (array, is_tensor) in zip(starts, pickler.arrays, strict=True)
        ]
        block = self._blocks[slot]
        if block.closed:
            return PackedBatch(slot, 0, leaves, file.getvalue()), []
        fd = os.dup(block.fileno())
        block.close()  # the mapping is all that is needed here, once the consumer has a descriptor
        return PackedBatch(slot, block.nbytes, leaves, file.getvalue()), [fd]

    def _placed(self, arrays: list[Array]) -> list[int]:
        """Returns the arrays' offsets in the block. If one is stored elsewhere, all are copied into a block first."""
        blocks = [block_of(array) for array in arrays if self._slot is not None and array.flags.c_contiguous]
        starts = [start for block, start in filter(None, blocks) if block is self._blocks[self._slot or 0]]
        if len(starts) == len(arrays):
            return starts
        starts = []
        end = 0
        for array in arrays:
            starts.append(_aligned(end))
            end = starts[-1] + array.nbytes
        slot = self._take(end)
        for array, start in zip(arrays, starts, strict=True):
            self._blocks[slot].array(array.dtype, array.shape, start)[...] = array
        self.begin()  # only now: some of the arrays may be stored in the block that this frees
        self._slot = slot
        self._used = end
        return starts


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.arrays: list[tuple[Array, bool]] = []

    def persistent_id(self, obj: Any) -> int | None:
        is_tensor = type(obj) is Tensor
        if is_tensor and (obj.edge is not None or obj.device is not CPU):
            return None  # its own method pickles it, or raises an error
        array = obj.array if is_tensor else obj
        if type(array) is not np.ndarray or array.dtype.hasobject:
            return None
        if array.dtype.kind == "V" and array.dtype != bfloat16:
            return None
        self.arrays.append((array, is_tensor))
        return len(self.arrays) - 1


class BatchReader:
    """The consumer's side of one worker's batches."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}  # by slot
        self._back: deque[int] = deque()  # slots of blocks whose arrays are freed
        self._held = 0

    def returned(self) -> list[int]:
        """Slots of blocks that the worker may use again and that were not returned yet."""
        slots = [self._back.popleft() for _ in range(len(self._back))]
        self._held -= len(slots)
        return slots

    def unpack(self, batch: PackedBatch, fd: int = -1) -> Any:
        """Returns the batch. fd: of a block that is new here; it is closed.

        Its arrays are views of the worker's block, or copies if the consumer holds more than `_HELD` blocks.
        """
        slot, new, leaves, content = batch
        lease = Lease()
        if slot is not None:
            if new:
                self._blocks[slot] = Block.adopt(fd, "", new)
                self._blocks[slot].close()  # the mapping is all that is needed
            weakref.finalize(lease, self._back.append, slot).atexit = False
            self._held += 1
        unpickler = _Unpickler(io.BytesIO(content))
        unpickler.load_array = lambda number: self._array(slot, lease, *leaves[number])
        return unpickler.load()

    def _array(self, slot: Any, lease: Lease, offset: int, dtype: str, shape: tuple[int, ...], is_tensor: bool) -> Any:
        array = self._blocks[slot].array(dtype, shape, offset, keep=lease)
        if self._held - len(self._back) > _HELD:
            array = array.copy()
        return wrap(array, CPU) if is_tensor else array


class _Unpickler(pickle.Unpickler):
    load_array: Callable[[int], Any]

    def persistent_load(self, pid: int) -> Any:
        return self.load_array(pid)

    def find_class(self, module: str, name: str) -> Any:
        # In a worker the user's script is the module __mp_main__.
        return super().find_class("__main__" if module == "__mp_main__" else module, name)


# -- the configuration with which workers start


#: The layout of a payload: the size of the pickle, which comes first; for each array (offset, size, read-only).
Layout = tuple[int, list[tuple[int, int, bool]]]


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
        self._pieces = [(0, memoryview(pickled))]
        arrays = []
        end = len(pickled)
        for raw in buffers:
            start = _aligned(end)
            end = start + raw.nbytes
            self._pieces.append((start, raw))
            arrays.append((start, raw.nbytes, raw.readonly))
        self._nbytes = end
        self.layout = (len(pickled), arrays)
        self._block: Block | None = None

    def share_memory_of(self, previous: Payload | None) -> bool:
        """Uses the memory of `previous` if that payload is in memory and has the same bytes. Returns False if not.

        So the dataset is not written again for the workers of the next pass.
        """
        if previous is None or previous._block is None or previous.layout != self.layout:
            return False
        start = _address(previous._block.array(np.uint8, self._nbytes))
        pieces = ((offset, np.frombuffer(piece, np.uint8)) for offset, piece in self._pieces)
        if any(_memcmp(start + offset, _address(piece), piece.nbytes) for offset, piece in pieces):
            return False
        self._block = previous._block
        self._pieces = []
        return True

    def allocate(self) -> Block:
        """Returns the block of shared memory that `write` writes to; creates it if there is none.

        Raises: SharingError if the system provides no memory.
        """
        self._block = self._block or Block.create(self._nbytes)
        return self._block

    def write(self) -> None:
        """Writes the payload to its block, unless it is there already."""
        assert self._block is not None
        for offset, piece in self._pieces:
            while piece:  # with pwrite: through the mapping, each page would cause a page fault
                written = os.pwrite(self._block.fileno(), piece, offset)
                piece = piece[written:]
                offset = offset + written
        self._pieces = []


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def load_payload(fd: int, layout: Layout) -> Any:
    """Loads the content of the payload whose block is `fd`, and closes `fd`."""
    whole = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    os.close(fd)
    pieces = [(whole[start : start + size], read_only) for start, size, read_only in layout[1]]
    buffers = [piece.toreadonly() if read_only else piece for piece, read_only in pieces]
    return pickle.loads(whole[: layout[0]], buffers=buffers)


class _PayloadPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Pickles a mapped array as the path of its file, which is mapped again; other arrays as their content."""
        if type(obj) is not np.memmap or not obj.flags.c_contiguous or not obj.size:
            return NotImplemented
        whole: Any = obj
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        if not isinstance(whole.base, mmap.mmap) or whole.filename is None:
            return NotImplemented
        # A view has the `offset` of its base.
        offset = whole.offset + _address(obj) - _address(whole)
        return np.memmap, (
            str(whole.filename),
            obj.dtype,
            "r+" if whole.mode == "w+" else whole.mode,
            offset,
            obj.shape,
        )
