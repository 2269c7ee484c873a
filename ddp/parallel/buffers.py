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
        self._memory: dict[Any, Array] = {}  # by device, and dtype of what is averaged
        self._pending: list[tuple[Tensor, Array]] = []  # (buffer, what it is to become)

    def run(self, source: int = 0) -> None:
        """Has the ranks exchange buffers; `take` makes them this rank's. Collective.

        source: the rank whose buffers count
        """
        groups: dict[tuple[Any, Any], list[Tensor]] = {}
        # A module may have put another tensor in a buffer's place.
        for tensor in () if self._comm.size == 1 else self._module.buffers():
            averaged = self._mean and tensor.is_floating_point()
            groups.setdefault((tensor.device, tensor.array.dtype if averaged else None), []).append(tensor)
        pending: list[tuple[Tensor, Array]] = []
        fresh = not self._pending  # else the memory holds what is to become of the buffers
        # Means first, as on every rank.
        for (where, dtype), tensors in sorted(groups.items(), key=lambda group: group[0][1] is None):
            flat, parts = self._flat((where, dtype), tensors)
            if fresh and (dtype is not None or self._comm.rank == source):
                for part, tensor in zip(parts, tensors, strict=True):
                    part[...] = tensor.array
            if dtype is not None:
                self._comm.all_reduce(flat.view(dtype), ReduceOp.MEAN, out=flat.view(dtype))
            else:
                self._comm.broadcast(flat, source)
            if dtype is not None or self._comm.rank != source:
                pending += zip(tensors, parts, strict=True)
        self._pending = pending

    def coming(self) -> list[tuple[Tensor, Array]]:
        """(buffer, what `take` will make it) of those that wait for the next forward."""
        return list(self._pending)

    def take(self) -> None:
        """Makes what was received this rank's buffers."""
        for tensor, part in self._pending:
            tensor.array[...] = part
            tensor.version.count += 1
        self._pending = []

    def _flat(self, key: Any, tensors: Sequence[Tensor]) -> tuple[Array, list[Array]]:
        """One array of bytes for these, and each one's part of it."""
        arrays = [tensor.array for tensor in tensors]
        starts = np.cumsum([0, *(-(-array.nbytes // _STEP) * _STEP for array in arrays)]).tolist()
        flat = self._memory.get(key)
        if flat is None or flat.size != starts[-1]:
            flat = self._memory[key] = tensors[0].device.xp.zeros(starts[-1], np.uint8)
        parts = [
            flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]
        return flat, parts
