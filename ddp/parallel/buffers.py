"""Buffers, such as the running statistics of batch norm, differ from rank to rank: here they become the same again.

All of a model's buffers go in one call: they are copied into one array of bytes, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp
from ddp._tensor.core import Tensor

Array = Any
_STEP = 16  # bytes; where each buffer may begin


class BufferSync:
    """module's buffers become rank 0's, or with `mean` the mean of all ranks' (whole numbers stay rank 0's)."""

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor], mean: bool) -> None:
        self._comm = comm
        self._mean = mean
        self._rooms: dict[Any, Array] = {}
        self._tensors = list(tensors)

    def run(self, source: int = 0) -> None:
        """Collective. source: the rank whose buffers count."""
        if self._comm.size == 1 or not self._tensors:
            return
        averaged = [tensor for tensor in self._tensors if self._mean and tensor.is_floating_point()]
        rest = [tensor for tensor in self._tensors if not (self._mean and tensor.is_floating_point())]
        for dtype in dict.fromkeys(tensor._array.dtype for tensor in averaged):
            alike = [tensor for tensor in averaged if tensor._array.dtype == dtype]
            flat, parts = self._room(dtype, alike)
            _fill(parts, alike)
            self._comm.all_reduce(flat.view(dtype), ReduceOp.MEAN, out=flat.view(dtype))
            _take(parts, alike)
        if rest:
            flat, parts = self._room("rest", rest)
            if self._comm.rank == source:
                _fill(parts, rest)
            self._comm.broadcast(flat, source)
            if self._comm.rank != source:
                _take(parts, rest)

    def _room(self, key: Any, tensors: Sequence[Tensor]) -> tuple[Array, list[Array]]:
        """One array of bytes for these, and each one's part of it."""
        arrays = [tensor._array for tensor in tensors]
        starts = np.cumsum([0, *(-(-array.nbytes // _STEP) * _STEP for array in arrays)]).tolist()
        flat = self._rooms.get(key)
        if flat is None or flat.size != starts[-1]:
            flat = self._rooms[key] = tensors[0].device.xp.zeros(starts[-1], np.uint8)
        parts = [
            flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]
        return flat, parts


def _fill(parts: Sequence[Array], tensors: Sequence[Tensor]) -> None:
    for part, tensor in zip(parts, tensors, strict=True):
        part[...] = tensor._array


def _take(parts: Sequence[Array], tensors: Sequence[Tensor]) -> None:
    for part, tensor in zip(parts, tensors, strict=True):
        tensor._array[...] = part
        tensor._version.count += 1
