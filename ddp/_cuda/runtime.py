"""What `ddp._device` needs of the CUDA runtime, under the names that it calls."""

from __future__ import annotations

from typing import Any

from ddp._cuda import memory_pool
from ddp._cuda.array_interface import import_array_interface
from ddp._cuda.copies import across, down, up
from ddp._cuda.cuda_errors import attribute_to_op, blocking, translate
from ddp._cuda.device_checks import raise_pending
from ddp._cuda.stream_order import StreamGuard, current, default, hold, record, sweep, take_over

__all__ = [
    "StreamGuard",
    "across",
    "attribute_to_op",
    "blocking",
    "current",
    "default",
    "down",
    "hold",
    "import_array_interface",
    "prepare",
    "raise_pending",
    "record",
    "sweep",
    "take_over",
    "translate",
    "up",
]


def prepare(cupy: Any) -> None:
    """Called before the first array of a process is made on a GPU."""
    memory_pool.allocator(cupy)
