"""Buffers, such as the running statistics of batch norm, differ from rank to rank: here they become the same again.

All of a model's buffers on one device go in one call: they are copied into one array of bytes, and back. Where a graph
may still read them (backward comes without a forward before it), the copy back waits for the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import Communicator
from ddp._device import device
from ddp._tensor.core import Tensor
from ddp.nn import Module

Array = Any
_STEP = 16  # bytes; where each buffer may begin


class BufferSync:
    """module's buffers become rank 0's."""

    def __init__(self, comm: Communicator, module: Module) -> None:
        self._comm = comm
        self._module = module
        self._memory: dict[device, Array] = {}
        self._pending: list[tuple[Tensor, Array]] = []  # (buffer, what it is to become)

    def run(self, source: int = 0) -> None:
        """Has the ranks exchange buffers; `take` makes them this rank's. Collective.

        source: the rank whose buffers count
        """
        groups: dict[device, list[Tensor]] = {}
        # A module may have put another tensor in a buffer's place.
        for tensor in () if self._comm.size == 1 else self._module.buffers():
            groups.setdefault(tensor.device, []).append(tensor)
        pending: list[tuple[Tensor, Array]] = []
        fresh = not self._pending  # else the memory holds what is to become of the buffers
        for where, tensors in groups.items():
            flat, parts = self._flat(where, tensors)
            if self._comm.rank != source:
                pending += zip(tensors, parts, strict=True)
            elif fresh:
                for part, tensor in zip(parts, tensors, strict=True):
                    part[...] = tensor.array
            self._comm.broadcast(flat, source)
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

    def _flat(self, where: device, tensors: Sequence[Tensor]) -> tuple[Array, list[Array]]:
        """One array of bytes for these, and each one's part of it."""
        arrays = [tensor.array for tensor in tensors]
        starts = np.cumsum([0, *(-(-array.nbytes // _STEP) * _STEP for array in arrays)]).tolist()
        flat = self._memory.get(where)
        if flat is None or flat.size != starts[-1]:
            flat = self._memory[where] = where.xp.zeros(starts[-1], np.uint8)
        parts = [
            flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]
        return flat, parts
