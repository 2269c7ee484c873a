"""Buffers, such as the running statistics of batch norm, differ from rank to rank: here they become the same again.

All of a model's buffers on one device go in one call: they are copied into one array of bytes, and back. Where a graph
may still read them (backward comes without a forward before it), the copy back waits for the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp
from ddp._tensor.core import Tensor
from ddp.nn import Module

Array = Any
_STEP = 16  # bytes; where each buffer may begin


class BufferSync:
    """module's buffers become rank 0's, or with `mean` the mean of all ranks' (whole numbers stay rank 0's)."""

    def __init__(self, comm: Communicator, module: Module, mean: bool) -> None:
        self._comm = comm
        self._module = module
        self._mean = mean
        self._rooms: dict[Any, Array] = {}
        self._waiting: list[tuple[Array, Tensor]] = []  # what has come, and which buffer it is to become

    def run(self, source: int = 0) -> None:
        """Has the ranks exchange buffers; `take` makes them this rank's. Collective.

        source: the rank whose buffers count
        """
        # A module may have put another tensor in a buffer's place.
        tensors = [] if self._comm.size == 1 else list(self._module.buffers())
        averaged = [tensor for tensor in tensors if self._mean and tensor.is_floating_point()]
        rest = [tensor for tensor in tensors if not (self._mean and tensor.is_floating_point())]
        came: list[tuple[Array, Tensor]] = []
        fresh = not self._waiting  # else the rooms hold what is to become of the buffers
        for where, dtype in dict.fromkeys((tensor.device, tensor.array.dtype) for tensor in averaged):
            alike = [tensor for tensor in averaged if tensor.device is where and tensor.array.dtype == dtype]
            flat, parts = self._room((where, dtype), alike)
            if fresh:
                _fill(parts, alike)
            self._comm.all_reduce(flat.view(dtype), ReduceOp.MEAN, out=flat.view(dtype))
            came += zip(parts, alike, strict=True)
        for where in dict.fromkeys(tensor.device for tensor in rest):
            here = [tensor for tensor in rest if tensor.device is where]
            flat, parts = self._room((where, None), here)
            if self._comm.rank == source and fresh:
                _fill(parts, here)
            self._comm.broadcast(flat, source)
            if self._comm.rank != source:
                came += zip(parts, here, strict=True)
        self._waiting = came

    def coming(self) -> list[tuple[Tensor, Array]]:
        """(buffer, what `take` will make it) of those that wait for the next forward."""
        return [(tensor, part) for part, tensor in self._waiting]

    def take(self) -> None:
        """Makes what has come this rank's buffers."""
        for part, tensor in self._waiting:
            tensor.array[...] = part
            tensor.version.count += 1
        self._waiting = []

    def _room(self, key: Any, tensors: Sequence[Tensor]) -> tuple[Array, list[Array]]:
        """One array of bytes for these, and each one's part of it."""
        arrays = [tensor.array for tensor in tensors]
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
        part[...] = tensor.array
