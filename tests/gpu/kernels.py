"""`cupy.RawKernel`: our own CUDA sources, made for the CPU by the emulator of `tests/ddp/cuda`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ddp.cuda import emulation
from tests.gpu.arrays import Array

if TYPE_CHECKING:
    from tests.gpu.standin import Cupy

_one_at_a_time = threading.RLock()  # the emulator's threads and blocks are global


def passed(where: str, kind: str, x: Any) -> Any:
    """What a kernel gets for an argument of CuPy's, as the emulator takes it. Raises: where CuPy would raise.

    Fails: where the bytes that CuPy passes are not those that the kernel reads.
    """
    if isinstance(x, Array):
        assert kind.endswith("*"), f"{where}: an array"
        return x._host
    if isinstance(x, np.ndarray):
        raise TypeError(f"You are trying to pass a numpy.ndarray of shape {x.shape} as a kernel parameter.")
    if not isinstance(x, bool | int | float | np.generic):
        raise TypeError(f"Unsupported type {type(x)}")
    if kind.endswith("*"):
        assert x == 0, f"{where}: {x}"
    expected = {"double": np.float64}.get(kind, np.int64)
    assert np.asarray(x).dtype == expected, f"{where}: passed as {np.asarray(x).dtype}"
    return np.asarray(x)[()]


def raw(cupy: Cupy) -> type:
    """RawKernel."""

    class RawKernel:
        def __init__(self, code: str, name: str, options: tuple[str, ...] = (), **kwargs: Any) -> None:
            self.code = code
            self.name = name
            self.options = options
            self._kernel = emulation.RawKernel(code, name, options)
            self._loaded: set[int] = set()  # on which devices

        def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0, **kwargs: Any) -> None:
            held: list[Any] = [arg for arg in args if isinstance(arg, Array)]
            kinds = self._kernel._kinds
            hosts = [passed(f"{self.name}: {kind}", kind, x) for kind, x in zip(kinds, args, strict=True)]
            kernel = self._kernel
            _ = self.kernel

            def run() -> None:
                with _one_at_a_time:
                    kernel(grid, block, hosts)

            cupy._launch(self.name, run, held)

        def compile(self, log_stream: Any = None) -> None:
            self._loaded.clear()
            self._load()

        @property
        def kernel(self) -> Any:
            """As it was loaded on the current device."""
            if cupy.local.device not in self._loaded:
                self._load()
            return self._kernel

        def _load(self) -> None:
            cupy.captures.unsafe("cuModuleLoadData")
            self._loaded.add(cupy.local.device)

    return RawKernel
