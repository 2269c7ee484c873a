"""Code for GPUs: streams, memory, CUDA graphs, NVIDIA's libraries, and the device kernels of ops.

The device kernel of an op is its implementation for CuPy arrays: a Python function that launches our own CUDA kernels,
or calls a library or CuPy's functions. `register` attaches the device kernels, so that ops do not ask whether an array
is on a GPU. `import ddp` imports this file alone. `load` imports the other modules, at the latest when CuPy is first
used.

    stream_order, copies, capture, memory_pool, ipc, array_interface, cuda_errors, device_checks   CUDA runtime
    raw_kernel, array_table, *_kernels except array_kernels                                        our own CUDA kernels
    gemm, cublaslt; cudnn_graph, cudnn_convolution, cudnn_attention                                NVIDIA's libraries
    array_kernels                                                                                  CuPy's functions
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
    """Imports this package's modules, and so attaches the device kernels of ops. Compiles no CUDA kernel.

    Returns: this package, with its modules as attributes
    """
    with _lock:  # `functools.cache` alone would let two threads run the function at the same time
        return _load_modules()


@functools.cache
def _load_modules() -> Any:
    for name in ("register", "optimizer_kernels", "array_interface", "copies", "memory_pool"):
        importlib.import_module(f"ddp._cuda.{name}")
    return sys.modules[__name__]


def install() -> None:
    """Makes `_device` call `load` when CuPy is first used."""
    _device.load_runtime[:] = [load]
