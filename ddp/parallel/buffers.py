"""Broadcasts one rank's buffers, because buffers such as the running statistics of batch norm differ between ranks.

All buffers of a model on one device are sent in one call: they are copied into one array of bytes, and then back. If a
backward starts the broadcast, the graph may still read the buffers. Then the next forward copies the values back.
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
# Alignment of each buffer in bytes.
_STEP = 16


class BufferSync:
    """Broadcasts the buffers of one module."""

    def __init__(self, comm: Communicator, module: Module) -> None:
        self._comm = comm
        self._module = module
        self._memory: dict[device, Array] = {}
        self._pending: list[tuple[Tensor, Array]] = []  # (buffer, received values), not copied yet

    def run(self, source: int = 0) -> None:
        """Broadcasts the buffers of rank `source`; `take` copies them into this rank's buffers. Collective."""
        groups: dict[device, list[Tensor]] = {}
        # Listed each time: a module may have replaced a buffer by another tensor.
        for tensor in () if self._comm.size == 1 else self._module.buffers():
            groups.setdefault(tensor.device, []).append(tensor)
        pending: list[tuple[Tensor, Array]] = []
        fresh = not self._pending  # otherwise the memory holds received values, which are newer than the buffers
        for target, tensors in groups.items():
            flat, parts = self._flat(target, tensors)
            if self._comm.rank != source:
                pending += zip(tensors, parts, strict=True)
            elif fresh:
                for part, tensor in zip(parts, tensors, strict=True):
                    part[...] = tensor.array
            self._comm.broadcast(flat, source)
        self._pending = pending

    def coming(self) -> list[tuple[Tensor, Array]]:
        """Lists (buffer, received values) for the buffers into which `take` has not copied yet."""
        return list(self._pending)

    def take(self) -> None:
        """Copies the received values into this rank's buffers."""
        for tensor, part in self._pending:
            tensor.array[...] = part
            tensor.version.count += 1
        self._pending = []

    def _flat(self, target: device, tensors: Sequence[Tensor]) -> tuple[Array, list[Array]]:
        """One array of bytes for these tensors, and its views with their shapes and dtypes."""
        arrays = [tensor.array for tensor in tensors]
        starts = np.cumsum([0, *(-(-array.nbytes // _STEP) * _STEP for array in arrays)]).tolist()
        flat = self._memory.get(target)
        if flat is None or flat.size != starts[-1]:
            flat = self._memory[target] = target.xp.zeros(starts[-1], np.uint8)
        parts = [
            flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]
        return flat, parts
