"""The device that this process computes on, whatever its kind: a CUDA device, as far as CuPy finds one."""

from __future__ import annotations

from ddp import cuda
from ddp._device import device
from ddp.cuda import current_device as current_device_index
from ddp.cuda import (
    current_stream,
    device_count,
    empty_cache,
    get_device_capability,
    is_available,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
    set_stream,
    synchronize,
)
from ddp.cuda import device as device_index
from ddp.cuda import set_device as set_device_index

__all__ = [
    "current_accelerator",
    "current_device_index",
    "current_stream",
    "device_count",
    "device_index",
    "empty_cache",
    "get_device_capability",
    "is_available",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_device_index",
    "set_stream",
    "synchronize",
]


def current_accelerator(check_available: bool = False) -> device | None:
    """The kind of device that there is besides the CPU: device("cuda"), or None without one."""
    return device("cuda") if cuda.is_available() else None
