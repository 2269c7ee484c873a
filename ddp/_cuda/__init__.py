"""Everything that knows a GPU: runtime, streams, memory, graphs, libraries, kernels, and the device forms of ops.

`register` attaches the device forms; nothing else in `ddp` asks whether an array is on a GPU. This package is loaded
when CuPy is first used: a process without a GPU imports these few lines and no more.

    stream_order, copies, capture, memory_pool, ipc, array_interface, cuda_errors, device_checks   the CUDA runtime
    raw_kernel, array_table, *_kernels                                                            kernels of our own
    gemm, cublaslt; cudnn_graph, cudnn_convolution, cudnn_attention                               NVIDIA's libraries
    array_forms                                                         forms made of CuPy's own functions
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from typing import Any

from ddp import _device

_lock = threading.Lock()


def load() -> Any:
    """Attaches the device forms of all ops, once in a process, and returns this package; compiles nothing."""
    with _lock:  # so that no two threads begin it
        return _load_modules()


@functools.cache
def _load_modules() -> Any:
    for name in ("register", "optimizer_kernels", "array_interface", "copies", "memory_pool"):
        importlib.import_module(f"ddp._cuda.{name}")
    return sys.modules[__name__]


def install() -> None:
    """Has `_device` call `load` when CuPy is first used."""
    _device.load_runtime[:] = [load]
