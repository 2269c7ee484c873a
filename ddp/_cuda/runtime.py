"""What `ddp._device` needs of the CUDA runtime, under the names that it calls."""

from __future__ import annotations

from typing import Any

from ddp._cuda import memory_pool
from ddp._cuda.array_interface import import_array_interface as import_array_interface
from ddp._cuda.copies import across as across
from ddp._cuda.copies import down as down
from ddp._cuda.copies import up as up
from ddp._cuda.cuda_errors import attribute_to_op as attribute_to_op
from ddp._cuda.cuda_errors import blocking as blocking
from ddp._cuda.cuda_errors import translate as translate
from ddp._cuda.device_checks import raise_pending as raise_pending
from ddp._cuda.stream_order import StreamGuard as StreamGuard
from ddp._cuda.stream_order import current as current
from ddp._cuda.stream_order import default as default
from ddp._cuda.stream_order import hold as hold
from ddp._cuda.stream_order import record as record
from ddp._cuda.stream_order import sweep as sweep
from ddp._cuda.stream_order import take_over as take_over


def prepare(cupy: Any) -> None:
    """Called before the first array of a process is made on a GPU."""
    memory_pool.allocator(cupy)
