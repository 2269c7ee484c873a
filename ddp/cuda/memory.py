"""GPU memory, under PyTorch's names: statistics, peaks, limits, and the choice of an allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp._cuda import ipc, memory_pool, stream_order
from ddp._cuda.memory_pool import allocator, human
from ddp._device import found_cupy
from ddp.cuda._devices import DeviceLike, _cupy, _index
from ddp.errors import ArgumentError
from ddp.errors import OutOfMemoryError as OutOfMemoryError

__all__ = [
    "OutOfMemoryError",
    "empty_cache",
    "get_per_process_memory_fraction",
    "ipc_collect",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "set_per_process_memory_limit",
    "use",
]


def _allocator(device: DeviceLike) -> tuple[memory_pool.Allocator, int] | None:
    """The allocator and the number of a device; None without a GPU."""
    cupy = found_cupy()
    return None if cupy is None else (allocator(cupy), _index(device))


def use(which: str | Callable[[int], Any]) -> None:
    """Chooses the allocator of this process, before the first tensor on a GPU.

    which: "pool", the default: CuPy's pool, in which each stream has its own free blocks;
        "async": cudaMallocAsync: all streams share its free memory, which is defragmented, but tensors cannot be
        shared with other processes;
        or a function from bytes to a `cupy.cuda.MemoryPointer`, such as RMM's

    Raises: ArgumentError for anything else; DeviceError after the first tensor if another allocator is in use, without
    a GPU, inside of `cupy.cuda.using_allocator`, or if the GPU has no cudaMallocAsync.
    """
    cupy = _cupy()
    memory_pool.use(cupy, which)


def empty_cache() -> None:
    """Frees cached memory on every device that was used; does nothing without a GPU.

    This helps other processes. This process frees cached memory by itself before an allocation fails.
    """
    cupy = found_cupy()
    if cupy is None:
        return
    current = allocator(cupy)
    for index in current.used_devices():
        with cupy.cuda.Device(index):
            current.release()


def ipc_collect() -> None:
    """Frees tensors that were sent to other processes or received from them, and are no longer used.

    This also happens whenever a tensor is sent, and when the device is full. So call it only after the last tensor was
    sent or received.
    """
    stream_order.collect()  # received tensors
    ipc.exported.collect()


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes of all arrays on the device, each rounded up to a multiple of 512; 0 without a GPU.

    If the user gave a function as the allocator, only arrays in the memory of CUDA graphs are counted.
    """
    target = _allocator(device)
    return 0 if target is None else target[0].allocated_and_reserved(target[1])[0]


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes that CUDA gave this process for arrays: allocated and cached ones; 0 without a GPU.

    If the user gave a function as the allocator, only the memory of CUDA graphs is counted.
    """
    target = _allocator(device)
    return 0 if target is None else target[0].allocated_and_reserved(target[1])[1]


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The peak of `memory_allocated` since `reset_peak_memory_stats`; 0 without a GPU.

    Before the first call of `reset_peak_memory_stats`, the peak is updated only when the pool grows, and may be too
    low: to count every array costs time. The same always holds for allocations during a capture. With another allocator
    than "pool", arrays that were allocated and freed since `reset_peak_memory_stats` are not counted.
    """
    target = _allocator(device)
    return 0 if target is None else target[0].peak(target[1])


def max_memory_reserved(device: DeviceLike = None) -> int:
    """The peak of `memory_reserved` since `reset_peak_memory_stats`; 0 without a GPU.

    With another allocator than "pool", only the memory of CUDA graphs raises the peak.
    """
    target = _allocator(device)
    return 0 if target is None else target[0].of(target[1]).reserved_peak


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Resets the peaks to the present values.

    After the first call, the allocator "pool" counts every allocation outside of captures, which costs 0.2 us for each.
    """
    target = _allocator(device)
    if target is not None:
        target[0].reset_peaks(target[1])


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """Counts and bytes under PyTorch's names; 0 for a device that was never used, {} without a GPU.

    num_device_alloc, num_device_free: calls of cudaMalloc and cudaFree, which training usually makes only in its first
        steps; missing with another allocator than "pool"
    num_alloc_retries: how often an allocation was tried again after cached memory was freed
    num_ooms: OutOfMemoryErrors
    allocated_bytes.all.*, reserved_bytes.all.*: see memory_allocated and memory_reserved, and their peaks
    """
    target = _allocator(device)
    return {} if target is None else target[0].statistics(target[1])


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total bytes of the device, over all processes. Raises: DeviceError without a GPU."""
    cupy = _cupy()
    with cupy.cuda.Device(_index(device)):
        free, total = cupy.cuda.runtime.memGetInfo()
    return int(free), int(total)


def set_per_process_memory_limit(nbytes: int | None, device: DeviceLike = None) -> None:
    """Limits the bytes that this process reserves for arrays on the device; None: no limit.

    An allocation beyond the limit raises OutOfMemoryError, even if the device has free memory.

    Raises: ArgumentError if nbytes is not a positive integer or None; DeviceError without a GPU, or with another
    allocator than "pool".
    """
    if nbytes is not None and (type(nbytes) is not int or nbytes <= 0):
        raise ArgumentError(f"set_per_process_memory_limit({nbytes!r}): expected a positive number of bytes, or None")
    cupy = _cupy()
    allocator(cupy).set_limit(_index(device), nbytes)


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Limits this process to a fraction of the device's memory; 1: no limit. See `set_per_process_memory_limit`.

    Raises: ArgumentError if the fraction is not in [0, 1]; DeviceError without a GPU, or with another allocator than
    "pool".
    """
    if not 0 <= fraction <= 1:
        raise ArgumentError(f"set_per_process_memory_fraction({fraction}): expected a number in [0, 1]")
    total = mem_get_info(device)[1]
    cupy = _cupy()
    allocator(cupy).set_limit(_index(device), None if fraction == 1 else int(fraction * total))


def get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    """The fraction of the device's memory that this process may reserve; 1 without a limit."""
    target = _allocator(device)
    limit = None if target is None else target[0].of(target[1]).limit
    return 1.0 if limit is None else limit / mem_get_info(device)[1]


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """A table of the memory statistics; "" without a GPU. abbreviated: without the counts of calls

    The device's free memory is missing if the device was never used.
    """
    target = _allocator(device)
    if target is None:
        return ""
    current, index = target
    stats = memory_stats(index)
    title = f"cuda:{index}, memory by {current.name!r}"
    if index in current.used_devices():
        free, total = mem_get_info(index)
        title += f": {human(free)} of {human(total)} free"
    lines = [title]
    lines += [f"  {name:<30} {human(stats[name]):>12}" for name in stats if "bytes" in name]
    if not abbreviated:
        lines += [f"  {name:<30} {stats[name]:>12}" for name in stats if name.startswith("num_")]
    return "\n".join(lines)
