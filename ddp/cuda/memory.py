"""Memory of GPUs, under PyTorch's names: what is held and cached, peaks, limits, and who gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp._cuda import ipc, memory_pool, stream_order
from ddp._cuda.memory_pool import allocator, human
from ddp._device import found_cupy
from ddp.cuda._devices import Where, _index, _needed
from ddp.errors import ArgumentError
from ddp.errors import OutOfMemoryError as OutOfMemoryError

__all__ = [
    *("OutOfMemoryError", "empty_cache", "get_per_process_memory_fraction", "ipc_collect", "max_memory_allocated"),
    *("max_memory_reserved", "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats", "memory_summary"),
    *("reset_peak_memory_stats", "set_per_process_memory_fraction", "set_per_process_memory_limit", "use"),
]


def _used(where: Where) -> tuple[Any, int] | None:
    """The allocator and the device; None for a device that is not in use: asking must not create a context there."""
    cupy = found_cupy()
    if cupy is None:
        return None
    index, found = _index(where), allocator(cupy)
    return (found, index) if index in found.counts else None


def use(which: str | Callable[[int], Any]) -> None:
    """Chooses who gives memory, for this process, before the first tensor on a GPU.

    which: "pool", what it is unless chosen: CuPy's pool, in which each stream has its own free blocks; "async":
        cudaMallocAsync, whose free memory serves every stream and is put together from pieces, though it cannot be
        shared with other processes; or a function from bytes to a `cupy.cuda.MemoryPointer`, such as RMM's

    Raises: ArgumentError; DeviceError after the first tensor, or without a GPU, or where a device has no such thing.
    """
    cupy = _needed()
    memory_pool.use(cupy, which)


def empty_cache() -> None:
    """Gives memory that is kept for later back to CUDA, on every device that was used; nothing without a GPU.

    It makes nothing fit that did not: an allocation does this itself before it fails. It helps other processes.
    """
    cupy = found_cupy()
    if cupy is None:
        return
    found = allocator(cupy)
    for index in list(found.counts):
        with cupy.cuda.Device(index):
            found.release()


def ipc_collect() -> None:
    """Drops tensors that were sent to other processes and that none of them uses any more, and received ones.

    Sending a tensor and a full device do this, too; it helps a process that has sent or received its last one.
    """
    stream_order.sweep()  # of tensors that came from other processes
    ipc.exported.sweep()


def memory_allocated(device: Where = None) -> int:
    """Bytes that arrays hold on the device, each rounded up to 512; 0 without a GPU."""
    used = _used(device)
    return 0 if used is None else int(used[0].held(used[1])[0])


def memory_reserved(device: Where = None) -> int:
    """Bytes that CUDA gave this process for arrays: what they hold, and what is kept for later; 0 without a GPU."""
    used = _used(device)
    return 0 if used is None else int(used[0].held(used[1])[1])


def max_memory_allocated(device: Where = None) -> int:
    """The most bytes that arrays held at a time since `reset_peak_memory_stats`; 0 without a GPU.

    Before that was called it is the most when the pool grew, which may be less: to follow each array has its cost.
    """
    used = _used(device)
    return 0 if used is None else int(used[0].peak(used[1]))


def max_memory_reserved(device: Where = None) -> int:
    """The most bytes that CUDA had given this process for arrays since `reset_peak_memory_stats`."""
    used = _used(device)
    return 0 if used is None else int(used[0].of(used[1]).reserved_peak)


def reset_peak_memory_stats(device: Where = None) -> None:
    """Peaks begin anew at what is held now; from here on every allocation is looked at, at 0.2 us each."""
    cupy = found_cupy()
    if cupy is not None:
        allocator(cupy).reset_peaks(_index(device))


def memory_stats(device: Where = None) -> dict[str, int]:
    """Counts and bytes by PyTorch's names; those of the device that was never used are 0, without a GPU {}.

    num_device_alloc, num_device_free: calls of cudaMalloc and cudaFree: a training step makes none once it is warm;
    num_alloc_retries: tries again after the pool gave back what it kept; num_ooms: errors; allocated_bytes.all.* and
    reserved_bytes.all.*: as memory_allocated and memory_reserved. Under "async" CUDA does not report num_device_*, and
    the names are not there.
    """
    cupy = found_cupy()
    return {} if cupy is None else allocator(cupy).statistics(_index(device))


def mem_get_info(device: Where = None) -> tuple[int, int]:
    """What is free on the device, and all it has, in bytes: of all processes. Raises: DeviceError without a GPU."""
    cupy = _needed()
    with cupy.cuda.Device(_index(device)):
        free, total = cupy.cuda.runtime.memGetInfo()
    return int(free), int(total)


def set_per_process_memory_limit(nbytes: int | None, device: Where = None) -> None:
    """Lets this process have that many bytes for arrays on the device, and no more; None: as many as there are.

    Raises: OutOfMemoryError from then on, whatever else is free; ArgumentError unless positive; DeviceError without a
    GPU, or under another allocator than "pool".
    """
    if nbytes is not None and (type(nbytes) is not int or nbytes <= 0):
        raise ArgumentError(f"set_per_process_memory_limit({nbytes!r}): expected a positive number of bytes, or None")
    cupy = _needed()
    allocator(cupy).set_limit(_index(device), nbytes)


def set_per_process_memory_fraction(fraction: float, device: Where = None) -> None:
    """Lets this process have that part of the device's memory for arrays, and no more; 1 lifts the limit.

    Raises: ArgumentError unless in [0, 1]; DeviceError without a GPU.
    """
    if not 0 <= fraction <= 1:
        raise ArgumentError(f"set_per_process_memory_fraction({fraction}): expected a number in [0, 1]")
    total = mem_get_info(device)[1]
    cupy = _needed()
    allocator(cupy).set_limit(_index(device), None if fraction == 1 else int(fraction * total))


def get_per_process_memory_fraction(device: Where = None) -> float:
    """The part of the device's memory that this process may have for arrays; 1 without a limit."""
    used = _used(device)
    limit = None if used is None else used[0].of(used[1]).limit
    return 1.0 if limit is None else limit / mem_get_info(device)[1]


def memory_summary(device: Where = None, abbreviated: bool = False) -> str:
    """What is held, as a text; "" without a GPU. abbreviated: without the counts of calls."""
    cupy = found_cupy()
    if cupy is None:
        return ""
    index = _index(device)
    found, stats = allocator(cupy), memory_stats(index)
    free, total = mem_get_info(index)
    lines = [f"cuda:{index}, memory by {found.name!r}: {human(free)} of {human(total)} free"]
    lines += [f"  {name:<30} {human(stats[name]):>12}" for name in stats if "bytes" in name]
    if not abbreviated:
        lines += [f"  {name:<30} {stats[name]:>12}" for name in stats if name.startswith("num_")]
    return "\n".join(lines)
