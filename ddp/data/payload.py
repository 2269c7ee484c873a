"""The pickled dataset and functions that all workers of a loader start with.

Large arrays are not pickled but laid behind the pickle in a block of shared memory. Every worker maps it privately:
workers share its pages as long as they only read, and what one writes it has for itself, as after a fork.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
from typing import Any, NamedTuple

import numpy as np

from ddp._block import Block
from ddp.errors import ArgumentError

_ALIGNMENT = 64  # bytes
_LARGE = 4096  # bytes from which on an array is laid behind the pickle
# NumPy would write a byte for each byte that it compares.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_SCRIPT = b"\x8c\x08__main__"  # how a pickle names the module


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
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
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
