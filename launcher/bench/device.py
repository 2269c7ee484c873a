"""`collectives` on arrays of a GPU: the one module of the bench that speaks to CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives import Communicator
from launcher.bench.contestants import Ours
from launcher.bench.expected import Array


class OursOnDevice(Ours):
    """`collectives` on CuPy arrays. A call returns when it is issued, so a batch ends with its stream."""

    def __init__(self, comm: Communicator) -> None:
        import cupy

        super().__init__(comm)
        self._cupy: Any = cupy

    def empty(self, nbytes: int) -> Any:
        return self._cupy.zeros(nbytes, np.uint8)

    def write(self, buffer: Any, values: Array) -> None:
        buffer[...] = self._cupy.asarray(values)

    def read(self, buffer: Any) -> Array:
        host: Array = self._cupy.asnumpy(buffer)
        return host

    def settle(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()
