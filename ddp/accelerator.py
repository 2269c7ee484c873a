"""PyTorch's functions for an accelerator of any type. Here the accelerator is a CUDA device, if CuPy finds one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp import _device, cuda

if TYPE_CHECKING:
    from ddp.cuda import *
    from ddp.cuda import current_device as current_device_index
    from ddp.cuda import device as device_index
    from ddp.cuda import set_device as set_device_index
else:
    current_device_index = cuda.current_device
    device_index = cuda.device
    set_device_index = cuda.set_device
    _SAME = (
        "current_stream device_count empty_cache get_device_capability is_available max_memory_allocated memory_stats "
        "max_memory_reserved memory_allocated memory_reserved reset_peak_memory_stats set_stream synchronize"
    )
    globals().update({name: getattr(cuda, name) for name in _SAME.split()})
    __all__ = sorted(
        [*_SAME.split(), "current_accelerator", "current_device_index", "device_index", "set_device_index"]
    )


def current_accelerator(check_available: bool = False) -> _device.device | None:
    """Returns device("cuda") if there is a GPU, otherwise None. check_available: changes nothing"""
    return _device.device("cuda") if cuda.is_available() else None
